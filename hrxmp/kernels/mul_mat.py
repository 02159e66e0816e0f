"""Dispatch of matrix products: which kernel, which tile, for weights [n, k] times rows x [m, k].

Pure functions of traits and sizes, run by the executor's lowering and by warm-up; no device. The
number of rows m chooses between forms and sizes the launch; it is never a parameter of a variant.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels.definition import DeviceTraits, KernelDefinition, arguments
from hrxmp.kernels.keys import Param, Variant
from hrxmp.kernels.launch import Launch

Epilogue = Literal["none", "add", "swiglu"]

MAX_WEIGHTS = 3
LANES = 16

_PLAIN = (DType.F32, DType.F16)
_EPILOGUES = ("none", "add", "swiglu")
_WEIGHTS = "WTYPE LAYOUT K N0 N1 N2 EPILOGUE"
_OPERANDS = "w0:buffer w1:buffer w2:buffer residual:buffer y:buffer"
_STRIDES = "x_stride:int x_offset:int r_stride:int r_offset:int y_stride:int y_offset:int"

DEFINITIONS = (
    KernelDefinition(
        name="mul_mat_vec",
        source="mul_mat_vec.cl",
        entry_point="mul_mat_vec",
        params=(*_WEIGHTS.split(), "NORM", "DOT"),
        args=arguments(
            "m:int x_offset:int r_offset:int y_offset:int eps:float x:buffer norm_w:buffer "
            + _OPERANDS
        ),
    ),
    KernelDefinition(
        name="mul_mat_tile",
        source="mul_mat_tile.cl",
        entry_point="mul_mat_tile",
        params=(*_WEIGHTS.split(), "X_STRIDE", "TILE", "PANEL", "DEPTH", "TOKENS"),
        args=arguments(f"m:int {_STRIDES} x:buffer {_OPERANDS}"),
    ),
    KernelDefinition(
        name="mul_mat_any",
        source="mul_mat_any.cl",
        entry_point="mul_mat_any",
        params=tuple(_WEIGHTS.split()),
        args=arguments(f"m:int {_STRIDES} x:buffer {_OPERANDS}"),
    ),
)


class WeightSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One weight matrix of n rows: its element type and how its bytes lie."""

    dtype: DType
    layout: str
    n: int


