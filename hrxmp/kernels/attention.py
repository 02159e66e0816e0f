"""Dispatch of attention: rotary positions with the cache's new rows, and causal attention over it.

Pure functions of traits and sizes, run by the executor's lowering and by warm-up; no device. How
many rows of the cache are visible is a run-time value, read from `positions`, so neither a longer
prompt nor a longer context makes another variant, and profiles know no arithmetic of attention.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels import nvidia
from hrxmp.kernels.choices import Choices, choices
from hrxmp.kernels.definition import DeviceTraits, KernelDefinition, arguments
from hrxmp.kernels.keys import Params, Variant
from hrxmp.kernels.launch import Launch

RopeMode = Literal["norm", "neox"]

_TILES = (6, 32), (6, 8), (6, 16), (6, 64), (4, 16), (4, 32)
"""Rows that are multiplied at once, and tokens a work-group; the default first."""

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
    KernelDefinition(
        name="flash_attn_tile",
        source="flash_attn_tile.cl",
        entry_point="flash_attn_tile",
        params=(*_CACHE.split(), "TILE", "TOKENS"),
        args=arguments(
            "m:int capacity:int q_stride:int q_offset:int y_stride:int y_offset:int scale:float "
            "q:buffer k_cache:buffer v_cache:buffer positions:buffer y:buffer"
        ),
    ),
    KernelDefinition(
        name="flash_attn_row",
        source="flash_attn_row.cl",
        entry_point="flash_attn_row",
        params=(*_ROPE, "ROPE"),
        args=arguments(
            "m:int capacity:int q_offset:int y_offset:int scale:float freq_base:float "
            "freq_scale:float q:buffer positions:buffer factors:buffer k_cache:buffer "
            "v_cache:buffer y:buffer"
        ),
    ),
)


class _Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions of a model: which elements of a head turn, and how fast."""

    n_dims: int
    mode: RopeMode = "norm"
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    factors: bool = False
    """Whether a vector of n_dims / 2 factors divides the angles."""


