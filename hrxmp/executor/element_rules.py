"""Lowering rules of the ops that touch each element once: arithmetic, soft_max, rows, copies."""

from __future__ import annotations

from typing import Literal

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.executor.node_pass import NodePass
from hrxmp.executor.operands import index, layout, lies_by_heads, row_count, whole
from hrxmp.graph import Tensor
from hrxmp.kernels import dispatch


def binary(low: NodePass, node: Tensor) -> None:
    a, b = node.sources
    for source in (a, b):
        low.builder.want(source, DType.F32)
    views = {"a": low.builder.view(a), "b": low.builder.view(b)}
    places = {"a": low.builder.place(a), "b": low.builder.place(b)}
    y = low.builder.new(node)
    op: Literal["add", "mul"] = "add" if node.op == "add" else "mul"
    launch = dispatch.binary(low.traits, op=op, y=low.builder.view(node), **views)
    low.builder.emit(node, launch, y=y, **places)


def unary(low: NodePass, node: Tensor) -> None:
    (x,) = node.sources
    low.builder.want(x, DType.F32)
    source = low.builder.dense(x)
    y = low.builder.new(node)
    function = dispatch.scale if node.op == "scale" else dispatch.silu
    launch = function(low.traits, count=node.size, x_offset=source.offset // 4, **node.params)
    low.builder.emit(node, launch, x=source, y=y)


def swiglu(low: NodePass, node: Tensor) -> None:
    gate, up = (low.builder.rows(source) for source in node.sources)
    y = low.builder.new(node)
    launch = dispatch.swiglu(
        low.traits, k=node.shape[-1], m=row_count(node), gate_stride=gate.stride,
        gate_offset=gate.offset, up_stride=up.stride, up_offset=up.offset,
    )  # fmt: skip
    low.builder.emit(node, launch, gate=gate.place, up=up.place, y=y)


def soft_max(low: NodePass, node: Tensor) -> None:
    x = low.builder.rows(node.sources[0])
    operands, mask_args = {"x": x.place}, {}
    if len(node.sources) == 2:
        mask = low.builder.rows(node.sources[1])
        operands["mask"] = mask.place
        mask_args = {"mask_rows": row_count(node.sources[1]), "mask_stride": mask.stride,
                     "mask_offset": mask.offset}  # fmt: skip
    operands["y"] = low.builder.new(node)
    launch = dispatch.soft_max(
        low.traits, k=node.shape[-1], m=row_count(node), scale=node.params["scale"],
        x_stride=x.stride, x_offset=x.offset, **mask_args,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands)


def argmax(low: NodePass, node: Tensor) -> None:
    (source,) = node.sources
    x = low.builder.rows(source)
    launch = dispatch.argmax(
        low.traits, k=source.shape[-1], m=row_count(source), x_stride=x.stride, x_offset=x.offset
    )
    low.builder.emit(node, launch, x=x.place, y=low.builder.new(node))


# -- rows and copies -------------------------------------------------------------------------


def get_rows(low: NodePass, node: Tensor) -> None:
    table, ids = node.sources
    place = whole(low, table)
    launch = dispatch.get_rows(
        low.traits, dtype=table.dtype, layout=layout(place), k=node.shape[1], m=node.shape[0],
        table_rows=table.shape[0],
    )  # fmt: skip
    low.builder.emit(node, launch, table=place, ids=index(low, ids), y=low.builder.new(node))


def set_rows(low: NodePass, node: Tensor) -> None:
    cache, rows, ids = node.sources
    place, size = low.builder.place(cache), cache.dtype.nbytes
    x = low.builder.rows(rows, axes=1)
    by_heads = len(cache.shape) == 3 and lies_by_heads(cache, place)
    if not by_heads and low.builder.rows(cache, cache.dtype, axes=1).place != place:
        raise UnsupportedError(f"its target {cache.describe()} has rows that are not dense")
    parts, step = (cache.shape[1], place.strides[1] // size) if by_heads else (1, 0)
    k = cache.size // cache.shape[0] // parts
    for part in range(parts):
        launch = dispatch.set_rows(
            low.traits, k=k, m=ids.shape[0], dst=cache.dtype, cache_rows=cache.shape[0],
            x_stride=x.stride, x_offset=x.offset + part * k,
            cache_stride=place.strides[0] // size,
            cache_offset=place.offset // size + part * step,
        )  # fmt: skip
        low.builder.emit(node, launch, x=x.place, ids=index(low, ids), cache=place)


def cpy(low: NodePass, node: Tensor) -> None:
    x, to = node.sources
    source, target = low.builder.place(x), low.builder.place(to)
    views = {"x": low.builder.view(x, source), "y": low.builder.view(to, target)}
    launch = dispatch.cpy(low.traits, src=x.dtype, dst=to.dtype, **views)
    low.builder.emit(node, launch, x=source, y=target)


def cont(low: NodePass, node: Tensor) -> None:
    source = low.builder.place(node.sources[0])
    low.builder.copy(node.sources[0], source, low.builder.new(node))
