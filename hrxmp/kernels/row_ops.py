"""Dispatch of ops on rows: norms, soft_max, argmax, rotary embedding, rows by index.

Pure functions of traits and sizes, run by the executor's lowering and by warm-up; no device.
Strides and offsets are in elements; `m` is the number of rows, a run-time value that no variant
depends on. A row stride of None means dense.
"""

from __future__ import annotations

from typing import Literal

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels import nvidia
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.grid import X_ROWS, Y_ROWS, define, over_elements, over_rows, row_stride
from hrxmp.kernels.launch import Launch

RopeMode = Literal["norm", "neox"]

UNBOUNDED = 2**31 - 1
"""Rows of a table whose size the caller does not say."""

_NORM_HEAD = f"rows:int {X_ROWS} {Y_ROWS} eps:float x:buffer"
_SOFT_MAX_HEAD = (
    f"rows:int cols:int {X_ROWS} mask_rows:int mask_stride:int mask_offset:int {Y_ROWS} "
    "scale:float x:buffer"
)
_ROPE_HEAD = (
    f"rows:int {X_ROWS} {Y_ROWS} freq_base:float freq_scale:float x:buffer positions:buffer"
)
_ROPE_PARAMS = "HEAD_DIM N_DIMS N_HEADS NEOX FACTORS"

DEFINITIONS = (
    define("rms_norm", "norm.cl", "K WEIGHTED", f"{_NORM_HEAD} y:buffer"),
    define(
        "rms_norm_weighted", "norm.cl", "K WEIGHTED", f"{_NORM_HEAD} w:buffer y:buffer", "rms_norm"
    ),
    define("soft_max", "norm.cl", "MASKED", f"{_SOFT_MAX_HEAD} y:buffer"),
    define(
        "soft_max_masked",
        "norm.cl",
        "MASKED",
        f"{_SOFT_MAX_HEAD} mask:buffer y:buffer",
        "soft_max",
    ),
    define("argmax", "norm.cl", "", f"rows:int cols:int {X_ROWS} y_offset:int x:buffer y:buffer"),
    define("rope", "rope.cl", _ROPE_PARAMS, f"{_ROPE_HEAD} y:buffer"),
    define(
        "rope_factors", "rope.cl", _ROPE_PARAMS, f"{_ROPE_HEAD} factors:buffer y:buffer", "rope"
    ),
    define(
        "get_rows",
        "rows.cl",
        "WTYPE LAYOUT K",
        f"rows:int table_rows:int {Y_ROWS} table:buffer ids:buffer y:buffer",
    ),
    define(
        "set_rows",
        "rows.cl",
        "DST K",
        f"rows:int cache_rows:int {X_ROWS} cache_stride:int cache_offset:int "
        "x:buffer ids:buffer cache:buffer",
    ),
)


def rms_norm(
    traits: DeviceTraits,
    *,
    k: int,
    m: int,
    eps: float,
    weighted: bool,
    x_stride: int | None = None,
    x_offset: int = 0,
    y_stride: int | None = None,
    y_offset: int = 0,
) -> Launch:
    """y = x / sqrt(mean(x²) + eps) [* w] over rows [m, k]. Operands x, (w [k]), y; in place too."""
    operands = ("x", "w", "y") if weighted else ("x", "y")
    return over_rows(
        traits,
        "rms_norm_weighted" if weighted else "rms_norm",
        (("K", k), ("WEIGHTED", int(weighted))),
        rows=m,
        args=(row_stride(x_stride, k), x_offset, row_stride(y_stride, k), y_offset, eps, *operands),
        cost=(4 * m * k, 4 * k * (2 * m + weighted)),
    )


def soft_max(
    traits: DeviceTraits,
    *,
    k: int,
    m: int,
    scale: float = 1.0,
    mask_rows: int = 0,
    x_stride: int | None = None,
    x_offset: int = 0,
    mask_stride: int | None = None,
    mask_offset: int = 0,
    y_stride: int | None = None,
    y_offset: int = 0,
) -> Launch:
    """y = softmax(x * scale + mask) over rows [m, k]. Operands x, (mask [mask_rows, k]), y.

    The mask's rows repeat every `mask_rows` rows of x; 0 means no mask. In place allowed.
    """
    masked = mask_rows > 0
    mask = (mask_rows, row_stride(mask_stride, k), mask_offset)
    places = (row_stride(x_stride, k), x_offset, *mask, row_stride(y_stride, k), y_offset)
    operands = ("x", "mask", "y") if masked else ("x", "y")
    return over_rows(
        traits,
        "soft_max_masked" if masked else "soft_max",
        (("MASKED", int(masked)),),
        rows=m,
        args=(k, *places, scale, *operands),
        cost=(5 * m * k, 4 * k * (4 * m + mask_rows)),
    )


