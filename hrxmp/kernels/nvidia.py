"""Dispatch of the kernels that NVIDIA's devices have for themselves: products, rows, attention.

Pure functions of traits and sizes. The families' own functions come here for devices of form
"nvidia". The kernels use shuffles, byte dot products and cache hints through inline PTX (FORM ptx);
their plain form computes the same on any device, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels.definition import DeviceTraits, KernelDefinition, arguments
from hrxmp.kernels.keys import Param, Params, Variant
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.product import OPERANDS, STRIDES, Product

WARP = 32
_LX = 512
_ATTEND_LX = 256
_FLASH_LX, _FLASH_TOKENS = 128, 64
_FEWEST_ATTENDING = 8
"""Rows for which a tile of `_FLASH_TOKENS` is faster than a work-group for each."""
_LARGEST_HEAD = 128
_PACK_LX = 256
_TILE_ROWS, _TILE_TOKENS = 64, 128
_FEW_COLUMNS = 32
"""For each multiprocessor: with fewer, 512 rows of x make less than two groups of it."""
_FEWEST_TOKENS = 5
_LONGEST_ROW = 16384
_RAW = (DType.F32, DType.F16, DType.Q4_K, DType.Q5_K)
"""Formats whose rows keep the file's bytes: blocks of a multiple of 16 bytes."""

DEFINITIONS = (
    KernelDefinition(
        name="nv_mul_mat_vec",
        source="nv_mul_mat_vec.cl",
        entry_point="nv_mul_mat_vec",
        params=(
            "FORM",
            "W0",
            "W1",
            "W2",
            "K",
            "N0",
            "N1",
            "N2",
            "EPILOGUE",
            "NORM",
            "PACKED",
            "ROWS",
            "SPLIT",
        ),
        args=arguments(f"m:int {STRIDES} eps:float x:buffer norm_w:buffer {OPERANDS}"),
    ),
    KernelDefinition(
        name="nv_pack_rows",
        source="nv_pack_rows.cl",
        entry_point="nv_pack_rows",
        params=("FORM", "K", "NORM"),
        args=arguments("m:int x_stride:int x_offset:int eps:float x:buffer norm_w:buffer y:buffer"),
    ),
    KernelDefinition(
        name="nv_mul_mat_tile",
        source="nv_mul_mat_tile.cl",
        entry_point="nv_mul_mat_tile",
        params=("FORM", "W0", "W1", "W2", "K", "N0", "N1", "N2", "EPILOGUE", "ROWS", "STEP"),
        args=arguments(
            f"m:int r_stride:int r_offset:int y_stride:int y_offset:int x:buffer {OPERANDS}"
        ),
    ),
    KernelDefinition(
        name="nv_get_rows",
        source="nv_get_rows.cl",
        entry_point="nv_get_rows",
        params=("FORM", "WTYPE", "K"),
        args=arguments(
            "rows:int table_rows:int y_stride:int y_offset:int table:buffer ids:buffer y:buffer"
        ),
    ),
    KernelDefinition(
        name="nv_attend",
        source="nv_attend.cl",
        entry_point="nv_attend",
        params=("FORM", "HEAD_DIM", "HEADS", "KV_HEADS", "KV", "N_DIMS", "NEOX", "FACTORS", "ROPE"),
        args=arguments(
            "m:int capacity:int q_stride:int q_offset:int y_stride:int y_offset:int scale:float "
            "freq_base:float freq_scale:float q:buffer positions:buffer factors:buffer "
            "k_cache:buffer v_cache:buffer y:buffer"
        ),
    ),
    KernelDefinition(
        name="nv_flash_tile",
        source="nv_flash_tile.cl",
        entry_point="nv_flash_tile",
        params=("FORM", "HEAD_DIM", "HEADS", "KV_HEADS", "KV", "T"),
        args=arguments(
            "m:int capacity:int q_stride:int q_offset:int y_stride:int y_offset:int scale:float "
            "q:buffer positions:buffer k_cache:buffer v_cache:buffer y:buffer"
        ),
    ),
)


def weight_layout(dtype: DType) -> str:
    """The layout in which these kernels read a weight."""
    return "ggml" if dtype in _RAW else "planes"


def mixes(traits: DeviceTraits, first: DType, other: DType) -> bool:
    """Whether weights of two dtypes go into one product."""
    return traits.form == "nvidia" and first.quantized and other.quantized


def multiplies(traits: DeviceTraits, product: Product) -> bool:
    """Whether `mul_mat` takes a product: the device's form, and rows of whole chunks."""
    if traits.form != "nvidia":
        return False
    chunk = max(_chunk(weight.dtype) for weight in product.weights)
    if product.norm:
        return True
    return product.k % chunk == 0 and product.x[0] % 4 == 0 and product.x[1] % 4 == 0


