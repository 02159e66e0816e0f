"""The Executor on each device: graphs against numpy, caches, failures, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from hrxmp.clock import mono_ns
from hrxmp.dtypes import DType
from hrxmp.errors import CompileForbiddenError, DeviceMemoryError, GraphError, UnsupportedError
from hrxmp.executor.engine import Executor
from hrxmp.executor.session import Link, Session
from hrxmp.graph import Graph, Storage, Tensor
from hrxmp.identity import new_run_id
from hrxmp.kernels.device import Device
from hrxmp.settings import Settings

RANDOM = np.random.default_rng(5)


@pytest.fixture(scope="module")
def executor(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """An executor with synchronous JIT and a store of its own."""
    folder = tmp_path_factory.mktemp("store")
    settings = Settings(async_jit=False, device=device.spec, cache=str(folder))
    session = Session(settings, Link(run_id=new_run_id(), run_begin_ns=mono_ns()))
    yield session.executor
    session.close("ok")


def array(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, np.float32)


def scaled(uid: int, factor: float = 2.0, shape: tuple[int, ...] = (3, 5)) -> Graph:
    graph = Graph(uid=uid)
    graph.output(graph.scale(graph.input("x", shape), factor), "y")
    return graph


def test_arithmetic_on_views_and_strides(executor: Executor) -> None:
    graph = Graph()
    x, row = graph.input("x", (6, 8)), graph.input("row", (8,))
    turned = graph.cont(x.permute((1, 0)))
    inner = graph.add(x.view((4, 6), strides=(32, 4), offset=36), x.view((4, 6), strides=(32, 4)))
    graph.output(graph.mul(graph.add(x, row), x), "square")
    graph.output(graph.silu(turned), "turned")
    graph.output(inner, "inner")
    given = {"x": array(6, 8), "row": array(8)}
    got = executor.execute(graph, given).outputs
    a, b = given["x"], given["row"]
    t = a.T.astype(np.float64)
    np.testing.assert_allclose(got["square"], (a + b) * a, rtol=1e-6)
    np.testing.assert_allclose(got["turned"], t / (1 + np.exp(-t)), rtol=1e-5)
    np.testing.assert_allclose(got["inner"], a[1:5, 1:7] + a[:4, :6], rtol=1e-6)


def test_values_that_a_fused_product_leaves_side_by_side_are_read_right(executor: Executor) -> None:
    """q, k and v share a launch; readers of other shapes still see each alone."""
    graph = Graph()
    x = graph.input("x", (5, 64))
    weights = {name: array(n, 64) for name, n in (("q", 48), ("k", 16), ("v", 32))}
    products = {}
    for name, value in weights.items():
        storage = executor.upload_weight(
            name, value.view(np.uint8).reshape(-1), DType.F32, value.shape
        )
        products[name] = graph.mul_mat(graph.tensor(name, value.shape, DType.F32, storage), x)
    graph.output(products["q"].reshape((5, 3, 16)), "q")
    graph.output(graph.scale(products["k"], 2.0), "k")
    graph.output(graph.soft_max(products["v"].view((1, 32), offset=4 * 32 * 4)), "v")
    given = array(5, 64)
    got = executor.execute(graph, {"x": given}).outputs
    np.testing.assert_allclose(
        got["q"].reshape(5, 48), given @ weights["q"].T, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(got["k"], 2 * (given @ weights["k"].T), rtol=1e-4, atol=1e-4)
    last = np.exp((given @ weights["v"].T)[4])
    np.testing.assert_allclose(got["v"][0], last / last.sum(), rtol=1e-4, atol=1e-6)


def test_rows_are_written_into_memory_that_outlives_the_graph(executor: Executor) -> None:
    cache = executor.upload(np.zeros((7, 4), np.float32), "cache")
    graph = Graph(uid=90)
    rows, ids = graph.input("rows", (2, 4)), graph.input("ids", (2,), DType.I32)
    table = graph.set_rows(graph.tensor("cache", (7, 4), DType.F32, cache), rows, ids)
    graph.output(table, "cache")
    expected = np.zeros((7, 4), np.float32)
    for places in ([1, 5], [0, 1]):
        value = array(2, 4)
        expected[places] = value
        got = executor.execute(graph, {"rows": value, "ids": np.array(places, np.int32)})
        np.testing.assert_array_equal(got.outputs["cache"], expected)


@pytest.mark.parametrize("by_heads", [True, False])
def test_attention_over_caches_in_either_order(executor: Executor, by_heads: bool) -> None:
    """Rows go where the cache has them; heads that do not lie together are copied to be read."""
    graph, (capacity, heads, d, m) = Graph(), (20, 2, 16, 3)
    past = [array(capacity, heads, d) for _ in "kv"]
    order = (1, 0, 2) if by_heads else (0, 1, 2)
    ids = graph.input("positions", (m,), DType.I32)
    caches = []
    for name, value in zip("kv", past, strict=True):
        stored = value.transpose(order)
        storage = executor.upload(np.ascontiguousarray(stored), name)
        cache = graph.tensor(name, stored.shape, DType.F32, storage).permute(order)
        caches.append(graph.set_rows(cache, graph.input(f"new_{name}", (m, heads, d)), ids))
    q = graph.input("q", (m, 2 * heads, d))
    graph.output(graph.flash_attn(q, *caches, ids, scale=0.25), "y")
    graph.output(graph.cont(caches[0]), "cache")
    positions = np.array([7, 8, 9], np.int32)
    given = {"q": array(m, 2 * heads, d), "positions": positions}
    given |= {f"new_{name}": array(m, heads, d) for name in "kv"}
    got = executor.execute(graph, given).outputs
    for value, name in zip(past, "kv", strict=True):
        value[positions] = given[f"new_{name}"]
    expected = np.empty((m, 2 * heads, d))
    for row, head in np.ndindex(m, 2 * heads):
        keys, values = (value[: positions[row] + 1, head // 2] for value in past)
        weights = np.exp(keys.astype(np.float64) @ given["q"][row, head] * 0.25)
        expected[row, head] = weights / weights.sum() @ values
    np.testing.assert_allclose(got["y"].reshape(expected.shape), expected, atol=3e-5)
    np.testing.assert_array_equal(got["cache"], past[0])


def test_rows_that_do_not_lie_together_are_no_target(executor: Executor) -> None:
    graph = Graph()
    table = graph.tensor("table", (4, 7), DType.F32, executor.upload(array(4, 7), "table"))
    ids = graph.input("ids", (2,), DType.I32)
    graph.output(graph.set_rows(table.permute((1, 0)), graph.input("x", (2, 4)), ids), "y")
    given = {"x": array(2, 4), "ids": np.array([0, 1], np.int32)}
    with pytest.raises(UnsupportedError, match="rows that are not dense"):
        executor.execute(graph, given)


def test_the_same_uid_and_structure_reuses_the_program(executor: Executor) -> None:
    before = executor.stats
    start = (
        before.program_builds,
        before.program_hits,
        before.prepared_builds,
        before.prepared_hits,
    )
    for graph in (scaled(41), scaled(41)):
        x = array(3, 5)
        np.testing.assert_array_equal(executor.execute(graph, {"x": x}).outputs["y"], 2 * x)
    stats = executor.stats
    end = (stats.program_builds, stats.program_hits, stats.prepared_builds, stats.prepared_hits)
    assert [b - a for a, b in zip(start, end, strict=True)] == [1, 1, 2, 0]


def test_the_same_uid_with_another_structure_never_runs_the_old_program(executor: Executor) -> None:
    x = array(3, 5)
    for factor in (2.0, 3.0, 2.0):
        got = executor.execute(scaled(42, factor), {"x": x})
        np.testing.assert_array_equal(got.outputs["y"], np.float32(factor) * x)


def test_a_second_execution_replays_and_counts_nothing(executor: Executor) -> None:
    graph = scaled(43, shape=(2, 129))
    executor.execute(graph, {"x": array(2, 129)})
    second = executor.execute(graph, {"x": array(2, 129)})
    assert second.replayed and not any(second.counts.as_dict().values())


def test_wrong_inputs_are_refused_and_the_executor_lives(executor: Executor) -> None:
    graph = scaled(44)
    for given in ({}, {"z": array(3, 5)}, {"x": array(5, 3)}):
        with pytest.raises(GraphError, match="expected"):
            executor.execute(graph, given)
    x = array(3, 5)
    np.testing.assert_array_equal(executor.execute(graph, {"x": x}).outputs["y"], 2 * x)


def test_what_is_not_supported_is_refused_before_anything_is_compiled(executor: Executor) -> None:
    graph = Graph()
    Tensor(graph, "flip", DType.F32, (3,), sources=(graph.input("x", (3,)),))
    requests = executor.totals.requests
    with pytest.raises(UnsupportedError, match="flip"):
        executor.execute(graph, {"x": array(3)})
    assert executor.totals.requests == requests


def test_no_compiles_is_for_unit_tests(executor: Executor) -> None:
    graph = Graph()
    graph.output(graph.rms_norm(graph.input("x", (2, 77)), 1e-5), "y")
    with executor.no_compiles(), pytest.raises(CompileForbiddenError, match="rms_norm"):
        executor.execute(graph, {"x": array(2, 77)})
    executor.execute(graph, {"x": array(2, 77)})
    with executor.no_compiles():
        executor.execute(graph, {"x": array(2, 77)})


def test_programs_of_many_lengths_share_the_arena(executor: Executor) -> None:
    def squares(length: int) -> Graph:
        graph = Graph(uid=1000 + length)
        x = graph.input("x", (length, 1024))
        graph.output(graph.add(graph.mul(graph.scale(x, 2.0), x), x), "y")
        return graph

    executor.execute(squares(64), {"x": array(64, 1024)})
    before = executor.memory.allocated_bytes
    for length in range(40, 64):
        x = array(length, 1024)
        got = executor.execute(squares(length), {"x": x}).outputs["y"]
        np.testing.assert_allclose(got, 2 * x * x + x, rtol=1e-5, atol=1e-6)
    inputs = sum(4 * 1024 * length for length in range(40, 64))
    assert executor.memory.allocated_bytes - before <= inputs


def test_out_of_memory_names_what_took_it(executor: Executor) -> None:
    kept = executor.upload(array(1 << 20), "blk.0.attn_q.weight")
    with pytest.raises(
        DeviceMemoryError, match=r"cache_k.0: .* could not be allocated on .*weight"
    ):
        executor.storage(1 << 62, "cache_k.0")
    assert isinstance(kept, Storage)


def test_memory_goes_with_its_handle(executor: Executor) -> None:
    storage = executor.storage(1 << 20, "temporary")
    assert executor.memory.held()["temporary"] == 1 << 20
    del storage
    gc.collect()
    assert "temporary" not in executor.memory.held()