def argmax(
    traits: DeviceTraits,
    *,
    k: int,
    m: int,
    x_stride: int | None = None,
    x_offset: int = 0,
    y_offset: int = 0,
) -> Launch:
    """y [m] (i32) = place of the largest element of each row [m, k]. Operands x, y."""
    args = (k, row_stride(x_stride, k), x_offset, y_offset, "x", "y")
    return over_rows(traits, "argmax", (), rows=m, args=args, cost=(m * k, 4 * m * k))


def rope(
    traits: DeviceTraits,
    *,
    head_dim: int,
    n_dims: int,
    n_heads: int,
    m: int,
    mode: RopeMode = "norm",
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    factors: bool = False,
    x_stride: int | None = None,
    x_offset: int = 0,
    y_stride: int | None = None,
    y_offset: int = 0,
) -> Launch:
    """Rotary embedding of rows [m, n_heads * head_dim] at run-time positions.

    Operands x, positions [m] (i32), (factors [n_dims / 2]), y; y may be x. Mode "norm" turns
    neighbours (2i, 2i+1), "neox" halves (i, i + n_dims/2); a factor divides its pair's frequency.
    """
    if head_dim % 2 or n_dims % 2 or not 0 < n_dims <= head_dim or mode not in ("norm", "neox"):
        raise UnsupportedError(f"rope {mode!r} of {n_dims} dimensions in heads of {head_dim}")
    width = n_heads * head_dim
    names = _ROPE_PARAMS.split()
    values = (head_dim, n_dims, n_heads, int(mode == "neox"), int(factors))
    places = (row_stride(x_stride, width), x_offset, row_stride(y_stride, width), y_offset)
    operands = ("x", "positions", *(("factors",) if factors else ()), "y")
    return over_elements(
        traits,
        "rope_factors" if factors else "rope",
        tuple(zip(names, values, strict=True)),
        cols=head_dim // 2,
        rows=m,
        args=(m, *places, freq_base, freq_scale, *operands),
        cost=(3 * m * width, 8 * m * width),
        lanes=traits.simd_width,
    )


def get_rows(
    traits: DeviceTraits,
    *,
    dtype: DType,
    layout: str = "ggml",
    k: int,
    m: int,
    table_rows: int = UNBOUNDED,
    y_stride: int | None = None,
    y_offset: int = 0,
) -> Launch:
    """y [m, k] (f32) = table[ids]. Operands table [table_rows, k], ids [m] (i32), y.

    The table is a weight in one of mul_mat's layouts. An id outside it gives a row of NaNs.
    """
    if traits.form == "nvidia" and dtype.quantized and layout == nvidia.weight_layout(dtype):
        return nvidia.get_rows(
            traits, dtype=dtype, k=k, m=m, table_rows=table_rows,
            y_stride=row_stride(y_stride, k), y_offset=y_offset,
        )  # fmt: skip
    if dtype is DType.I32 or layout not in ("ggml", "lane16") or k % dtype.block:
        raise UnsupportedError(f"get_rows of {dtype.label} [.., {k}] in layout {layout!r}")
    if dtype.quantized and layout == "ggml":
        raise UnsupportedError(f"get_rows of {dtype.label} as it stands in the file: pack it")
    return over_elements(
        traits,
        "get_rows",
        (("WTYPE", dtype.label), ("LAYOUT", layout), ("K", k)),
        cols=k,
        rows=m,
        args=(m, table_rows, row_stride(y_stride, k), y_offset, "table", "ids", "y"),
        cost=(0, m * (dtype.row_bytes(k) + 4 * k)),
    )


def set_rows(
    traits: DeviceTraits,
    *,
    k: int,
    m: int,
    dst: DType,
    cache_rows: int = UNBOUNDED,
    x_stride: int | None = None,
    x_offset: int = 0,
    cache_stride: int | None = None,
    cache_offset: int = 0,
) -> Launch:
    """cache[ids[i]] = x[i] for rows [m, k], converted to `dst`. Operands x, ids (i32), cache.

    An id outside the cache writes nothing.
    """
    if dst not in (DType.F32, DType.F16):
        raise UnsupportedError(f"set_rows into {dst.label}: f32 and f16 are supported")
    places = (row_stride(x_stride, k), x_offset, row_stride(cache_stride, k), cache_offset)
    return over_elements(
        traits,
        "set_rows",
        (("DST", dst.label), ("K", k)),
        cols=k,
        rows=m,
        args=(m, cache_rows, *places, "x", "ids", "cache"),
        cost=(0, m * k * (4 + dst.nbytes)),
        writes="cache",
    )
