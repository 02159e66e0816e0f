"""Packs GGUF weight blocks into the layout that the kernels read (`cl/blocks.h` describes it).

The executor runs it once a weight, at load; numpy is allowed here and nowhere else in kernels.
A layout is content only: packing is exact, every value can be read back from the packed bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError

Bytes = NDArray[np.uint8]
Words = NDArray[Any]
"""Little-endian words of four bytes."""
Array = NDArray[Any]

LANES = 16
"""Rows that layout lane16 keeps together."""
_CHUNK_BYTES = 1 << 18
"""Packing works through about this much of a weight at a time: it stays in the cache."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows of a weight, taken apart: [rows, blocks of 32, bytes] each, `supers` by 256."""

    quants: Bytes
    """Low plane, then high plane, as dwords for one row (see `cl/blocks.h`)."""
    scales: Bytes
    scale_bytes: tuple[int, ...]
    """How `scales` splits into fields that are kept together by 16 rows."""
    supers: Bytes | None = None


def packed_bytes(layout: str, dtype: DType, n: int, k: int) -> int:
    """Bytes of a weight [n, k] in `layout`."""
    if layout == "ggml":
        return n * dtype.row_bytes(k)
    if layout == "planes":
        return n * sum(_plane_sizes(dtype, k))
    return -(-n // LANES) * _group_bytes(dtype, k)


def pack(layout: str, dtype: DType, n: int, k: int, raw: Bytes) -> Bytes:
    """The bytes of a row-major ggml weight [n, k] in `layout`; rows are padded with zeros to 16.

    Raises UnsupportedError for a layout or dtype that has no packing, or bytes that do not fit.
    """
    row = dtype.row_bytes(k)
    if k % dtype.block or raw.size != n * row:
        raise UnsupportedError(f"{raw.size} bytes are not a {dtype.label} weight [{n}, {k}]")
    source = raw.reshape(n, row)
    if layout == "ggml":
        return source.reshape(-1)
    if layout == "planes":
        return _pack_planes(dtype, k, source)
    if layout != "lane16" or k % 32:
        raise UnsupportedError(f"a {dtype.label} weight [{n}, {k}] has no layout {layout!r}")
    group = _group_bytes(dtype, k)
    packed = np.zeros((-(-n // LANES), group), np.uint8)
    step = max(1, _CHUNK_BYTES // (row * LANES)) * LANES
    for start in range(0, n, step):
        rows = _padded(source[start : start + step])
        _pack_rows(dtype, k, rows, packed[start // LANES : (start + len(rows)) // LANES])
    return packed.reshape(-1)


_PLANES = {
    DType.Q4_0: ((2, 18), (0, 2)),
    DType.Q4_1: ((4, 20), (0, 4)),
    DType.Q5_0: ((6, 22), (2, 6), (0, 2)),
    DType.Q5_1: ((8, 24), (4, 8), (0, 4)),
    DType.Q8_0: ((2, 34), (0, 2)),
    DType.Q6_K: ((0, 128), (128, 192), (192, 208), (208, 210)),
}
"""Layout planes: which bytes of a block make each plane of a row, in order."""


def _plane_sizes(dtype: DType, k: int) -> list[int]:
    """Bytes of each plane of a row, padded to 16. UnsupportedError when there is no such layout."""
    if dtype not in _PLANES:
        raise UnsupportedError(f"a {dtype.label} weight has no layout 'planes'")
    blocks = k // dtype.block
    return [-(-blocks * (end - begin) // 16) * 16 for begin, end in _PLANES[dtype]]


def _pack_planes(dtype: DType, k: int, rows: Bytes) -> Bytes:
    """Each field of a row's blocks together, field after field."""
    sizes = _plane_sizes(dtype, k)
    blocks = rows.reshape(len(rows), k // dtype.block, dtype.nbytes)
    packed = np.zeros((len(rows), sum(sizes)), np.uint8)
    at = 0
    for (begin, end), size in zip(_PLANES[dtype], sizes, strict=True):
        plane = packed[:, at : at + blocks.shape[1] * (end - begin)]
        plane.reshape(len(rows), -1, end - begin)[:] = blocks[..., begin:end]
        at += size
    return packed.reshape(-1)


def _padded(rows: Bytes) -> Bytes:
    missing = -len(rows) % LANES
    return np.pad(rows, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(rows)


def _pack_rows(dtype: DType, k: int, rows: Bytes, packed: Bytes) -> None:
    if not dtype.quantized:
        elements = rows.view(np.uint16 if dtype is DType.F16 else np.uint32)
        target = packed.view(elements.dtype).reshape(-1, k, LANES)
        target[:] = elements.reshape(-1, LANES, k).transpose(0, 2, 1)
        return
    blocks = rows.reshape(len(rows), k // dtype.block, dtype.nbytes)
    parts = _READERS[dtype](blocks)
    end = _put(packed, 0, parts.quants.view(np.uint32))
    end = _put_fields(packed, end, parts.scales, parts.scale_bytes)
    if parts.supers is not None:
        _put(packed, end, parts.supers.view(np.uint16))


def _put(packed: Bytes, start: int, words: Array) -> int:
    """Interleave words [rows, blocks, w] of 16 rows each at byte `start`; where they end."""
    _, blocks, width = words.shape
    end = int(start + blocks * width * LANES * words.itemsize)
    target = packed[:, start:end].view(words.dtype).reshape(-1, blocks, width, LANES)
    target[:] = words.reshape(-1, LANES, blocks, width).transpose(0, 2, 3, 1)
    return end


def _put_fields(packed: Bytes, start: int, scales: Bytes, fields: tuple[int, ...]) -> int:
    """Scales of a block: each field of 16 rows together, then the next."""
    _, blocks, width = scales.shape
    end = int(start + blocks * width * LANES)
    target = packed[:, start:end].reshape(-1, blocks, width * LANES)
    source = scales.reshape(-1, LANES, blocks, width)
    at = 0
    for size in fields:
        field = source[..., at : at + size].transpose(0, 2, 1, 3)
        target[..., at * LANES : (at + size) * LANES] = field.reshape(*field.shape[:2], -1)
        at += size
    return end


def _group_bytes(dtype: DType, k: int) -> int:
    """Bytes of a row group: GROUP_BYTES of `cl/blocks.h`."""
    if not dtype.quantized:
        return k * LANES * dtype.nbytes
    quants, scales, supers = _SIZES[dtype]
    plain = k // 32 * (quants + scales) * LANES + k // 256 * supers * LANES
    return -(-plain // 64) * 64


_SIZES = {
    DType.Q4_0: (16, 2, 0),
    DType.Q4_1: (16, 4, 0),
    DType.Q5_0: (20, 2, 0),
    DType.Q5_1: (20, 4, 0),
    DType.Q8_0: (32, 2, 0),
    DType.Q4_K: (16, 2, 4),
    DType.Q5_K: (20, 2, 4),
    DType.Q6_K: (24, 2, 2),
}
"""Bytes a row: quants and scales of a block of 32, scales of a super-block of 256."""


def _q4_0(blocks: Bytes) -> Parts:
    return Parts(quants=_own(blocks[..., 2:]), scales=blocks[..., :2], scale_bytes=(2,))


def _q4_1(blocks: Bytes) -> Parts:
    return Parts(quants=_own(blocks[..., 4:]), scales=blocks[..., :4], scale_bytes=(2, 2))


def _q5_0(blocks: Bytes) -> Parts:
    quants = np.concatenate([blocks[..., 6:], _bit_plane(blocks[..., 2:6])], axis=-1)
    return Parts(quants=quants, scales=blocks[..., :2], scale_bytes=(2,))


def _q5_1(blocks: Bytes) -> Parts:
    quants = np.concatenate([blocks[..., 8:], _bit_plane(blocks[..., 4:8])], axis=-1)
    return Parts(quants=quants, scales=blocks[..., :4], scale_bytes=(2, 2))


def _q8_0(blocks: Bytes) -> Parts:
    # Signed to unsigned: the byte dot product takes the weights as unsigned.
    return Parts(quants=blocks[..., 2:] ^ np.uint8(128), scales=blocks[..., :2], scale_bytes=(2,))


def _q4_k(blocks: Bytes) -> Parts:
    return Parts(
        quants=_k_nibbles(blocks[..., 16:144]).view(np.uint8),
        scales=_k_scales(blocks[..., 4:16]),
        scale_bytes=(1, 1),
        supers=_own(blocks[..., :4]),
    )


def _q5_k(blocks: Bytes) -> Parts:
    # Bit b of byte l of qh is bit 4 of element l of the super-block's block b.
    qh = _words(blocks[..., 16:48])
    planes = [
        _joined((qh[..., chunk] >> block & _ONES) << chunk for chunk in range(8))
        for block in range(8)
    ]
    high = np.stack(planes, axis=-1).reshape(len(blocks), -1, 1)
    words = np.concatenate([_k_nibbles(blocks[..., 48:176]), high], axis=-1)
    return Parts(
        quants=words.view(np.uint8),
        scales=_k_scales(blocks[..., 4:16]),
        scale_bytes=(1, 1),
        supers=_own(blocks[..., :4]),
    )


def _q6_k(blocks: Bytes) -> Parts:
    rows = len(blocks)
    ql = _words(blocks[..., :128]).reshape(rows, -1, 2, 16)
    qh = _words(blocks[..., 128:192]).reshape(rows, -1, 2, 8)
    words = np.empty((*ql.shape[:3], 4, 6), np.uint32)
    # In each half: low nibbles of 64 elements, then their high nibbles, 64 elements on.
    for block in range(2):
        halves = _nibbles(ql[..., 8 * block : 8 * block + 8])
        words[..., block, :4], words[..., block + 2, :4] = halves
    for block in range(4):
        twos = qh >> 2 * block & 3 * _ONES
        for plane in range(2):
            words[..., block, 4 + plane] = _joined(
                twos[..., 4 * plane + chunk] << 2 * chunk for chunk in range(4)
            )
    return Parts(
        quants=words.reshape(rows, -1, 6).view(np.uint8),
        scales=blocks[..., 192:208].reshape(rows, -1, 2),
        scale_bytes=(1, 1),
        supers=_own(blocks[..., 208:210]),
    )


_ONES = np.uint32(0x01010101)


def _own(view: Bytes) -> Bytes:
    return np.ascontiguousarray(view)


def _words(view: Bytes) -> Words:
    """The bytes as little-endian words of four neighbours."""
    return _own(view).view("<u4")


def _joined(terms: Iterable[Words]) -> Words:
    """All terms' bits together."""
    return reduce(np.bitwise_or, terms)


def _nibbles(words: Words) -> tuple[Words, Words]:
    """[..., 8] words of two elements a byte -> low planes [..., 4] of the low and of the high
    elements: elements k and k + 16 share a byte."""
    first, second = words[..., :4], words[..., 4:]
    low = first & 15 * _ONES | (second & 15 * _ONES) << 4
    return low, first >> 4 & 15 * _ONES | second & 240 * _ONES


def _k_nibbles(quants: Bytes) -> Words:
    """128 bytes a super-block (each 32 bytes hold 32 elements low, the next 32 high) -> low planes
    [rows, blocks of 32, 4]."""
    rows = len(quants)
    words = _words(quants).reshape(rows, -1, 4, 8)
    return np.stack(_nibbles(words), axis=3).reshape(rows, -1, 4)


def _bit_plane(words: Bytes) -> Bytes:
    """[rows, blocks, 4]: bit k of a little-endian word -> byte k % 4, bit k / 4."""
    source = _words(words)
    # The product puts bit j of four bits into byte j.
    spread = ((source >> 4 * c & 15) * np.uint32(0x204081) & _ONES for c in range(8))
    plane: Bytes = _joined(bits << c for c, bits in enumerate(spread)).view(np.uint8)
    return plane


def _k_scales(packed: Bytes) -> Bytes:
    """12 bytes of 6-bit scales and minima -> [rows, blocks, (scale, minimum)], whole bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return np.stack([scales, minima], axis=-1).reshape(len(packed), -1, 2)


_READERS: dict[DType, Callable[[Bytes], Parts]] = {
    DType.Q4_0: _q4_0,
    DType.Q4_1: _q4_1,
    DType.Q5_0: _q5_0,
    DType.Q5_1: _q5_1,
    DType.Q8_0: _q8_0,
    DType.Q4_K: _q4_k,
    DType.Q5_K: _q5_k,
    DType.Q6_K: _q6_k,
}