class _Heads(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an attention and of its caches [n_kv_heads, capacity, head_dim]."""

    head_dim: int
    n_heads: int
    n_kv_heads: int
    kv_dtype: DType
    kv_capacity: int

    @property
    def width(self) -> int:
        """Elements of a row of q."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of k, and of v, of one token."""
        return self.n_kv_heads * self.head_dim

    def row_bytes(self) -> int:
        """Bytes of a row of both caches."""
        return 2 * self.kv_width * self.kv_dtype.nbytes

    def params(self) -> Params:
        values = (self.head_dim, self.n_heads, self.n_kv_heads, self.kv_dtype.label)
        return tuple(zip(_CACHE.split(), values, strict=True))


def fuses_rope(traits: DeviceTraits, m: int) -> bool:
    """Whether `rope_flash_attn` does rope_set_rows and flash_attn of m rows in one launch."""
    return m == 1 and (traits.is_cpu or traits.form == "nvidia")


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
    factors f32 [n_dims / 2] with `factors`, k_cache and v_cache. A position outside the cache
    stores nothing. Raises UnsupportedError.
    """
    heads = _heads(head_dim, n_heads, n_kv_heads, kv_dtype, kv_capacity)
    rope = _Rope(
        n_dims=n_dims, mode=mode, freq_base=freq_base, freq_scale=freq_scale, factors=factors
    )
    width = heads.width + 2 * heads.kv_width
    lanes = 1 if traits.is_cpu else 32
    return Launch(
        variant=Variant(
            definition="rope_set_rows",
            params=(*heads.params(), *_rope_params(heads, rope)),
            local_size=(lanes, 1),
        ),
        args=(
            m,
            heads.kv_capacity,
            width if stride is None else stride,
            offset,
            rope.freq_base,
            rope.freq_scale,
            "qkv",
            "positions",
            "factors" if rope.factors else "qkv",
            "k_cache",
            "v_cache",
        ),
        global_size=((heads.n_heads + 2 * heads.n_kv_heads) * lanes, m),
        writes=("qkv", "k_cache", "v_cache"),
        flops=3 * m * (heads.n_heads + heads.n_kv_heads) * rope.n_dims,
        nbytes=m * (4 * width + heads.row_bytes()),
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

    Operands: q f32 [m, q_stride], k_cache, v_cache, positions i32 [m], y f32. Strides and offsets
    in elements. Raises UnsupportedError.
    """
    heads = _heads(head_dim, n_heads, n_kv_heads, kv_dtype, kv_capacity)
    q = heads.width if q_stride is None else q_stride, q_offset
    y = heads.width if y_stride is None else y_stride, y_offset
    if traits.form == "nvidia":
        return nvidia.attend(traits, _nvidia(heads, None, m, scale, q, y), heads.n_heads)
    if traits.is_cpu and m == 1:
        return _row(heads, None, scale, q_offset, y_offset)
    return _rows(traits, heads, m, scale, (*q, *y))


def _rows(
    traits: DeviceTraits, heads: _Heads, m: int, scale: float, strides: tuple[int, ...]
) -> Launch:
    """Attention of many rows: tiles on CPU devices, else a work-group for each row and head."""
    tiled = traits.is_cpu and heads.head_dim % 64 == 0
    lanes = 1 if traits.is_cpu else 32
    params = heads.params()
    options = _tile_choices(heads, params, traits.local_mem_bytes) if tiled else None
    tile = options.pick(traits.tuned) if options else {}
    operands = ("q", "k_cache", "v_cache", "positions", "y")
    return Launch(
        variant=Variant(
            definition="flash_attn_tile" if tiled else "flash_attn",
            params=(*params, *tile.items()),
            local_size=(lanes, 1),
        ),
        args=(m, heads.kv_capacity, *strides, scale, *operands),
        global_size=(
            (heads.n_kv_heads, -(-m // tile["TOKENS"])) if tiled else (heads.n_heads * lanes, m)
        ),
        writes=("y",),
        choices=options,
    )


def _tile_choices(heads: _Heads, params: Params, local_bytes: int) -> Choices:
    """The tiles whose queries, sums and scores fit local memory beside keys and values."""
    shared, held = heads.n_heads // heads.n_kv_heads, 8 * heads.head_dim
    room = local_bytes - 64 * held
    fit = [row for row in _TILES[1:] if row[1] * shared * (held + 264) <= room]
    return choices("flash_attn_tile", params, "TILE TOKENS", _TILES[0], *fit)


def rope_flash_attn(
    traits: DeviceTraits,
    *,
    head_dim: int,
    n_heads: int,
    n_kv_heads: int,
    m: int,
    scale: float,
    n_dims: int,
    mode: RopeMode,
    freq_base: float,
    freq_scale: float,
    kv_dtype: DType,
    kv_capacity: int,
    factors: bool = False,
    offset: int = 0,
    y_offset: int = 0,
) -> Launch:
    """`rope_set_rows`, then `flash_attn`, in one launch; qkv stays as it is.

    Operands: qkv (m rows of q, k, v side by side from `offset`), positions, factors with
    `factors`, k_cache, v_cache, y [m, n_heads * head_dim]. Only where `fuses_rope`.
    """
    heads = _heads(head_dim, n_heads, n_kv_heads, kv_dtype, kv_capacity)
    rope = _Rope(
        n_dims=n_dims, mode=mode, freq_base=freq_base, freq_scale=freq_scale, factors=factors
    )
    if not fuses_rope(traits, m):
        raise UnsupportedError(f"rope and attention of {m} rows are not fused on this device")
    if traits.form == "nvidia":
        width = heads.width + 2 * heads.kv_width
        call = _nvidia(heads, rope, 1, scale, (width, offset), (heads.width, y_offset))
        return nvidia.attend(traits, call, heads.n_heads)
    return _row(heads, rope, scale, offset, y_offset)


def _nvidia(
    heads: _Heads,
    rope: _Rope | None,
    m: int,
    scale: float,
    q: tuple[int, int],
    y: tuple[int, int],
) -> nvidia.Attention:
    turned = rope or _Rope(n_dims=heads.head_dim)
    return nvidia.Attention(
        params=(*heads.params(), *_rope_params(heads, turned)),
        m=m,
        capacity=heads.kv_capacity,
        q=q,
        y=y,
        scale=scale,
        freq_base=turned.freq_base,
        freq_scale=turned.freq_scale,
        rope=rope is not None,
        factors=turned.factors,
    )


def _row(heads: _Heads, rope: _Rope | None, scale: float, offset: int, y_offset: int) -> Launch:
    turned = rope or _Rope(n_dims=heads.head_dim)
    q = "qkv" if rope else "q"
    return Launch(
        variant=Variant(
            definition="flash_attn_row",
            params=(*heads.params(), *_rope_params(heads, turned), ("ROPE", int(rope is not None))),
            local_size=(1,),
        ),
        args=(
            1,
            heads.kv_capacity,
            offset,
            y_offset,
            scale,
            turned.freq_base,
            turned.freq_scale,
            q,
            "positions",
            "factors" if turned.factors else q,
            "k_cache",
            "v_cache",
            "y",
        ),
        global_size=(heads.n_kv_heads,),
        writes=("k_cache", "v_cache", "y") if rope else ("y",),
    )


def _heads(
    head_dim: int, n_heads: int, n_kv_heads: int, kv_dtype: DType, kv_capacity: int
) -> _Heads:
    """Checked sizes. Raises UnsupportedError."""
    heads = _Heads(
        head_dim=head_dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        kv_dtype=kv_dtype,
        kv_capacity=kv_capacity,
    )
    if heads.kv_dtype not in (DType.F32, DType.F16):
        raise UnsupportedError(f"a cache of {heads.kv_dtype.label}; f32 and f16 are supported")
    if heads.head_dim % 16 or not 16 <= heads.head_dim <= 256:
        raise UnsupportedError(f"heads of {heads.head_dim} elements; multiples of 16 up to 256 go")
    if heads.n_kv_heads < 1 or heads.n_heads % heads.n_kv_heads:
        raise UnsupportedError(
            f"{heads.n_heads} heads do not share {heads.n_kv_heads} key heads evenly"
        )
    return heads


def _rope_params(heads: _Heads, rope: _Rope) -> Params:
    if not 0 < rope.n_dims <= heads.head_dim or rope.n_dims % 2:
        raise UnsupportedError(
            f"{rope.n_dims} rotated elements do not fit heads of {heads.head_dim}"
        )
    if rope.mode not in ("norm", "neox"):
        raise UnsupportedError(f"no rope mode {rope.mode!r}; there are norm and neox")
    values = (rope.n_dims, int(rope.mode == "neox"), int(rope.factors))
    return tuple(zip(_ROPE[len(_CACHE.split()) :], values, strict=True))
