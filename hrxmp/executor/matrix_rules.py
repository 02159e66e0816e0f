"""Lowering rules of norms and matrix products, and what is fused into them.

A norm takes its weight along, and is left to the matrices where they normalise for themselves;
products of the same rows share a launch; a gate and its up projection become one; a residual is
added where the product is stored.
"""

from __future__ import annotations

from hrxmp.dtypes import DType
from hrxmp.executor.node_pass import NodePass, Norm
from hrxmp.executor.operands import layout, row_count, whole
from hrxmp.executor.places import Place, Rows
from hrxmp.graph import Tensor
from hrxmp.kernels import dispatch


def rms_norm(low: NodePass, node: Tensor) -> None:
    product = low.only_reader(node, "mul")
    weight = product and _norm_weight(low, node, product)
    eps = node.params["eps"]
    if product is None or weight is None:
        _emit_norm(low, node, Norm(x=node.sources[0], weight=None, eps=eps))
        return
    norm = Norm(x=node.sources[0], weight=weight, eps=eps)
    low.finish(product)
    if _norm_fuses(low, product):
        low.norms[product.index] = norm
    else:
        _emit_norm(low, product, norm)


def _norm_weight(low: NodePass, node: Tensor, product: Tensor) -> Tensor | None:
    """The weight that `product` multiplies the norm by, when it is one row that is there."""
    others = [source for source in product.sources if source is not node]
    if len(others) != 1 or product.sources[0] is not node:
        return None
    weight = others[0]
    plain = weight.dtype is DType.F32 and weight.shape == node.shape[-1:] and weight.contiguous
    return (
        weight if plain and low.computed(weight) and low.builder.place(weight).offset == 0 else None
    )


def _norm_fuses(low: NodePass, product: Tensor) -> bool:
    """Whether every reader of the normalised rows is a matrix that can normalise them itself."""
    readers = low.readers(product)
    rows = row_count(product)
    return bool(readers) and product.index not in low.outputs and all(
        reader.op == "mul_mat" and reader.sources[1] is product
        and not low.goes_with_many(reader)
        and (
            dispatch.fuses_norm(low.traits, rows, layout(low.builder.place(reader.sources[0])))
            or _packs(low, [reader])
        )
        for reader in readers
    )  # fmt: skip


def _packs(low: NodePass, products: list[Tensor]) -> bool:
    """Whether the products take rows that a launch of their own has packed (and normalised)."""
    weights = [product.sources[0] for product in products]
    return dispatch.packs_rows(
        low.traits, [weight.dtype for weight in weights], weights[0].shape[1], products[0].shape[0]
    )


def _emit_packed(low: NodePass, node: Tensor, x: Rows, k: int, m: int, norm: Norm | None) -> Place:
    """Pack rows of x; where they lie."""
    operands = {"x": x.place}
    if norm and norm.weight is not None:
        operands["norm_w"] = low.builder.place(norm.weight)
    nbytes = dispatch.packed_row_bytes(k)
    packed = low.builder.fresh(m * nbytes, (nbytes, 1))
    launch = dispatch.pack_rows(
        low.traits, k=k, m=m, norm=norm is not None, x_stride=x.stride, x_offset=x.offset,
        eps=norm.eps if norm else 0.0,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands, y=packed)
    return packed


def _emit_norm(low: NodePass, node: Tensor, norm: Norm) -> None:
    x = low.builder.rows(norm.x)
    operands = {"x": x.place}
    if norm.weight is not None:
        operands["w"] = low.builder.place(norm.weight)
    launch = dispatch.rms_norm(
        low.traits, k=node.shape[-1], m=row_count(node), eps=norm.eps,
        weighted=norm.weight is not None, x_stride=x.stride, x_offset=x.offset,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands, y=low.builder.new(node))


