"""Dispatch of attention: rotary positions with the cache's new rows, and causal attention over it.

Pure functions of traits and sizes, run by the executor's lowering and by warm-up; no device. How
many rows of the cache are visible is a run-time value, read from `positions`, so neither a longer
prompt nor a longer context makes another variant.
"""

from __future__ import annotations

from typing import Literal

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels.definition import DeviceTraits, KernelDefinition, arguments
from hrxmp.kernels.keys import Param, Variant
from hrxmp.kernels.launch import Launch

RopeMode = Literal["norm", "neox"]

_CACHE = "HEAD_DIM HEADS KV_HEADS KV"
_ROPE = (*_CACHE.split(), "N_DIMS", "NEOX", "FACTORS")

DEFINITIONS = (
    KernelDefinition(
        name="rope_set_rows",
        source="rope_set_rows.cl",
        entry_point="rope_set_rows",
        params=_ROPE,
        args=arguments(
            "m:int capacity:int stride:int offset:int freq_base:float freq_scale:float "
            "qkv:buffer positions:buffer factors:buffer k_cache:buffer v_cache:buffer"
        ),
    ),
    KernelDefinition(
        name="flash_attn",
        source="flash_attn.cl",
        entry_point="flash_attn",
        params=tuple(_CACHE.split()),
        args=arguments(
            "m:int capacity:int q_stride:int q_offset:int y_stride:int y_offset:int scale:float "
            "q:buffer k_cache:buffer v_cache:buffer positions:buffer y:buffer"
        ),
    ),
)


def rope_set_rows(
    traits: DeviceTraits,
    *,
    head_dim: int,
    n_heads: int,
    n_kv_heads: int,
    m: int,
    n_dims: int,
    mode: RopeMode,
    freq_base: float,
    freq_scale: float,
    kv_dtype: DType,
    kv_capacity: int,
    factors: bool = False,
    stride: int | None = None,
    offset: int = 0,
) -> Launch:
    """Rotate q in place; rotate k and store k and v as rows positions[i] of the caches.

    Operands: qkv f32 [m, stride] with q, k, v side by side from `offset`, positions i32 [m],
    factors f32 [n_dims / 2] with `factors`, k_cache and v_cache [capacity, n_kv_heads * head_dim].
    A position outside the cache stores nothing. Raises UnsupportedError.
    """
    _check(head_dim, n_heads, n_kv_heads, kv_dtype)
    if not 0 < n_dims <= head_dim or n_dims % 2:
        raise UnsupportedError(f"{n_dims} rotated elements do not fit heads of {head_dim}")
    if mode not in ("norm", "neox"):
        raise UnsupportedError(f"no rope mode {mode!r}; there are norm and neox")
    width = (n_heads + 2 * n_kv_heads) * head_dim
    params = (
        *_params(head_dim, n_heads, n_kv_heads, kv_dtype),
        ("N_DIMS", n_dims),
        ("NEOX", int(mode == "neox")),
        ("FACTORS", int(factors)),
    )
    lanes = 1 if traits.is_cpu else 32
    heads = n_heads + 2 * n_kv_heads
    return Launch(
        variant=Variant(definition="rope_set_rows", params=params, local_size=(lanes, 1)),
        args=(
            m,
            kv_capacity,
            width if stride is None else stride,
            offset,
            freq_base,
            freq_scale,
            "qkv",
            "positions",
            "factors" if factors else "qkv",
            "k_cache",
            "v_cache",
        ),
        global_size=(heads * lanes, m),
        writes=("qkv", "k_cache", "v_cache"),
        flops=3 * m * (n_heads + n_kv_heads) * n_dims,
        nbytes=m * width * 4 + m * n_kv_heads * head_dim * 2 * kv_dtype.nbytes,
    )


def flash_attn(
    traits: DeviceTraits,
    *,
    head_dim: int,
    n_heads: int,
    n_kv_heads: int,
    m: int,
    scale: float,
    kv_dtype: DType,
    kv_capacity: int,
    q_stride: int | None = None,
    q_offset: int = 0,
    y_stride: int | None = None,
    y_offset: int = 0,
) -> Launch:
    """y [m, n_heads * head_dim]: row i of q attends to rows 0..positions[i] of the caches.

    Operands: q f32 [m, q_stride], k_cache and v_cache [capacity, n_kv_heads * head_dim] of
    kv_dtype, positions i32 [m], y f32. Strides and offsets in elements. Raises UnsupportedError.
    """
    _check(head_dim, n_heads, n_kv_heads, kv_dtype)
    width = n_heads * head_dim
    lanes = 1 if traits.is_cpu else 32
    return Launch(
        variant=Variant(
            definition="flash_attn",
            params=_params(head_dim, n_heads, n_kv_heads, kv_dtype),
            local_size=(lanes, 1),
        ),
        args=(
            m,
            kv_capacity,
            width if q_stride is None else q_stride,
            q_offset,
            width if y_stride is None else y_stride,
            y_offset,
            scale,
            "q",
            "k_cache",
            "v_cache",
            "positions",
            "y",
        ),
        global_size=(n_heads * lanes, m),
        writes=("y",),
        flops=4 * m * width * kv_capacity,
        nbytes=8 * m * width + 2 * kv_capacity * n_kv_heads * head_dim * kv_dtype.nbytes,
    )


def _check(head_dim: int, n_heads: int, n_kv_heads: int, kv_dtype: DType) -> None:
    if kv_dtype not in (DType.F32, DType.F16):
        raise UnsupportedError(f"a cache of {kv_dtype.label}; f32 and f16 are supported")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise UnsupportedError(f"heads of {head_dim} elements; multiples of 16 up to 256 go")
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise UnsupportedError(f"{n_heads} heads do not share {n_kv_heads} key heads evenly")


def _params(
    head_dim: int, n_heads: int, n_kv_heads: int, kv_dtype: DType
) -> tuple[tuple[str, Param], ...]:
    values = (head_dim, n_heads, n_kv_heads, kv_dtype.label)
    return tuple(zip(_CACHE.split(), values, strict=True))
