"""Dispatch of matrix products: which kernel, which tile, for weights [n, k] times rows x [m, k].

Pure functions of traits and sizes, run by the executor's lowering and by warm-up; no device. The
number of rows m chooses between forms and sizes the launch; it is never a parameter of a variant.
"""

from __future__ import annotations

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels import nvidia
from hrxmp.kernels.choices import Choices, choices
from hrxmp.kernels.definition import DeviceTraits, KernelDefinition, arguments
from hrxmp.kernels.keys import Param, Params, Variant
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.product import MAX_WEIGHTS, OPERANDS, STRIDES, Epilogue, Product, WeightSpec

__all__ = ["MAX_WEIGHTS", "Epilogue", "WeightSpec", "fuses_norm", "mul_mat", "weight_layout"]

LANES = 16

_PLAIN = (DType.F32, DType.F16)
_WEIGHTS = "W0 W1 W2 LAYOUT K N0 N1 N2 EPILOGUE"

DEFINITIONS = (
    KernelDefinition(
        name="mul_mat_vec",
        source="mul_mat_vec.cl",
        entry_point="mul_mat_vec",
        params=(*_WEIGHTS.split(), "NORM", "DOT"),
        args=arguments(
            "m:int x_offset:int r_offset:int y_offset:int eps:float x:buffer norm_w:buffer "
            + OPERANDS
        ),
    ),
    KernelDefinition(
        name="mul_mat_tile",
        source="mul_mat_tile.cl",
        entry_point="mul_mat_tile",
        params=(*_WEIGHTS.split(), "X_STRIDE", "TILE", "PANEL", "DEPTH", "TOKENS"),
        args=arguments(f"m:int {STRIDES} x:buffer {OPERANDS}"),
    ),
    KernelDefinition(
        name="mul_mat_amx",
        source="mul_mat_amx.cl",
        entry_point="mul_mat_amx",
        params=(*_WEIGHTS.split(), "DEPTH", "TOKENS"),
        args=arguments(f"m:int {STRIDES} x:buffer {OPERANDS}"),
    ),
    KernelDefinition(
        name="mul_mat_any",
        source="mul_mat_any.cl",
        entry_point="mul_mat_any",
        params=tuple(_WEIGHTS.split()),
        args=arguments(f"m:int {STRIDES} x:buffer {OPERANDS}"),
    ),
)


def weight_layout(traits: DeviceTraits, dtype: DType, n: int, k: int) -> str:
    """The layout in which the device wants a weight [n, k]: what `layout.pack` is to make.

    UnsupportedError for a dtype that no kernel reads.
    """
    if dtype is DType.I32 or k % dtype.block:
        raise UnsupportedError(f"a {dtype.label} matrix [{n}, {k}] cannot be multiplied")
    if traits.form == "nvidia":
        return nvidia.weight_layout(dtype)
    plain_rows = dtype in _PLAIN and (k % 32 or not traits.is_cpu)
    return "ggml" if plain_rows else "lane16"


def fuses_norm(traits: DeviceTraits, m: int, layout: str = "lane16") -> bool:
    """Whether `mul_mat` takes `norm=True` for m rows and weights in `layout`: where normalising
    again in every work-group costs less than a launch."""
    if traits.form == "nvidia":
        return m == 1
    return traits.is_cpu and m == 1 and layout == "lane16"


