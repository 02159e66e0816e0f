"""Lowering: a graph becomes the commands of a graph program, fused where it pays.

Pure: it sees the graph and the device's traits, never a device. Nodes are visited in order; a
rule may complete later nodes together with its own: a norm with its weight, the matrices that
share an input, a residual, a gate with its up projection, rope with the rows of the caches. What
no rule supports is refused with the node and what is supported.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.executor.graph_program import GraphProgram
from hrxmp.executor.places import Builder, Place, Rows
from hrxmp.graph import Graph, Storage, Tensor
from hrxmp.kernels import dispatch
from hrxmp.kernels.definition import DeviceTraits

Rule = Callable[["Lowering", Tensor], None]


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """A weighted norm that is left to the matrices that read it."""

    x: Tensor
    weight: Tensor | None
    eps: float


def lower(graph: Graph, traits: DeviceTraits, number: int) -> GraphProgram:
    """The program of `graph` on a device with `traits`. UnsupportedError names the node."""
    return Lowering(graph, traits).run(number)


class Lowering:
    """One pass over one graph."""

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self.graph = graph
        self.traits = traits
        self.builder = Builder(graph, traits)
        self.done: set[int] = set()
        self.norms: dict[int, Norm] = {}
        self._readers = _readers(graph)
        self.outputs = {tensor.index for tensor in graph.outputs.values()}

    def run(self, number: int) -> GraphProgram:
        """Lower every node that leads to an effect."""
        for node in self.graph.nodes:
            if node.index not in self.done and node.op not in ("none", "view"):
                self._lower(node)
        return self.builder.program(number)

    def finish(self, *nodes: Tensor) -> None:
        """These nodes are complete; no rule sees them again."""
        self.done.update(node.index for node in nodes)

    def readers(self, tensor: Tensor) -> list[Tensor]:
        """The nodes that read a tensor, also through views."""
        found = []
        for reader in self._readers[tensor.index]:
            found += self.readers(reader) if reader.op == "view" else [reader]
        return found

    def only_reader(self, tensor: Tensor, op: str) -> Tensor | None:
        """The one node that reads a tensor, if it is a pending `op`, and nobody else sees it."""
        readers = self.readers(tensor)
        seen = {tensor.index, *(view.index for view in self._views(tensor))} & self.outputs
        if seen or len(readers) != 1 or readers[0].op != op or readers[0].index in self.done:
            return None
        return readers[0]

    def computed(self, tensor: Tensor) -> bool:
        """Whether a tensor's elements are there before the command that comes next."""
        root = tensor
        while root.op == "view" and root.base is not None:
            root = root.base
        return root.op == "none" or root.index in self.done

    def _views(self, tensor: Tensor) -> list[Tensor]:
        views = [reader for reader in self._readers[tensor.index] if reader.op == "view"]
        return views + [deeper for view in views for deeper in self._views(view)]

    def _lower(self, node: Tensor) -> None:
        rule = RULES.get(node.op)
        if rule is None:
            raise UnsupportedError(f"{node.describe()}: supported ops are {', '.join(RULES)}")
        try:
            rule(self, node)
        except UnsupportedError as error:
            raise UnsupportedError(f"{node.describe()}: {error.message}") from None
        self.finish(node)


def _readers(graph: Graph) -> list[list[Tensor]]:
    readers: list[list[Tensor]] = [[] for _ in graph.nodes]
    for node in graph.nodes:
        for source in dict.fromkeys(node.sources):
            readers[source.index].append(node)
    return readers


# -- arithmetic ------------------------------------------------------------------------------


def _binary(low: Lowering, node: Tensor) -> None:
    a, b = node.sources
    for source in (a, b):
        low.builder.want(source, DType.F32)
    views = {"a": low.builder.view(a), "b": low.builder.view(b)}
    places = {"a": low.builder.place(a), "b": low.builder.place(b)}
    y = low.builder.new(node)
    launch = dispatch.binary(low.traits, op=node.op, y=low.builder.view(node), **views)
    low.builder.emit(node, launch, y=y, **places)