def mul_mat(low: NodePass, node: Tensor) -> None:
    """One product, or all products of the same rows that can share a launch."""
    siblings = _siblings(low, node)
    gate = low.only_reader(node, "swiglu")
    if gate is not None and len(siblings) == 2 and gate.sources == tuple(siblings):
        low.finish(gate, *siblings)
        _emit_product(low, siblings, gate, "swiglu", low.builder.new(gate))
    elif len(siblings) > 1:
        low.finish(*siblings)
        _emit_product(low, siblings, node, "none", _side_by_side(low, siblings))
    else:
        _emit_single(low, node)


def _siblings(low: NodePass, node: Tensor) -> list[Tensor]:
    """The node, and later products of the same rows with weights of the same kind."""
    weight, x = node.sources
    found = [
        other
        for other in low.readers(x)
        if other.op == "mul_mat" and other.sources[1] is x and other.index >= node.index
        and other.index not in low.done and low.computed(other.sources[0])
        and _go_together(low, weight, other.sources[0])
    ]  # fmt: skip
    return found[: dispatch.MAX_WEIGHTS]


def _go_together(low: NodePass, first: Tensor, other: Tensor) -> bool:
    """Whether one product may have both weights."""
    same = layout(low.builder.place(first)) == layout(low.builder.place(other))
    return (same and first.dtype is other.dtype) or dispatch.mixes(
        low.traits, first.dtype, other.dtype
    )


def _side_by_side(low: NodePass, products: list[Tensor]) -> Place:
    """One value for all results; each product's rows stand in it with a common stride."""
    rows = products[0].shape[0]
    width = sum(product.shape[1] for product in products)
    whole = low.builder.fresh(4 * rows * width, (4 * width, 4))
    offset = 0
    for product in products:
        low.builder.put(
            product, Place(memory=whole.memory, strides=whole.strides, offset=4 * offset)
        )
        offset += product.shape[1]
    return whole


def _emit_single(low: NodePass, node: Tensor) -> None:
    total = low.only_reader(node, "add")
    if total is not None and total.shape == node.shape:
        residual = next((s for s in total.sources if s.root is not node.root), None)
        if residual is not None and residual.shape == node.shape and low.computed(residual):
            low.finish(total)
            rows = low.builder.rows(residual)
            _emit_product(low, [node], total, "add", low.builder.new(total), rows)
            return
    _emit_product(low, [node], node, "none", low.builder.new(node))


def _emit_product(
    low: NodePass,
    products: list[Tensor],
    node: Tensor,
    epilogue: dispatch.Epilogue,
    y: Place,
    residual: Rows | None = None,
) -> None:
    norm = low.norms.get(products[0].sources[1].index)
    x = low.builder.rows(norm.x if norm else products[0].sources[1])
    weights = [product.sources[0] for product in products]
    places = [whole(low, weight) for weight in weights]
    k, m = weights[0].shape[1], products[0].shape[0]
    packed = _packs(low, products)
    if packed:
        x = Rows(place=_emit_packed(low, node, x, k, m, norm), stride=k, offset=0)
        norm = None
    operands = {"x": x.place, **{f"w{i}": place for i, place in enumerate(places)}, "y": y}
    if norm and norm.weight is not None:
        operands["norm_w"] = low.builder.place(norm.weight)
    if residual:
        operands["residual"] = residual.place
    launch = dispatch.mul_mat(
        low.traits,
        weights=tuple(
            dispatch.WeightSpec(dtype=weight.dtype, layout=layout(place), n=weight.shape[0])
            for weight, place in zip(weights, places, strict=True)
        ),
        k=k, m=m, many=low.goes_with_many(products[0]), norm=norm is not None, packed=packed,
        epilogue=epilogue,
        eps=norm.eps if norm else 0.0, x_stride=x.stride, x_offset=x.offset,
        r_stride=residual.stride if residual else None,
        r_offset=residual.offset if residual else 0,
    )  # fmt: skip
    low.builder.emit(node, launch, **operands)
