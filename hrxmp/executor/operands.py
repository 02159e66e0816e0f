"""How rules read their operands: layouts, whole matrices, row numbers."""

from __future__ import annotations

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.executor.node_pass import NodePass
from hrxmp.executor.places import Place
from hrxmp.graph import Storage, Tensor


def row_count(tensor: Tensor) -> int:
    return tensor.size // tensor.shape[-1]


def layout(place: Place) -> str:
    return place.memory.layout if isinstance(place.memory, Storage) else "ggml"


def whole(low: NodePass, tensor: Tensor) -> Place:
    """A tensor that kernels read from its memory's first byte: a weight, a cache."""
    place = low.builder.dense(tensor)
    if place.offset:
        raise UnsupportedError(f"its source {tensor.describe()} must begin its storage")
    return place


def by_heads(low: NodePass, cache: Tensor) -> Place:
    """A cache [capacity, heads, d] that kernels read head by head, from its memory's first byte."""
    place = low.builder.place(cache)
    if not lies_by_heads(cache, place):
        capacity, _heads, d = cache.shape
        size = cache.dtype.nbytes
        target = low.builder.fresh(cache.nbytes, (d * size, capacity * d * size, size))
        low.builder.copy(cache, place, target)
        return target
    if place.offset:
        raise UnsupportedError(f"its source {cache.describe()} must begin its storage")
    return place


def lies_by_heads(cache: Tensor, place: Place) -> bool:
    """Whether all rows of a head lie side by side, then those of the next."""
    capacity, heads, d = cache.shape
    size = cache.dtype.nbytes
    row, head, element = place.strides
    return (row, element) == (d * size, size) and (heads == 1 or head == capacity * row)


def index(low: NodePass, ids: Tensor) -> Place:
    """Positions or row numbers, i32, dense from the first byte of their memory."""
    low.builder.want(ids, DType.I32)
    place = low.builder.dense(ids)
    if place.offset:
        target = low.builder.fresh(ids.nbytes, place.strides)
        low.builder.copy(ids, place, target)
        return target
    return place
