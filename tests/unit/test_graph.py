"""Graphs: shapes, views, refusals, and the structural digest."""

from __future__ import annotations

import pytest

from hrxmp.dtypes import DType
from hrxmp.errors import GraphError
from hrxmp.graph import Graph, Storage


def chain(uid: int = 0, *, factor: float = 2.0, shape: tuple[int, ...] = (4, 8)) -> Graph:
    graph = Graph(uid=uid)
    a, b = graph.input("a", shape), graph.input("b", shape[-1:])
    graph.output(graph.scale(graph.add(a, b), factor), "y")
    return graph


def test_equal_structures_have_equal_digests_whatever_their_memory() -> None:
    assert chain(1).digest() == chain(2).digest()
    assert chain().storages() != chain().storages()


@pytest.mark.parametrize("other", [chain(factor=3.0), chain(shape=(4, 9)), chain(shape=(2, 4, 8))])
def test_another_parameter_or_shape_is_another_structure(other: Graph) -> None:
    assert other.digest() != chain().digest()


def test_sharing_memory_is_part_of_the_structure() -> None:
    def sum_of(first: Storage, second: Storage) -> str:
        graph = Graph()
        a = graph.tensor("a", (4,), DType.F32, first)
        b = graph.tensor("b", (4,), DType.F32, second)
        graph.output(graph.add(a, b), "y")
        return graph.digest()

    one, two = Storage(16), Storage(16)
    assert sum_of(one, one) != sum_of(one, two)
    assert sum_of(one, two) == sum_of(two, one)


def test_the_digest_follows_what_is_added_later() -> None:
    graph = chain()
    before = graph.digest()
    graph.output(graph.silu(graph.outputs["y"]), "z")
    assert graph.digest() != before


def test_views_see_the_same_memory_at_their_offset() -> None:
    graph = Graph()
    x = graph.input("x", (6, 8))
    row = x.view((1, 8), offset=5 * 32)
    turned = x.permute((1, 0))
    assert row.storage is x.storage and row.offset == 160 and row.contiguous
    assert turned.shape == (8, 6) and turned.strides == (4, 32) and not turned.contiguous
    assert turned.root is x


def test_what_lies_outside_its_memory_is_refused() -> None:
    graph = Graph()
    x = graph.input("x", (6, 8))
    with pytest.raises(GraphError, match="ends at byte 196 of 192"):
        x.view((1, 8), offset=164)
    with pytest.raises(GraphError, match="ends at byte"):
        x.view((4, 8), strides=(64, 4))
    with pytest.raises(GraphError, match="ends at byte"):
        graph.tensor("w", (4, 64), DType.Q4_1, Storage(10))
    with pytest.raises(GraphError, match="negative"):
        x.view((1, 8), offset=-4)


def test_block_formats_have_strides_of_blocks() -> None:
    graph = Graph()
    w = graph.tensor("w", (3, 64), DType.Q4_1, Storage(3 * 40))
    assert w.strides == (40, 20) and w.nbytes == 120
    with pytest.raises(GraphError, match="no multiple of q4_1's block of 32"):
        graph.tensor("v", (3, 65), DType.Q4_1, Storage(1000))


def refused(build: str) -> None:
    graph = Graph()
    x, ids = graph.input("x", (4, 8)), graph.input("ids", (4,), DType.I32)
    w, q = graph.input("w", (5, 9)), graph.input("q", (4, 2, 4))
    names = {"graph": graph, "x": x, "ids": ids, "w": w, "q": q, "DType": DType}
    with pytest.raises(GraphError) as caught:
        eval(build, names)
    assert (
        "node" in str(caught.value) or "input" in str(caught.value) or "shape" in str(caught.value)
    )


@pytest.mark.parametrize(
    "build",
    [
        "graph.add(x, w)",
        "graph.mul_mat(w, x)",
        "graph.get_rows(x, x)",
        "graph.set_rows(w, x, ids)",
        "graph.rope(q, x, n_dims=4)",
        "graph.rope(q, ids, n_dims=3)",
        "graph.rope(q, ids, n_dims=4, mode='spiral')",
        "graph.swiglu(x, w)",
        "graph.flash_attn(q, q, w, ids, scale=1.0)",
        "graph.soft_max(x, mask=w)",
        "graph.cpy(x, w)",
        "x.reshape((3, 3))",
        "x.permute((0, 0))",
        "graph.input('x', (1,))",
        "graph.input('y', (0, 4))",
        "graph.input('y', (1, 1, 1, 1, 1))",
        "graph.input('y', (32,), DType.Q8_0)",
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_node(build: str) -> None:
    refused(build)


def test_a_tensor_of_another_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="another graph"):
        Graph().silu(Graph().input("x", (4,)))
