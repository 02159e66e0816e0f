"""Lowering rules of rotary embedding, cache rows and attention.

Where queries, keys and values lie side by side, one launch rotates both and stores the rows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hrxmp.executor.node_pass import NodePass
from hrxmp.executor.operands import by_heads, index, lies_by_heads, whole
from hrxmp.graph import Tensor
from hrxmp.kernels import dispatch


def rope(low: NodePass, node: Tensor) -> None:
    stored = _rope_with_rows(low, node)
    if stored is not None:
        _emit_rope_set_rows(low, node, stored)
        return
    x, positions, *factors = node.sources
    rows = low.builder.rows(x, axes=1)
    operands = {"x": rows.place, "positions": index(low, positions)}
    if factors:
        operands["factors"] = whole(low, factors[0])
    launch = dispatch.rope(
        low.traits, head_dim=x.shape[2], n_heads=x.shape[1], m=x.shape[0],
        factors=bool(factors), x_stride=rows.stride, x_offset=rows.offset, **node.params,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands, y=low.builder.new(node))


class RopeRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rotated keys and plain values on their way into the caches, beside the queries."""

    rope_k: Tensor
    set_k: Tensor
    set_v: Tensor


def _rope_with_rows(low: NodePass, node: Tensor) -> RopeRows | None:
    """The rest of the pattern when `node` rotates queries that lie beside their keys and values."""
    x, positions = node.sources[:2]
    if low.only_reader(x.root, "rope") is not node:
        return None
    pending = [n for n in low.graph.nodes[node.index :] if n.index not in low.done]
    width = 4 * x.shape[1] * x.shape[2]
    rope_k = next((n for n in pending if n.op == "rope" and n is not node
                   and n.sources[1:] == node.sources[1:] and n.params == node.params
                   and _beside(low, x, n.sources[0], width)), None)  # fmt: skip
    set_k = rope_k and low.only_reader(rope_k, "set_rows")
    if rope_k is None or set_k is None or set_k.sources[2] is not positions:
        return None
    width += 4 * rope_k.shape[1] * rope_k.shape[2]
    set_v = next((n for n in pending if n.op == "set_rows" and n.sources[2] is positions
                  and _beside(low, x, n.sources[1], width)), None)  # fmt: skip
    if set_v is None or set_v.shape != set_k.shape or set_v.dtype is not set_k.dtype:
        return None
    for stored in (set_k, set_v):
        place = low.builder.place(stored.sources[0])
        if place.offset or len(stored.shape) != 3 or not lies_by_heads(stored, place):
            return None
    return RopeRows(rope_k=rope_k, set_k=set_k, set_v=set_v)


def _beside(low: NodePass, first: Tensor, other: Tensor, offset: int) -> bool:
    """Whether `other` is computed, and lies `offset` bytes after `first` in the same rows."""
    if not low.computed(other) or other.shape[0] != first.shape[0]:
        return False
    a, b = low.builder.place(first), low.builder.place(other)
    return a.memory == b.memory and a.strides[0] == b.strides[0] and b.offset == a.offset + offset


def _emit_rope_set_rows(low: NodePass, node: Tensor, stored: RopeRows) -> None:
    """Rotate and store in one launch; for one row, the attention that reads it comes along."""
    x, positions, *factors = node.sources
    place, cache = low.builder.place(x), stored.set_k
    operands = {"qkv": place, "positions": index(low, positions)}
    if factors:
        operands["factors"] = whole(low, factors[0])
    operands["k_cache"] = low.builder.place(stored.set_k.sources[0])
    operands["v_cache"] = low.builder.place(stored.set_v.sources[0])
    shape: dict[str, Any] = {
        "head_dim": x.shape[2], "n_heads": x.shape[1], "n_kv_heads": stored.rope_k.shape[1],
        "m": x.shape[0], "kv_dtype": cache.dtype, "kv_capacity": cache.shape[0],
        "factors": bool(factors), "offset": place.offset // 4, **node.params,
    }  # fmt: skip
    attention = _attention_of_row(low, node, stored)
    low.finish(stored.rope_k, stored.set_k, stored.set_v)
    if attention is None:
        launch = dispatch.rope_set_rows(low.traits, stride=place.strides[0] // 4, **shape)
        low.builder.emit(node, launch, **operands)
        low.builder.put(node, place)
        return
    launch = dispatch.rope_flash_attn(low.traits, scale=attention.params["scale"], **shape)
    low.builder.emit(attention, launch, **operands, y=low.builder.new(attention))
    low.finish(attention)


def _attention_of_row(low: NodePass, node: Tensor, stored: RopeRows) -> Tensor | None:
    """The attention that reads the rotated queries and the stored rows, where it can do both."""
    attention = low.only_reader(node, "flash_attn")
    expected = (node, stored.set_k, stored.set_v, node.sources[1])
    if attention is None or attention.sources != expected:
        return None
    return attention if dispatch.fuses_rope(low.traits, node.shape[0]) else None


def flash_attn(low: NodePass, node: Tensor) -> None:
    q, k, v, positions = node.sources
    low.builder.want(k, v.dtype)
    rows = low.builder.rows(q, axes=1)
    operands = {"q": rows.place, "k_cache": by_heads(low, k), "v_cache": by_heads(low, v)}
    launch = dispatch.flash_attn(
        low.traits, head_dim=q.shape[2], n_heads=q.shape[1], n_kv_heads=k.shape[1],
        m=q.shape[0], kv_dtype=k.dtype, kv_capacity=k.shape[0], scale=node.params["scale"],
        q_stride=rows.stride, q_offset=rows.offset,
    )  # fmt: skip
    operands["positions"] = index(low, positions)
    low.builder.emit(node, launch, **operands, y=low.builder.new(node))
