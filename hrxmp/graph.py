"""Graphs: nodes and tensors that a caller builds, with ggml's op names. No device, no buffers.

Shapes are in numpy order (the last axis is contiguous), strides and offsets in bytes. A tensor is
a view of a `Storage`: memory that the caller owns (weights, caches, inputs), or memory that the
executor plans for intermediate results. Two graphs with equal `digest()` do the same work on
equally shaped memory; which memory it is does not matter for it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import GraphError

Shape = tuple[int, ...]
MAX_DIMS = 4
_ids = itertools.count(1)


class Storage:
    """A handle for one allocation; the executor maps it to device memory.

    `layout` says how a weight matrix is arranged: `ggml`, or a packed layout of the device.
    """

    __slots__ = ("__weakref__", "layout", "name", "nbytes", "uid")

    def __init__(self, nbytes: int, name: str = "", layout: str = "ggml") -> None:
        self.uid = next(_ids)
        self.nbytes = nbytes
        self.name = name
        self.layout = layout

    def __repr__(self) -> str:
        return f"Storage({self.name or self.uid}, {self.nbytes} bytes, {self.layout})"


class Tensor:
    """One value of a graph: an op applied to sources, or a leaf (`op` is "none")."""

    __slots__ = (
        "base", "dtype", "graph", "index", "name", "offset",
        "op", "params", "shape", "sources", "storage", "strides",
    )  # fmt: skip

    def __init__(
        self,
        graph: Graph,
        op: str,
        dtype: DType,
        shape: Shape,
        *,
        sources: tuple[Tensor, ...] = (),
        params: dict[str, Any] | None = None,
        strides: Shape | None = None,
        offset: int = 0,
        storage: Storage | None = None,
        base: Tensor | None = None,
        name: str = "",
    ) -> None:
        self.graph = graph
        self.op = op
        self.dtype = dtype
        self.shape = shape
        self.strides = contiguous_strides(shape, dtype) if strides is None else strides
        self.offset = offset
        self.sources = sources
        self.params = params or {}
        self.storage = storage
        self.base = base
        self.index = len(graph.nodes)
        self.name = name or f"{op}-{self.index}"
        graph.add_node(self)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements when contiguous."""
        return self.dtype.row_bytes(self.size)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other in row-major order."""
        return self.strides == contiguous_strides(self.shape, self.dtype)

    @property
    def root(self) -> Tensor:
        """The tensor whose memory this one lies in."""
        return self if self.base is None else self.base.root

    def view(
        self, shape: Shape, *, strides: Shape | None = None, offset: int = 0, name: str = ""
    ) -> Tensor:
        """The same memory with another shape, strides and additional offset (bytes)."""
        if strides is None:
            strides = contiguous_strides(shape, self.dtype)
            if not self.contiguous:
                raise GraphError(f"{self.describe()}: a view of a strided tensor needs strides")
        tensor = Tensor(
            self.graph, "view", self.dtype, _shape(shape), sources=(self,), strides=strides,
            offset=self.offset + offset, storage=self.storage, base=self, name=name,
        )  # fmt: skip
        _check_bounds(tensor)
        return tensor

    def reshape(self, shape: Shape, name: str = "") -> Tensor:
        """The same elements of a contiguous tensor under another shape."""
        if math.prod(shape) != self.size:
            raise GraphError(f"{self.describe()}: cannot reshape to {list(shape)}")
        return self.view(shape, name=name)

    def permute(self, axes: tuple[int, ...]) -> Tensor:
        """The same memory with its axes in another order."""
        if sorted(axes) != list(range(len(self.shape))):
            raise GraphError(f"{self.describe()}: {axes} is no order of its axes")
        return self.view(
            tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes)
        )

    def describe(self) -> str:
        """The node for an error text, e.g. `node 7 mul_mat "q" f32 [64, 576]`."""
        return f'node {self.index} {self.op} "{self.name}" {self.dtype.label} {list(self.shape)}'

    def __repr__(self) -> str:
        return f"<{self.describe()}>"


class Graph:
    """Nodes in the order in which they were added, which is an order of execution.

    `uid` names the graph for caching: 0 means that nothing about it is kept.
    """

    def __init__(self, uid: int = 0) -> None:
        if uid < 0:
            raise GraphError(f"graph uid {uid} is negative")
        self.uid = uid
        self.nodes: list[Tensor] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self._digest = ""
        self._storages: tuple[Storage, ...] = ()
        self._memory_key = ""

    # -- leaves ------------------------------------------------------------------------------

    def input(
        self, name: str, shape: Shape, dtype: DType = DType.F32, storage: Storage | None = None
    ) -> Tensor:
        """A value that each execution brings; its memory belongs to this graph by default."""
        if name in self.inputs:
            raise GraphError(f"input {name!r} is there twice")
        if dtype.quantized:
            raise GraphError(f"input {name!r}: {dtype.label} cannot be an input")
        nbytes = dtype.row_bytes(math.prod(shape))
        tensor = self.tensor(name, shape, dtype, storage or Storage(nbytes, name))
        self.inputs[name] = tensor
        return tensor

    def tensor(
        self, name: str, shape: Shape, dtype: DType, storage: Storage, offset: int = 0
    ) -> Tensor:
        """A value in memory that outlives the graph: a weight, a cache."""
        if shape and shape[-1] % dtype.block:
            raise GraphError(f"{name}: {shape[-1]} columns are no multiple of {dtype.label}'s "
                             f"block of {dtype.block}")  # fmt: skip
        leaf = Tensor(self, "none", dtype, _shape(shape), storage=storage, offset=offset, name=name)
        _check_bounds(leaf)
        return leaf

    def output(self, tensor: Tensor, name: str = "") -> Tensor:
        """Mark a value that the caller reads after each execution."""
        self._own(tensor)
        if name in self.outputs:
            raise GraphError(f"output {name!r} is there twice")
        self.outputs[name or tensor.name] = tensor
        self._digest = ""
        return tensor

    # -- ops, named as in ggml ---------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a + b; b repeats over a's leading axes."""
        return self._binary("add", a, b, name)

    def mul(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a * b; b repeats over a's leading axes."""
        return self._binary("mul", a, b, name)

    def scale(self, x: Tensor, factor: float, bias: float = 0.0, name: str = "") -> Tensor:
        """x * factor + bias."""
        return self._op("scale", x.shape, (x,), {"factor": factor, "bias": bias}, name)

    def silu(self, x: Tensor, name: str = "") -> Tensor:
        """x * sigmoid(x)."""
        return self._op("silu", x.shape, (x,), {}, name)

    def swiglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """silu(gate) * up."""
        if gate.shape != up.shape:
            raise GraphError(f"swiglu: {gate.describe()} and {up.describe()} differ in shape")
        return self._op("swiglu", gate.shape, (gate, up), {}, name)

    def rms_norm(self, x: Tensor, eps: float, name: str = "") -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the last axis."""
        return self._op("rms_norm", x.shape, (x,), {"eps": eps}, name)

    def soft_max(
        self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None, name: str = ""
    ) -> Tensor:
        """softmax(x * scale + mask) over the last axis."""
        sources = (x,) if mask is None else (x, mask)
        if mask is not None and mask.shape != x.shape[-len(mask.shape) :]:
            raise GraphError(f"soft_max: mask {mask.describe()} does not fit {x.describe()}")
        return self._op("soft_max", x.shape, sources, {"scale": scale}, name)

    def mul_mat(self, w: Tensor, x: Tensor, name: str = "") -> Tensor:
        """x wᵀ: w [n, k] and x [m, k] give [m, n]."""
        if len(w.shape) != 2 or len(x.shape) != 2 or w.shape[1] != x.shape[1]:
            raise GraphError(f"mul_mat: {w.describe()} and {x.describe()}: want [n, k] and [m, k]")
        return self._op("mul_mat", (x.shape[0], w.shape[0]), (w, x), {}, name)

    def get_rows(self, table: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """table[ids]: a table [rows, k] of any dtype and ids [m] (i32) give [m, k] in f32."""
        if len(table.shape) != 2 or len(ids.shape) != 1 or ids.dtype is not DType.I32:
            raise GraphError(
                f"get_rows: {table.describe()}, {ids.describe()}: want [r, k], i32 [m]"
            )
        return self._op("get_rows", (ids.shape[0], table.shape[1]), (table, ids), {}, name)

    def set_rows(self, cache: Tensor, rows: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """Write cache[ids] = rows and return the cache."""
        if (
            rows.size // max(ids.size, 1) != cache.size // cache.shape[0]
            or ids.dtype is not DType.I32
        ):
            raise GraphError(f"set_rows: {rows.describe()} does not fit {cache.describe()}")
        return Tensor(
            self, "set_rows", cache.dtype, cache.shape, sources=(cache, rows, ids),
            strides=cache.strides, offset=cache.offset, storage=cache.storage, base=cache,
            name=name,
        )  # fmt: skip

    def rope(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        n_dims: int,
        mode: str = "norm",
        freq_base: float = 10000.0,
        freq_scale: float = 1.0,
        factors: Tensor | None = None,
        name: str = "",
    ) -> Tensor:
        """Rotary embedding of x [m, heads, head_dim] at positions [m] (Su et al., 2021).

        mode "norm" rotates neighbours (2i, 2i+1), "neox" halves (i, i + n_dims/2).
        """
        if len(x.shape) != 3 or positions.shape != x.shape[:1] or positions.dtype is not DType.I32:
            raise GraphError(
                f"rope: {x.describe()}, {positions.describe()}: want [m, h, d], i32 [m]"
            )
        if mode not in ("norm", "neox") or n_dims % 2 or not 0 < n_dims <= x.shape[2]:
            raise GraphError(f"rope: {x.describe()}: mode {mode!r} with n_dims {n_dims}")
        sources = (x, positions) if factors is None else (x, positions, factors)
        params = {"n_dims": n_dims, "mode": mode, "freq_base": freq_base, "freq_scale": freq_scale}
        return self._op("rope", x.shape, sources, params, name)

    def flash_attn(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float, name: str = ""
    ) -> Tensor:
        """Causal attention of q [m, heads, d] over caches [capacity, kv_heads, d]: [m, heads * d].

        Query i sees the cache rows 0 to positions[i]; the length is a run-time value. Caches are
        read in place where they are permuted views of [kv_heads, capacity, d], else copied.
        """
        if len(q.shape) != 3 or k.shape != v.shape or len(k.shape) != 3 or q.shape[2] != k.shape[2]:
            raise GraphError(f"flash_attn: {q.describe()}, {k.describe()}, {v.describe()}")
        if q.shape[1] % k.shape[1]:
            raise GraphError(f"flash_attn: {q.shape[1]} heads over {k.shape[1]} KV heads")
        shape = (q.shape[0], q.shape[1] * q.shape[2])
        return self._op("flash_attn", shape, (q, k, v, positions), {"scale": scale}, name)

    def argmax(self, x: Tensor, name: str = "") -> Tensor:
        """Index (i32) of the largest element of each row; the first of equals."""
        return self._op("argmax", x.shape[:-1], (x,), {}, name, DType.I32)

    def cpy(self, x: Tensor, to: Tensor, name: str = "") -> Tensor:
        """Copy x into `to` (any strides, f32 and f16 converted) and return `to`."""
        if x.size != to.size:
            raise GraphError(f"cpy: {x.describe()} does not fit {to.describe()}")
        return Tensor(
            self, "cpy", to.dtype, to.shape, sources=(x, to), strides=to.strides,
            offset=to.offset, storage=to.storage, base=to, name=name,
        )  # fmt: skip

    def cont(self, x: Tensor, name: str = "") -> Tensor:
        """x as a contiguous tensor of its own."""
        return self._op("cont", x.shape, (x,), {}, name, x.dtype)

    # -- identity ----------------------------------------------------------------------------

    def digest(self) -> str:
        """SHA-256 of the structure: ops, shapes, strides, parameters and who shares memory."""
        if not self._digest:
            self._storages = tuple(dict.fromkeys(t.storage for t in self.nodes if t.storage))
            self._memory_key = " ".join(str(storage.uid) for storage in self._storages)
            slots = {storage: i for i, storage in enumerate(self._storages)}
            rows = [
                (t.op, t.dtype.label, t.shape, t.strides, t.offset, [s.index for s in t.sources],
                 t.params, t.storage and (slots[t.storage], t.storage.nbytes, t.storage.layout))
                for t in self.nodes
            ]  # fmt: skip
            outputs = {name: t.index for name, t in self.outputs.items()}
            inputs = {name: t.index for name, t in self.inputs.items()}
            text = msgspec.json.encode((rows, inputs, outputs), order="sorted")
            self._digest = hashlib.sha256(text).hexdigest()
        return self._digest

    def storages(self) -> tuple[Storage, ...]:
        """The caller's memory that the graph touches, in order of first appearance."""
        self.digest()
        return self._storages

    def memory_key(self) -> str:
        """Equal for two graphs that touch the same memory in the same order of appearance."""
        self.digest()
        return self._memory_key

    def add_node(self, tensor: Tensor) -> None:
        """Append a node; only `Tensor` calls this."""
        self.nodes.append(tensor)
        self._digest = ""

    def _binary(self, op: str, a: Tensor, b: Tensor, name: str) -> Tensor:
        if len(b.shape) > len(a.shape) or b.shape != a.shape[len(a.shape) - len(b.shape) :]:
            raise GraphError(f"{op}: {b.describe()} does not repeat over {a.describe()}")
        return self._op(op, a.shape, (a, b), {}, name)

    def _op(
        self, op: str, shape: Shape, sources: tuple[Tensor, ...], params: dict[str, Any],
        name: str, dtype: DType = DType.F32,
    ) -> Tensor:  # fmt: skip
        for source in sources:
            self._own(source)
        return Tensor(self, op, dtype, shape, sources=sources, params=params, name=name)

    def _own(self, tensor: Tensor) -> None:
        if tensor.graph is not self:
            raise GraphError(f"{tensor.describe()} belongs to another graph")


def contiguous_strides(shape: Shape, dtype: DType) -> Shape:
    """Row-major strides in bytes; of a block format, the last is the bytes of one block."""
    if not shape:
        return ()
    strides, step = [dtype.nbytes], dtype.row_bytes(shape[-1])
    for length in reversed(shape[1:] and shape[:-1]):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _shape(shape: Shape) -> Shape:
    if len(shape) > MAX_DIMS or any(length < 1 for length in shape):
        raise GraphError(f"shape {list(shape)}: 1 to {MAX_DIMS} axes of at least 1 are supported")
    return tuple(int(length) for length in shape)


def _check_bounds(tensor: Tensor) -> None:
    """A leaf or view must lie inside its memory."""
    if tensor.offset < 0 or any(stride < 0 for stride in tensor.strides):
        raise GraphError(f"{tensor.describe()}: negative offset or stride")
    blocks = (*tensor.shape[:-1], tensor.shape[-1] // tensor.dtype.block) if tensor.shape else ()
    reach = sum((n - 1) * s for n, s in zip(blocks, tensor.strides, strict=True))
    end = tensor.offset + reach + tensor.dtype.nbytes
    root = tensor.root
    room = tensor.storage.nbytes if tensor.storage else root.offset + root.nbytes
    # A packed layout pads rows, so only its owner knows the bytes of a row.
    if end > room and not (tensor.storage and tensor.storage.layout != "ggml"):
        raise GraphError(f"{tensor.describe()}: ends at byte {end} of {room}")