def mul_mat(
    traits: DeviceTraits,
    *,
    weights: tuple[WeightSpec, ...],
    k: int,
    m: int,
    many: bool = False,
    norm: bool = False,
    packed: bool = False,
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
    stride of None means dense. With `many`, one row takes the kernel that many rows would. With
    `packed`, x is what `pack_rows` made. Raises UnsupportedError for what no kernel does.
    """
    dense = sum(weight.n for weight in weights[: 1 if epilogue == "swiglu" else None])
    product = Product(
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
    product.check()
    if packed:
        return nvidia.mul_mat_packed(traits, product)
    if nvidia.multiplies(traits, product):
        return nvidia.mul_mat(traits, product)
    _check(traits, product)
    if not traits.is_cpu or weights[0].layout == "ggml":
        return _any(traits, product)
    if m == 1 and not many:
        return _vec(traits, product)
    return _amx(traits, product) or _tile(traits, product)


def _check(traits: DeviceTraits, product: Product) -> None:
    weights, first = product.weights, product.weights[0]
    if any((w.layout, w.dtype.quantized) != (first.layout, first.dtype.quantized) for w in weights):
        raise UnsupportedError(
            "the weights of one product differ in layout, or only some have blocks"
        )
    if not first.dtype.quantized and any(w.dtype is not first.dtype for w in weights):
        raise UnsupportedError("f16 and f32 weights do not go into one product")
    if product.norm and not fuses_norm(traits, product.m, first.layout):
        raise UnsupportedError(f"the norm of {product.m} rows is not fused on this device")
    if first.layout == "ggml" and first.dtype not in _PLAIN:
        raise UnsupportedError(f"a {first.dtype.label} weight must be packed (`weight_layout`)")
    if first.layout != "ggml" and (first.layout != "lane16" or product.k % 32):
        raise UnsupportedError(f"no layout {first.layout!r} for rows of {product.k} elements")


def _params(product: Product) -> Params:
    weights = product.weights
    types = [weights[i if i < len(weights) else 0].dtype.label for i in range(MAX_WEIGHTS)]
    values: tuple[Param, ...] = (
        *types,
        weights[0].layout,
        product.k,
        *product.rows,
        product.epilogue,
    )
    return tuple(zip(_WEIGHTS.split(), values, strict=True))


def _groups(product: Product) -> int:
    """Row groups whose results are stored apart."""
    counts = [-(-weight.n // LANES) for weight in product.weights]
    return counts[0] if product.epilogue == "swiglu" else sum(counts)


def _vec(traits: DeviceTraits, product: Product) -> Launch:
    quantized = product.weights[0].dtype.quantized
    dot = ("vnni" if traits.dot_product else "pairs") if quantized else "floats"
    params = (*_params(product), ("NORM", int(product.norm)), ("DOT", dot))
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
        global_size=(min(_groups(product), _shares(traits, product)),),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
    )


def _shares(traits: DeviceTraits, product: Product) -> int:
    """Work-groups of a mat-vec: each reads all of x first, so a short one makes one a core; a long
    one makes more, so that a core that is taken away holds up less."""
    return traits.compute_units * (1 if product.nbytes() < _LONG_BYTES else 4)


_LONG_BYTES = 4 << 20
_TILE_DEFAULT = 6, 4, 128, 96
_TILE_LOCAL_BYTES = 120 << 10


def _tile(traits: DeviceTraits, product: Product) -> Launch:
    params = (*_params(product), ("X_STRIDE", product.x[0]))
    options = _tile_choices(params, min(traits.local_mem_bytes, _TILE_LOCAL_BYTES))
    tile = options.pick(traits.tuned)
    stored = tile["PANEL"] // (2 if product.epilogue == "swiglu" else 1)
    return Launch(
        variant=Variant(
            definition="mul_mat_tile", params=(*params, *tile.items()), local_size=(1, 1)
        ),
        args=(product.m, *product.strides(), "x", *product.operands()),
        global_size=(-(-_groups(product) // stored), -(-product.m // tile["TOKENS"])),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
        choices=options,
    )


def _tile_choices(params: Params, local_bytes: int) -> Choices:
    """Tiles whose sums fit 32 vector registers, panels and sums that fit local memory."""
    others = [
        (tile, panel, depth, tokens)
        for tile, panel in ((6, 4), (12, 2), (4, 4))
        for depth in (128, 256)
        for tokens in (48, 96, 192)
        if (depth + tokens) * panel * 64 <= local_bytes
    ]
    return choices("mul_mat_tile", params, "TILE PANEL DEPTH TOKENS", _TILE_DEFAULT, *others)


def _amx(traits: DeviceTraits, product: Product) -> Launch | None:
    """The product on byte tiles, or None where they are not there or the rows do not fit."""
    if not traits.byte_tiles or not product.weights[0].dtype.quantized:
        return None
    params = _params(product)
    # Gates and ups meet in one work-group, so their sums over k cannot wait in y.
    options = _amx_choices(params, product.k, whole=product.epilogue == "swiglu")
    if options is None or traits.local_mem_bytes < _LOCAL_BYTES:
        return None
    share = options.pick(traits.tuned)
    tokens = share["TOKENS"]
    units = traits.compute_units
    chunks = -(-product.m // tokens)
    # Each share of the rows splits the same tokens again, so few tokens make shares of rows.
    shares = units if chunks < units else 1
    chunks = -(-chunks // units) * units if chunks > 1 else 1
    return Launch(
        variant=Variant(
            definition="mul_mat_amx",
            params=(*params, *share.items()),
            local_size=(1, 1),
        ),
        args=(product.m, *product.strides(), "x", *product.operands()),
        global_size=(shares, chunks),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
        choices=options,
    )


def _amx_choices(params: Params, k: int, *, whole: bool) -> Choices | None:
    """Shares of k and of the rows that fit local memory; None when not even one tile does."""
    longest = k if whole else min(k, _MAX_DEPTH)
    depths = [longest] if whole else [longest, *(d for d in (256, 512, 1024) if d < longest)]
    default = min(_amx_tokens(longest), _MAX_TOKENS)
    if default < 16:
        return None
    others = [(d, t) for d in depths for t in (16, 32, 48, 64, 96, 128) if t <= _amx_tokens(d)]
    return choices("mul_mat_amx", params, "DEPTH TOKENS", (longest, default), *others)


def _amx_tokens(depth: int) -> int:
    """Rows of `depth` elements that fit local memory, in whole tiles."""
    return (_LOCAL_BYTES - 22 * depth) // (9 * depth // 4 + 64) // 16 * 16


_LOCAL_BYTES = 240 << 10
_MAX_DEPTH, _MAX_TOKENS = 2048, 64


def _any(traits: DeviceTraits, product: Product) -> Launch:
    params = _params(product)
    counts = ((1,),) if traits.is_cpu else ((8,), (2,), (4,))
    options = choices("mul_mat_any", params, "LY", *counts)
    slices = options.pick(traits.tuned)["LY"]
    columns = -(-product.columns // LANES) * LANES
    return Launch(
        variant=Variant(definition="mul_mat_any", params=params, local_size=(LANES, slices)),
        args=(product.m, *product.strides(), "x", *product.operands()),
        global_size=(columns, product.m * slices),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
        choices=options,
    )