class _Product(msgspec.Struct, frozen=True, kw_only=True):
    """A checked call of `mul_mat`."""

    weights: tuple[WeightSpec, ...]
    k: int
    m: int
    norm: bool
    epilogue: Epilogue
    x: tuple[int, int]
    residual: tuple[int, int]
    y: tuple[int, int]
    eps: float

    @property
    def columns(self) -> int:
        """Results a row of x has."""
        first = self.weights[0].n
        return first if self.epilogue == "swiglu" else sum(w.n for w in self.weights)

    @property
    def groups(self) -> int:
        """Row groups whose results are stored apart."""
        counts = [-(-weight.n // LANES) for weight in self.weights]
        return counts[0] if self.epilogue == "swiglu" else sum(counts)

    def params(self) -> tuple[tuple[str, Param], ...]:
        first = self.weights[0]
        rows = [weight.n for weight in self.weights] + [0] * (MAX_WEIGHTS - len(self.weights))
        values = (first.dtype.label, first.layout, self.k, *rows, self.epilogue)
        return tuple(zip(_WEIGHTS.split(), values, strict=True))

    def operands(self) -> tuple[str, ...]:
        """Names for w0, w1, w2, residual, y; an operand that the variant ignores repeats one."""
        names = [f"w{min(i, len(self.weights) - 1)}" for i in range(MAX_WEIGHTS)]
        return (*names, "residual" if self.epilogue == "add" else "y", "y")

    def strides(self) -> tuple[int, ...]:
        return (*self.x, *self.residual, *self.y)

    def flops(self) -> int:
        return 2 * self.m * self.k * sum(weight.n for weight in self.weights)

    def nbytes(self) -> int:
        """Bytes that must move at least once."""
        rows = sum(weight.n for weight in self.weights)
        weights = rows * self.weights[0].dtype.row_bytes(self.k)
        results = self.columns * (2 if self.epilogue == "add" else 1)
        return weights + 4 * self.m * (self.k + results)


def weight_layout(traits: DeviceTraits, dtype: DType, n: int, k: int) -> str:
    """The layout in which the device wants a weight [n, k]: what `layout.pack` is to make.

    UnsupportedError for a dtype that no kernel reads.
    """
    if dtype is DType.I32 or k % dtype.block:
        raise UnsupportedError(f"a {dtype.label} matrix [{n}, {k}] cannot be multiplied")
    plain_rows = dtype in _PLAIN and (k % 32 or not traits.is_cpu)
    return "ggml" if plain_rows else "lane16"


def fuses_norm(traits: DeviceTraits, m: int, layout: str = "lane16") -> bool:
    """Whether `mul_mat` takes `norm=True` for m rows and weights in `layout`: where normalising
    again in every work-group costs less than a launch."""
    return traits.is_cpu and m == 1 and layout == "lane16"


def mul_mat(
    traits: DeviceTraits,
    *,
    weights: tuple[WeightSpec, ...],
    k: int,
    m: int,
    norm: bool = False,
    epilogue: Epilogue = "none",
    x_stride: int | None = None,
    x_offset: int = 0,
    r_stride: int | None = None,
    r_offset: int = 0,
    y_stride: int | None = None,
    y_offset: int = 0,
    eps: float = 0.0,
) -> Launch:
    """y [m, n0 + n1 + n2] = x [m, k] times each weight [n, k] transposed; all f32 but the weights.

    Operands: x, norm_w [k] with `norm` (x is RMS-normalised first; eps), w0, w1, w2 as many as
    `weights`, residual [m, columns] with epilogue "add" (may be y), y. Epilogue "swiglu" takes two
    weights of equal n and gives y [m, n] = silu(x w0) * (x w1). Strides and offsets in elements; a
    stride of None means dense. Raises UnsupportedError for what no kernel does.
    """
    dense = sum(weight.n for weight in weights[: 1 if epilogue == "swiglu" else None])
    product = _Product(
        weights=weights,
        k=k,
        m=m,
        norm=norm,
        epilogue=epilogue,
        x=(k if x_stride is None else x_stride, x_offset),
        residual=(dense if r_stride is None else r_stride, r_offset),
        y=(dense if y_stride is None else y_stride, y_offset),
        eps=eps,
    )
    _check(traits, product)
    if not traits.is_cpu or weights[0].layout == "ggml":
        return _any(traits, product)
    return _vec(traits, product) if m == 1 else _tile(traits, product)


def _check(traits: DeviceTraits, product: _Product) -> None:
    weights, first = product.weights, product.weights[0]
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise UnsupportedError(f"{len(weights)} weights in one product; 1 to {MAX_WEIGHTS} go")
    if any((w.dtype, w.layout) != (first.dtype, first.layout) for w in weights):
        raise UnsupportedError("the weights of one product differ in dtype or layout")
    if product.epilogue not in _EPILOGUES:
        raise UnsupportedError(f"no epilogue {product.epilogue!r}; there are {_EPILOGUES}")
    if product.epilogue == "swiglu" and [w.n for w in weights] != [first.n] * 2:
        raise UnsupportedError("swiglu takes two weights with equally many rows")
    if product.norm and not fuses_norm(traits, product.m, first.layout):
        raise UnsupportedError(f"the norm of {product.m} rows is not fused on this device")
    if first.layout == "ggml" and first.dtype not in _PLAIN:
        raise UnsupportedError(f"a {first.dtype.label} weight must be packed (`weight_layout`)")
    if first.layout != "ggml" and (first.layout != "lane16" or product.k % 32):
        raise UnsupportedError(f"no layout {first.layout!r} for rows of {product.k} elements")


def _vec(traits: DeviceTraits, product: _Product) -> Launch:
    quantized = product.weights[0].dtype.quantized
    dot = ("vnni" if traits.dot_product else "pairs") if quantized else "floats"
    params = (*product.params(), ("NORM", int(product.norm)), ("DOT", dot))
    return Launch(
        variant=Variant(definition="mul_mat_vec", params=params, local_size=(1,)),
        args=(
            product.m,
            product.x[1],
            product.residual[1],
            product.y[1],
            product.eps,
            "x",
            "norm_w" if product.norm else "x",
            *product.operands(),
        ),
        global_size=(min(product.groups, _shares(traits, product)),),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
    )


def _shares(traits: DeviceTraits, product: _Product) -> int:
    """Work-groups of a mat-vec: each reads all of x first, so a short one makes one a core; a long
    one makes more, so that a core that is taken away holds up less."""
    return traits.compute_units * (1 if product.nbytes() < _LONG_BYTES else 4)


_LONG_BYTES = 4 << 20
_TILE, _PANEL, _DEPTH, _TOKENS = 6, 4, 128, 96


def _tile(traits: DeviceTraits, product: _Product) -> Launch:
    tiles = {
        "X_STRIDE": product.x[0],
        "TILE": _TILE,
        "PANEL": _PANEL,
        "DEPTH": _DEPTH,
        "TOKENS": _TOKENS,
    }
    stored = _PANEL // (2 if product.epilogue == "swiglu" else 1)
    return Launch(
        variant=Variant(
            definition="mul_mat_tile", params=(*product.params(), *tiles.items()), local_size=(1, 1)
        ),
        args=(product.m, *product.strides(), "x", *product.operands()),
        global_size=(-(-product.groups // stored), -(-product.m // _TOKENS)),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
    )


def _any(traits: DeviceTraits, product: _Product) -> Launch:
    slices = 1 if traits.is_cpu else 8
    columns = -(-product.columns // LANES) * LANES
    return Launch(
        variant=Variant(
            definition="mul_mat_any", params=product.params(), local_size=(LANES, slices)
        ),
        args=(product.m, *product.strides(), "x", *product.operands()),
        global_size=(columns, product.m * slices),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
    )