def mul_mat(traits: DeviceTraits, product: Product) -> Launch:
    """The launch of a product that `multiplies`. Raises UnsupportedError."""
    _check(product)
    rows, split = _tile(traits, product)
    counts = product.rows[:1] if product.epilogue == "swiglu" else product.rows
    tiles = sum(-(-n // rows) for n in counts)
    values: dict[str, Param] = {
        "FORM": form(traits),
        **{f"W{i}": label for i, label in enumerate(_formats(product))},
        "K": product.k,
        **{f"N{i}": n for i, n in enumerate(product.rows)},
        "EPILOGUE": product.epilogue,
        "NORM": int(product.norm),
        "PACKED": int(product.weights[0].dtype.quantized),
        "ROWS": rows,
        "SPLIT": split,
    }
    return Launch(
        variant=Variant(
            definition="nv_mul_mat_vec", params=tuple(values.items()), local_size=(_LX, 1)
        ),
        args=(
            product.m,
            *product.strides(),
            product.eps,
            "x",
            "norm_w" if product.norm else "x",
            *product.operands(),
        ),
        global_size=(min(tiles, traits.compute_units) * _LX, product.m),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
    )


def packs_rows(traits: DeviceTraits, dtypes: Sequence[DType], k: int, m: int) -> bool:
    """Whether a product of m rows goes by `pack_rows` and `mul_mat_packed`: the tensor cores."""
    return (
        form(traits) == "ptx"
        and traits.form == "nvidia"
        and m >= _FEWEST_TOKENS
        and all(dtype.quantized for dtype in dtypes)
        and k <= _LONGEST_ROW
        and k % _step(dtypes, k) == 0
    )


def pack_rows(
    traits: DeviceTraits, *, k: int, m: int, norm: bool, x_stride: int, x_offset: int, eps: float
) -> Launch:
    """Rows of x as `mul_mat_packed` takes them. Operands x, (norm_w with `norm`), y."""
    return Launch(
        variant=Variant(
            definition="nv_pack_rows",
            params=(("FORM", form(traits)), ("K", k), ("NORM", int(norm))),
            local_size=(_PACK_LX,),
        ),
        args=(m, x_stride, x_offset, eps, "x", "norm_w" if norm else "x", "y"),
        global_size=(m * _PACK_LX,),
        writes=("y",),
        nbytes=4 * m * k + m * packed_row_bytes(k),
    )


def packed_row_bytes(k: int) -> int:
    """Bytes of a row of `pack_rows`: two bytes an element, a scale a block, a sum each 16."""
    return -(-(k // 2 + k // 32 + k // 16) // 4) * 16


def mul_mat_packed(traits: DeviceTraits, product: Product) -> Launch:
    """A product whose rows were packed; operands as `mul_mat` has them, x packed, no norm."""
    _check(product)
    _, *strides = product.strides()[1:]
    half = product.epilogue == "swiglu"
    counts = product.rows[:1] if half else product.rows
    # Few columns make few tiles: smaller ones keep more of the device busy. Not a question of m,
    # which must not make another kernel.
    few = not half and sum(counts) < _FEW_COLUMNS * traits.compute_units
    rows = _TILE_ROWS // 2 if few else _TILE_ROWS
    tiles = sum(-(-n // (rows // (1 + half))) for n in counts)
    values: dict[str, Param] = {
        "FORM": form(traits),
        **{f"W{i}": label for i, label in enumerate(_formats(product))},
        "K": product.k,
        **{f"N{i}": n for i, n in enumerate(product.rows)},
        "EPILOGUE": product.epilogue,
        "ROWS": rows,
        "STEP": _step([weight.dtype for weight in product.weights], product.k),
    }
    return Launch(
        variant=Variant(
            definition="nv_mul_mat_tile", params=tuple(values.items()), local_size=(_PACK_LX, 1)
        ),
        args=(product.m, *strides, "x", *product.operands()),
        global_size=(-(-product.m // _TILE_TOKENS) * _PACK_LX, tiles),
        writes=("y",),
        flops=product.flops(),
        nbytes=product.nbytes(),
    )


def _step(dtypes: Sequence[DType], k: int) -> int:
    """Elements of k in local memory at a time: whole chunks of every format."""
    return 64 if k % 128 and DType.Q6_K not in dtypes else 128


def get_rows(
    traits: DeviceTraits,
    *,
    dtype: DType,
    k: int,
    m: int,
    table_rows: int,
    y_stride: int,
    y_offset: int,
) -> Launch:
    """y [m, k] = table[ids] for a quantised table in this form's layout."""
    lanes = 64
    return Launch(
        variant=Variant(
            definition="nv_get_rows",
            params=(("FORM", form(traits)), ("WTYPE", dtype.label), ("K", k)),
            local_size=(lanes, 1),
        ),
        args=(m, table_rows, y_stride, y_offset, "table", "ids", "y"),
        global_size=(-(-k // 32 // lanes) * lanes, m),
        writes=("y",),
        nbytes=m * (dtype.row_bytes(k) + 4 * k),
    )


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `attend`. `params` are HEAD_DIM .. FACTORS by name; strides in elements."""

    params: Params
    m: int
    capacity: int
    q: tuple[int, int]
    y: tuple[int, int]
    scale: float
    freq_base: float
    freq_scale: float
    rope: bool
    factors: bool


def attend(traits: DeviceTraits, call: Attention, n_heads: int) -> Launch:
    """Attention of `m` rows; with `rope` of one row, all of it.

    Operands q (or qkv with rope), positions, (factors), k_cache, v_cache, y.
    """
    params = dict(call.params)
    if not call.rope and call.m >= _FEWEST_ATTENDING and int(params["HEAD_DIM"]) <= _LARGEST_HEAD:
        return _attend_tile(traits, call, n_heads)
    q = "qkv" if call.rope else "q"
    if call.rope and call.m != 1:
        raise UnsupportedError(f"rope and attention of {call.m} rows are not fused on this device")
    return Launch(
        variant=Variant(
            definition="nv_attend",
            params=(("FORM", form(traits)), *call.params, ("ROPE", int(call.rope))),
            local_size=(_ATTEND_LX, 1),
        ),
        args=(
            call.m,
            call.capacity,
            *call.q,
            *call.y,
            call.scale,
            call.freq_base,
            call.freq_scale,
            q,
            "positions",
            "factors" if call.factors else q,
            "k_cache",
            "v_cache",
            "y",
        ),
        global_size=(n_heads * _ATTEND_LX, call.m),
        writes=("k_cache", "v_cache", "y") if call.rope else ("y",),
    )


def _attend_tile(traits: DeviceTraits, call: Attention, n_heads: int) -> Launch:
    params = dict(call.params)
    large = params["KV"] == "f32" and int(params["HEAD_DIM"]) > 64
    return Launch(
        variant=Variant(
            definition="nv_flash_tile",
            params=(
                ("FORM", form(traits)),
                *((name, params[name]) for name in ("HEAD_DIM", "HEADS", "KV_HEADS", "KV")),
                ("T", 32 if large else 64),  # what local memory has room for
            ),
            local_size=(_FLASH_LX, 1),
        ),
        args=(
            call.m, call.capacity, *call.q, *call.y, call.scale,
            "q", "positions", "k_cache", "v_cache", "y",
        ),
        global_size=(-(-call.m // _FLASH_TOKENS) * _FLASH_LX, n_heads),
        writes=("y",),
    )  # fmt: skip


def form(traits: DeviceTraits) -> str:
    """The FORM of the kernels: inline PTX where there is a GPU to understand it."""
    return "plain" if traits.is_cpu else "ptx"


def _chunk(dtype: DType) -> int:
    """Elements that a lane takes at a time."""
    return {DType.F32: 4, DType.F16: 8}.get(dtype, 32)


def _formats(product: Product) -> tuple[str, str, str]:
    labels = [weight.dtype.label for weight in product.weights]
    first, second, third = (*labels, "none", "none")[:3]
    return first, second, third


def _check(product: Product) -> None:
    dtypes = {weight.dtype for weight in product.weights}
    if len(dtypes) > 1 and not all(dtype.quantized for dtype in dtypes):
        raise UnsupportedError("of the weights of one product only some have blocks")
    if product.epilogue == "swiglu" and len(dtypes) > 1:
        raise UnsupportedError("swiglu takes two weights of one dtype")
    if product.norm and product.m != 1:
        raise UnsupportedError(f"the norm of {product.m} rows is not fused on this device")
    for weight in product.weights:
        if weight.layout != weight_layout(weight.dtype):
            raise UnsupportedError(
                f"a {weight.dtype.label} weight must be packed (`weight_layout`), "
                f"not in layout {weight.layout!r}"
            )
    if product.k % max(_chunk(dtype) for dtype in dtypes):
        raise UnsupportedError(f"no product of rows of {product.k} elements with a norm")


def _tile(traits: DeviceTraits, product: Product) -> tuple[int, int]:
    """Rows a warp takes at once, and warps that share a row: enough of both to fill the device."""
    warps = traits.compute_units * (_LX // WARP)
    half = product.epilogue == "swiglu"
    total = sum(product.rows[:1] if half else product.rows)
    rows = next(r for r in (1, 2, 4) if total <= r * warps or r == (2 if half else 4))
    dtype = product.weights[0].dtype
    chunks = product.k // (64 if dtype.block == 256 else _chunk(dtype))
    split = 1
    while split < 8 and total * split * 2 <= rows * warps and chunks >= 2 * WARP * split:
        split *= 2
    return rows, split
