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


def index(low: NodePass, ids: Tensor) -> Place:
    """Positions or row numbers, i32, dense from the first byte of their memory."""
    low.builder.want(ids, DType.I32)
    place = low.builder.dense(ids)
    if place.offset:
        target = low.builder.fresh(ids.nbytes, place.strides)
        low.builder.copy(ids, place, target)
        return target
    return place