def _unary(low: Lowering, node: Tensor) -> None:
    (x,) = node.sources
    low.builder.want(x, DType.F32)
    source = low.builder.dense(x)
    y = low.builder.new(node)
    function = dispatch.scale if node.op == "scale" else dispatch.silu
    launch = function(low.traits, count=node.size, x_offset=source.offset // 4, **node.params)
    low.builder.emit(node, launch, x=source, y=y)


def _swiglu(low: Lowering, node: Tensor) -> None:
    gate, up = (low.builder.rows(source) for source in node.sources)
    y = low.builder.new(node)
    launch = dispatch.swiglu(
        low.traits, k=node.shape[-1], m=_row_count(node), gate_stride=gate.stride,
        gate_offset=gate.offset, up_stride=up.stride, up_offset=up.offset,
    )  # fmt: skip
    low.builder.emit(node, launch, gate=gate.place, up=up.place, y=y)


def _soft_max(low: Lowering, node: Tensor) -> None:
    x = low.builder.rows(node.sources[0])
    operands, mask_args = {"x": x.place}, {}
    if len(node.sources) == 2:
        mask = low.builder.rows(node.sources[1])
        operands["mask"] = mask.place
        mask_args = {"mask_rows": _row_count(node.sources[1]), "mask_stride": mask.stride,
                     "mask_offset": mask.offset}  # fmt: skip
    operands["y"] = low.builder.new(node)
    launch = dispatch.soft_max(
        low.traits, k=node.shape[-1], m=_row_count(node), scale=node.params["scale"],
        x_stride=x.stride, x_offset=x.offset, **mask_args,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands)


def _argmax(low: Lowering, node: Tensor) -> None:
    (source,) = node.sources
    x = low.builder.rows(source)
    launch = dispatch.argmax(
        low.traits, k=source.shape[-1], m=_row_count(source), x_stride=x.stride, x_offset=x.offset
    )
    low.builder.emit(node, launch, x=x.place, y=low.builder.new(node))


# -- rows and copies -------------------------------------------------------------------------


def _get_rows(low: Lowering, node: Tensor) -> None:
    table, ids = node.sources
    place = _whole(low, table)
    launch = dispatch.get_rows(
        low.traits, dtype=table.dtype, layout=_layout(place), k=node.shape[1], m=node.shape[0],
        table_rows=table.shape[0],
    )  # fmt: skip
    low.builder.emit(node, launch, table=place, ids=_index(low, ids), y=low.builder.new(node))


def _set_rows(low: Lowering, node: Tensor) -> None:
    cache, rows, ids = node.sources
    target = low.builder.rows(cache, cache.dtype, axes=1)
    x = low.builder.rows(rows, axes=1)
    launch = dispatch.set_rows(
        low.traits, k=cache.size // cache.shape[0], m=ids.shape[0], dst=cache.dtype,
        cache_rows=cache.shape[0], x_stride=x.stride, x_offset=x.offset,
        cache_stride=target.stride, cache_offset=target.offset,
    )  # fmt: skip
    low.builder.emit(node, launch, x=x.place, ids=_index(low, ids), cache=target.place)


def _cpy(low: Lowering, node: Tensor) -> None:
    x, to = node.sources
    source, target = low.builder.place(x), low.builder.place(to)
    views = {"x": low.builder.view(x, source), "y": low.builder.view(to, target)}
    launch = dispatch.cpy(low.traits, src=x.dtype, dst=to.dtype, **views)
    low.builder.emit(node, launch, x=source, y=target)


def _cont(low: Lowering, node: Tensor) -> None:
    source = low.builder.place(node.sources[0])
    low.builder.copy(node.sources[0], source, low.builder.new(node))


# -- norms and matrices ----------------------------------------------------------------------


def _rms_norm(low: Lowering, node: Tensor) -> None:
    product = low.only_reader(node, "mul")
    weight = product and _norm_weight(low, node, product)
    eps = node.params["eps"]
    if product is None or weight is None:
        _emit_norm(low, node, Norm(x=node.sources[0], weight=None, eps=eps))
        return
    norm = Norm(x=node.sources[0], weight=weight, eps=eps)
    low.finish(product)
    if _norm_fuses(low, product):
        low.norms[product.index] = norm
    else:
        _emit_norm(low, product, norm)


def _norm_weight(low: Lowering, node: Tensor, product: Tensor) -> Tensor | None:
    """The weight that `product` multiplies the norm by, when it is one row that is there."""
    others = [source for source in product.sources if source is not node]
    if len(others) != 1 or product.sources[0] is not node:
        return None
    weight = others[0]
    plain = weight.dtype is DType.F32 and weight.shape == node.shape[-1:] and weight.contiguous
    return weight if plain and low.computed(weight) and low.builder.place(weight).offset == 0 else None


def _norm_fuses(low: Lowering, product: Tensor) -> bool:
    """Whether every reader of the normalised rows is a matrix that can normalise them itself."""
    readers = low.readers(product)
    rows = _row_count(product)
    return bool(readers) and product.index not in low.outputs and all(
        reader.op == "mul_mat" and reader.sources[1] is product
        and dispatch.fuses_norm(low.traits, rows, _layout(low.builder.place(reader.sources[0])))
        for reader in readers
    )  # fmt: skip


def _emit_norm(low: Lowering, node: Tensor, norm: Norm) -> None:
    x = low.builder.rows(norm.x)
    operands = {"x": x.place}
    if norm.weight is not None:
        operands["w"] = low.builder.place(norm.weight)
    launch = dispatch.rms_norm(
        low.traits, k=node.shape[-1], m=_row_count(node), eps=norm.eps,
        weighted=norm.weight is not None, x_stride=x.stride, x_offset=x.offset,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands, y=low.builder.new(node))


def _mul_mat(low: Lowering, node: Tensor) -> None:
    """One product, or all products of the same rows that can share a launch."""
    siblings = _siblings(low, node)
    gate = low.only_reader(node, "swiglu")
    if gate is not None and len(siblings) == 2 and gate.sources == tuple(siblings):
        low.finish(gate, *siblings)
        _emit_product(low, siblings, gate, "swiglu", low.builder.new(gate))
    elif len(siblings) > 1:
        low.finish(*siblings)
        _emit_product(low, siblings, node, "none", _side_by_side(low, siblings))
    else:
        _emit_single(low, node)


def _siblings(low: Lowering, node: Tensor) -> list[Tensor]:
    """The node, and later products of the same rows with weights of the same kind."""
    weight, x = node.sources
    kind = weight.dtype, _layout(low.builder.place(weight))
    found = [
        other
        for other in low.readers(x)
        if other.op == "mul_mat" and other.sources[1] is x and other.index >= node.index
        and other.index not in low.done and low.computed(other.sources[0])
        and (other.sources[0].dtype, _layout(low.builder.place(other.sources[0]))) == kind
    ]  # fmt: skip
    return found[: dispatch.MAX_WEIGHTS]


def _side_by_side(low: Lowering, products: list[Tensor]) -> Place:
    """One value for all results; each product's rows stand in it with a common stride."""
    rows = products[0].shape[0]
    width = sum(product.shape[1] for product in products)
    whole = low.builder.fresh(4 * rows * width, (4 * width, 4))
    offset = 0
    for product in products:
        low.builder.put(
            product, Place(memory=whole.memory, strides=whole.strides, offset=4 * offset)
        )
        offset += product.shape[1]
    return whole


def _emit_single(low: Lowering, node: Tensor) -> None:
    total = low.only_reader(node, "add")
    if total is not None and total.shape == node.shape:
        residual = next((s for s in total.sources if s.root is not node.root), None)
        if residual is not None and residual.shape == node.shape and low.computed(residual):
            low.finish(total)
            rows = low.builder.rows(residual)
            _emit_product(low, [node], total, "add", low.builder.new(total), rows)
            return
    _emit_product(low, [node], node, "none", low.builder.new(node))


def _emit_product(
    low: Lowering,
    products: list[Tensor],
    node: Tensor,
    epilogue: dispatch.Epilogue,
    y: Place,
    residual: Rows | None = None,
) -> None:
    norm = low.norms.get(products[0].sources[1].index)
    x = low.builder.rows(norm.x if norm else products[0].sources[1])
    weights = [product.sources[0] for product in products]
    places = [_whole(low, weight) for weight in weights]
    operands = {"x": x.place, **{f"w{i}": place for i, place in enumerate(places)}, "y": y}
    if norm and norm.weight is not None:
        operands["norm_w"] = low.builder.place(norm.weight)
    if residual:
        operands["residual"] = residual.place
    launch = dispatch.mul_mat(
        low.traits,
        weights=tuple(
            dispatch.WeightSpec(dtype=weight.dtype, layout=_layout(place), n=weight.shape[0])
            for weight, place in zip(weights, places, strict=True)
        ),
        k=weights[0].shape[1], m=products[0].shape[0], norm=norm is not None, epilogue=epilogue,
        eps=norm.eps if norm else 0.0, x_stride=x.stride, x_offset=x.offset,
        r_stride=residual.stride if residual else None,
        r_offset=residual.offset if residual else 0,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands)


# -- attention -------------------------------------------------------------------------------


def _rope(low: Lowering, node: Tensor) -> None:
    stored = _rope_with_rows(low, node)
    if stored is not None:
        _emit_rope_set_rows(low, node, stored)
        return
    x, positions, *factors = node.sources
    rows = low.builder.rows(x, axes=1)
    operands = {"x": rows.place, "positions": _index(low, positions)}
    if factors:
        operands["factors"] = _whole(low, factors[0])
    launch = dispatch.rope(
        low.traits, head_dim=x.shape[2], n_heads=x.shape[1], m=x.shape[0],
        factors=bool(factors), x_stride=rows.stride, x_offset=rows.offset, **node.params,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands, y=low.builder.new(node))


class RopeRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rotated keys and plain values on their way into the caches, beside the queries."""

    rope_k: Tensor
    set_k: Tensor
    set_v: Tensor


def _rope_with_rows(low: Lowering, node: Tensor) -> RopeRows | None:
    """The rest of the pattern when `node` rotates queries that lie beside their keys and values."""
    x, positions = node.sources[:2]
    if low.only_reader(x.root, "rope") is not node:
        return None
    pending = [n for n in low.graph.nodes[node.index :] if n.index not in low.done]
    width = 4 * x.shape[1] * x.shape[2]
    rope_k = next((n for n in pending if n.op == "rope" and n is not node
                   and n.sources[1:] == node.sources[1:] and n.params == node.params
                   and _beside(low, x, n.sources[0], width)), None)  # fmt: skip
    set_k = rope_k and low.only_reader(rope_k, "set_rows")
    if rope_k is None or set_k is None or set_k.sources[2] is not positions:
        return None
    width += 4 * rope_k.shape[1] * rope_k.shape[2]
    set_v = next((n for n in pending if n.op == "set_rows" and n.sources[2] is positions
                  and _beside(low, x, n.sources[1], width)), None)  # fmt: skip
    if set_v is None or set_v.shape != set_k.shape or set_v.dtype is not set_k.dtype:
        return None
    caches = [low.builder.place(node.sources[0]) for node in (set_k, set_v)]
    whole = all(place.offset == 0 for place in caches) and set_k.contiguous and set_v.contiguous
    return RopeRows(rope_k=rope_k, set_k=set_k, set_v=set_v) if whole else None


def _beside(low: Lowering, first: Tensor, other: Tensor, offset: int) -> bool:
    """Whether `other` is computed, and lies `offset` bytes after `first` in the same rows."""
    if not low.computed(other) or other.shape[0] != first.shape[0]:
        return False
    a, b = low.builder.place(first), low.builder.place(other)
    return a.memory == b.memory and a.strides[0] == b.strides[0] and b.offset == a.offset + offset


def _emit_rope_set_rows(low: Lowering, node: Tensor, stored: RopeRows) -> None:
    x, positions, *factors = node.sources
    place, cache = low.builder.place(x), stored.set_k
    operands = {"qkv": place, "positions": _index(low, positions)}
    if factors:
        operands["factors"] = _whole(low, factors[0])
    operands["k_cache"] = low.builder.place(stored.set_k.sources[0])
    operands["v_cache"] = low.builder.place(stored.set_v.sources[0])
    launch = dispatch.rope_set_rows(
        low.traits, head_dim=x.shape[2], n_heads=x.shape[1], n_kv_heads=stored.rope_k.shape[1],
        m=x.shape[0], kv_dtype=cache.dtype, kv_capacity=cache.shape[0], factors=bool(factors),
        stride=place.strides[0] // 4, offset=place.offset // 4, **node.params,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands)
    low.builder.put(node, place)
    low.finish(stored.rope_k, stored.set_k, stored.set_v)


def _flash_attn(low: Lowering, node: Tensor) -> None:
    q, k, v, positions = node.sources
    low.builder.want(k, v.dtype)
    rows = low.builder.rows(q, axes=1)
    operands = {"q": rows.place, "k_cache": _whole(low, k), "v_cache": _whole(low, v)}
    launch = dispatch.flash_attn(
        low.traits, head_dim=q.shape[2], n_heads=q.shape[1], n_kv_heads=k.shape[1],
        m=q.shape[0], kv_dtype=k.dtype, kv_capacity=k.shape[0], scale=node.params["scale"],
        q_stride=rows.stride, q_offset=rows.offset,
    )  # fmt: skip
    operands["positions"] = _index(low, positions)
    low.builder.emit(node, launch, **operands, y=low.builder.new(node))


# -- helpers ---------------------------------------------------------------------------------


def _row_count(tensor: Tensor) -> int:
    return tensor.size // tensor.shape[-1]


def _layout(place: Place) -> str:
    return place.memory.layout if isinstance(place.memory, Storage) else "ggml"


def _whole(low: Lowering, tensor: Tensor) -> Place:
    """A tensor that kernels read from its memory's first byte: a weight, a cache."""
    place = low.builder.dense(tensor)
    if place.offset:
        raise UnsupportedError(f"its source {tensor.describe()} must begin its storage")
    return place


def _index(low: Lowering, ids: Tensor) -> Place:
    """Positions or row numbers, i32, dense from the first byte of their memory."""
    low.builder.want(ids, DType.I32)
    place = low.builder.dense(ids)
    if place.offset:
        target = low.builder.fresh(ids.nbytes, place.strides)
        low.builder.copy(ids, place, target)
        return target
    return place


RULES: dict[str, Rule] = {
    "add": _binary,
    "mul": _binary,
    "scale": _unary,
    "silu": _unary,
    "swiglu": _swiglu,
    "rms_norm": _rms_norm,
    "soft_max": _soft_max,
    "argmax": _argmax,
    "get_rows": _get_rows,
    "set_rows": _set_rows,
    "cpy": _cpy,
    "cont": _cont,
    "mul_mat": _mul_mat,
    "rope": _rope,
    "flash_attn": _flash_attn,
}
