"""Inputs, outputs and weights in device memory: in place where the device works in the host's."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from hrxmp.clock import mono_ns
from hrxmp.dtypes import DType
from hrxmp.errors import CompileForbiddenError, DeviceMemoryError, GraphError
from hrxmp.executor import library_pages, staging
from hrxmp.executor.engine import Executor
from hrxmp.executor.lending import MOST, LentArrays, host_memory
from hrxmp.executor.pinned import _unmap, pinned
from hrxmp.executor.session import Link, Session
from hrxmp.graph import Graph, Storage
from hrxmp.identity import new_run_id
from hrxmp.kernels.device import Device
from hrxmp.kernels.layout import pack
from hrxmp.kernels.loader import opencl
from hrxmp.settings import Settings

RANDOM = np.random.default_rng(8)


@pytest.fixture(scope="module")
def executor(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """An executor with synchronous JIT and a store of its own."""
    folder = tmp_path_factory.mktemp("store")
    settings = Settings(async_jit=False, device=device.spec, cache=str(folder))
    session = Session(settings, Link(run_id=new_run_id(), run_begin_ns=mono_ns()))
    yield session.executor
    session.close("ok")


def tripled(uid: int, shape: tuple[int, ...] = (7, 33)) -> Graph:
    graph = Graph(uid=uid)
    graph.output(graph.scale(graph.input("x", shape), 3.0), "y")
    return graph


def test_storages_that_are_allocated_together_do_not_overlap(executor: Executor) -> None:
    sizes = [4, 130, 5000, 300_000, 1 << 20]
    storages = [Storage(size, "together") for size in sizes]
    executor.allocate(storages, "five of them")
    values = [RANDOM.integers(0, 255, size, np.uint8) for size in sizes]
    for storage, value in zip(storages, values, strict=True):
        executor.memory.upload(storage, value)
    for storage, value in zip(storages, values, strict=True):
        found = np.zeros_like(value)
        opencl().enqueue_copy(executor._device.queue, found, executor.memory.buffer(storage))
        np.testing.assert_array_equal(found, value)


def test_memory_that_was_allocated_together_goes_back_together(executor: Executor) -> None:
    """Nothing that was allocated later lies in its large pages and keeps them."""
    storages = [Storage(3 << 20, "dropped"), Storage(300_000, "dropped")]
    executor.allocate(storages, "dropped soon")
    kept = Storage(300_000, "kept")
    executor.memory.buffer(kept)
    region = region_of(executor, storages[0])
    storages.clear()
    gc.collect()
    assert region is None or region() is None


def region_of(executor: Executor, storage: Storage) -> weakref.ref[mmap.mmap] | None:
    """What a buffer in host memory lies in."""
    host = executor.memory.buffer(storage).hostbuf if executor._device.traits.is_cpu else None
    return weakref.ref(host.obj) if isinstance(host, memoryview) else None


def test_a_weight_may_come_in_any_shape_of_its_bytes(executor: Executor) -> None:
    n, k = 26_208, 64
    raw = RANDOM.integers(0, 255, (n, DType.Q4_1.row_bytes(k)), np.uint8)
    storage = executor.upload_weight("w", raw, DType.Q4_1, (n, k))
    found = np.zeros(storage.nbytes, np.uint8)
    opencl().enqueue_copy(executor._device.queue, found, executor.memory.buffer(storage))
    expected = pack(storage.layout, DType.Q4_1, n, k, raw.reshape(-1))
    np.testing.assert_array_equal(found[: expected.nbytes], expected.view(np.uint8).reshape(-1))


def test_an_input_of_a_wrong_kind_is_refused(executor: Executor) -> None:
    graph = Graph(uid=700)
    graph.output(graph.cont(graph.input("ids", (3,), DType.I32)), "y")
    with pytest.raises(GraphError, match="'ids'"):
        executor.execute(graph, {"ids": np.array([1.7, 2.0, 3.0])})


def test_too_much_at_once_is_refused_by_name(executor: Executor) -> None:
    with pytest.raises(DeviceMemoryError, match="the weights of x"):
        executor.allocate([Storage(1 << 61, "a"), Storage(1 << 61, "b")], "the weights of x")


@pytest.mark.parametrize("nbytes", [4, 100, 5000, 300_000])
def test_the_bytes_of_a_buffer_on_the_host_are_the_device_s(
    executor: Executor, nbytes: int
) -> None:
    buffer = executor.memory.buffer(Storage(nbytes, "x"))
    host = executor.memory.host_bytes(buffer)
    if executor.device.kind != "cpu":
        assert host is None
        return
    assert host is not None, "Intel's runtime and PoCL work in the host's memory"
    assert host.ctypes.data % 128 == 0
    cl, queue = opencl(), executor._device.queue
    given, found = RANDOM.integers(0, 255, host.nbytes, np.uint8), np.zeros_like(host)
    host[:] = given
    cl.enqueue_copy(queue, found, buffer)
    np.testing.assert_array_equal(found, given)
    cl.enqueue_copy(queue, buffer, given[::-1].copy())
    np.testing.assert_array_equal(host, given[::-1])


def test_outputs_stay_what_they_are_and_inputs_may_change_at_once(executor: Executor) -> None:
    graph, x = tripled(1), np.zeros((7, 33), np.float32)
    kept = []
    for value in range(4):
        x[:] = value
        kept.append(executor.execute(graph, {"x": x}).outputs["y"])
        x[:] = -1
    for value, output in enumerate(kept):
        np.testing.assert_array_equal(output, np.full((7, 33), 3 * value, np.float32))


def test_an_input_is_converted_and_its_shape_is_checked(executor: Executor) -> None:
    graph = tripled(2)
    given = np.arange(7 * 33, dtype=np.int64).reshape(33, 7).T
    got = executor.execute(graph, {"x": given}).outputs["y"]
    np.testing.assert_array_equal(got, 3 * given)
    for wrong in (np.zeros((1, 33)), np.zeros(7 * 33), np.float32(1)):
        with pytest.raises(GraphError, match="shape"):
            executor.execute(graph, {"x": wrong})
    with pytest.raises(GraphError, match="given"):
        executor.execute(graph, {})
    np.testing.assert_array_equal(executor.execute(graph, {"x": given}).outputs["y"], 3 * given)


def test_a_graph_that_grew_is_not_taken_for_the_one_before(executor: Executor) -> None:
    graph = tripled(3)
    x = np.ones((7, 33), np.float32)
    assert list(executor.execute(graph, {"x": x}).outputs) == ["y"]
    assert executor.execute(graph, {"x": x}).replayed
    graph.output(graph.scale(graph.inputs["x"], 5.0), "z")
    outputs = executor.execute(graph, {"x": x}).outputs
    assert outputs["z"][0, 0] == 5
    assert outputs["y"][0, 0] == 3


def test_what_a_failed_execution_left_on_the_device_does_not_meet_the_next(
    executor: Executor,
) -> None:
    """Its launches may be under way when it fails; the next one's inputs come after them."""
    graph = Graph(uid=4)
    x = graph.input("x", (512, 512))
    y = x
    for _ in range(20):
        y = graph.mul(graph.scale(y, 1.5), x)
    graph.output(y, "y")
    one = np.ones((512, 512), np.float32)
    executor.execute(graph, {"x": one})
    graph.output(graph.rms_norm(y, 1e-5), "z")
    with executor.no_compiles(), pytest.raises(CompileForbiddenError):
        executor.execute(graph, {"x": np.zeros((512, 512), np.float32)})
    got = executor.execute(graph, {"x": one}).outputs["y"]
    np.testing.assert_allclose(got, np.full((512, 512), 1.5**20), rtol=1e-5)


def test_copies_do_what_shared_memory_does(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device with memory of its own: inputs and outputs are copied by the driver."""
    monkeypatch.setattr(executor.memory, "_shared", False)
    graph = Graph(uid=6)
    x, bias = graph.input("x", (9, 130)), graph.input("bias", (130,))
    graph.output(graph.add(x, bias), "sum")
    graph.output(graph.mul(x, bias), "product")
    given = {"x": np.zeros((9, 130), np.float32), "bias": np.ones(130, np.float32)}
    kept = []
    for value in range(3):
        given["x"][:] = value
        kept.append(executor.execute(graph, given).outputs)
        given["x"][:] = -1
    for value, outputs in enumerate(kept):
        np.testing.assert_array_equal(outputs["sum"], np.full((9, 130), value + 1, np.float32))
        np.testing.assert_array_equal(outputs["product"], np.full((9, 130), value, np.float32))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(DType.Q4_1, (40_007, 64)), (DType.Q6_K, (9_001, 256)), (DType.F32, (4_099, 128))],
)
def test_a_weight_in_pieces_is_the_weight_as_a_whole(
    executor: Executor, dtype: DType, shape: tuple[int, int]
) -> None:
    raw = RANDOM.integers(0, 255, dtype.row_bytes(shape[0] * shape[1]), np.uint8)
    read: list[int] = []
    storage = executor.upload_weight("w", raw, dtype, shape, read=read.append)
    found = np.zeros(storage.nbytes, np.uint8)
    buffer = executor.memory.buffer(storage)
    opencl().enqueue_copy(executor._device.queue, found, buffer)
    np.testing.assert_array_equal(found, pack(storage.layout, dtype, *shape, raw))
    assert sum(read) == raw.nbytes
    with pytest.raises(GraphError, match="bytes"):
        executor.upload_weight("w", raw[:-1], dtype, shape)


def test_pieces_through_pinned_memory_arrive(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any device, though only a GPU's memory uses it; also rows larger than pinned memory."""
    monkeypatch.setattr(staging, "_MOST_BYTES", 5000)
    data, read = RANDOM.integers(0, 255, 100_000, np.uint8), []
    pieces = [
        (at, data[at : at + size]) for at, size in ((0, 7000), (7000, 3000), (10_000, 90_000))
    ]
    storage = executor.storage(data.nbytes, "staged")
    buffer = executor.memory.buffer(storage)
    sender = staging.Staging(executor._device)
    sender.send(buffer, pieces, lambda piece: piece ^ 255, read.append)
    found = np.zeros(data.nbytes, np.uint8)
    opencl().enqueue_copy(executor._device.queue, found, buffer)
    np.testing.assert_array_equal(found, data ^ 255)
    assert sum(read) == data.nbytes

    def broken(_piece: Any) -> Any:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        sender.send(buffer, pieces, broken, read.append)
    sender.send(buffer, pieces, lambda piece: piece, read.append)  # and it goes on


def test_libraries_work_after_their_pages_were_given_back(executor: Executor) -> None:
    """The relocated pages stay, the others come back from the file."""
    library_pages.give_back()
    graph = tripled(5, (11, 19))
    x = RANDOM.standard_normal((11, 19), np.float32)
    got = executor.execute(graph, {"x": x}).outputs["y"]
    np.testing.assert_allclose(got, 3 * x, rtol=1e-6)


def test_what_the_linker_read_is_given_back() -> None:
    program = "import numpy; from hrxmp.executor import library_pages as l; print(l.give_back())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) > 0, done.stderr


@pytest.mark.parametrize("locked", [False, True])
def test_a_lent_array_is_the_callers_until_nothing_refers_to_it(
    device: Device, locked: bool
) -> None:
    arrays = LentArrays(partial(pinned, device) if locked else host_memory, (3, 5), "float32")
    first = arrays.take()
    first[:] = 1.0
    row = first[1]  # a view keeps what it looks at
    del first
    second = arrays.take()
    second[:] = 2.0
    assert not np.shares_memory(row, second)
    assert (row == 1.0).all()
    address = row.__array_interface__["data"][0]
    del row
    third = arrays.take()
    third[:] = 3.0
    assert third[1].__array_interface__["data"][0] == address, "it is used again"
    assert (second == 2.0).all()


def test_lent_arrays_take_what_the_device_copies_and_are_bounded(device: Device) -> None:
    arrays = LentArrays(partial(pinned, device), (1000,), "float32")
    kept = []
    for number in range(MOST + 2):
        source = np.full(1000, number, np.float32)
        flags = opencl().mem_flags.READ_ONLY | opencl().mem_flags.COPY_HOST_PTR
        buffer = opencl().Buffer(device.context, flags, hostbuf=source)
        array = arrays.take()
        opencl().enqueue_copy(device.queue, array, buffer, is_blocking=True)
        kept.append(array)
    assert [int(array[0]) for array in kept] == list(range(MOST + 2))
    assert all((array == array[0]).all() for array in kept)
    assert len(arrays._regions) == MOST


class Mapping:
    """A mapping of pinned memory as pyopencl has it: dropped while it is mapped, it is unmapped."""

    def __init__(self, *, lost: bool) -> None:
        self.lost, self.mapped = lost, True

    def release(self) -> None:
        if self.lost:
            raise opencl().LogicError("the device is lost")
        self.mapped = False


@pytest.mark.parametrize(("lost", "in_use"), [(False, False), (True, False), (False, True)])
def test_pinned_memory_goes_back_unless_that_would_end_the_process(
    lost: bool, in_use: bool
) -> None:
    array: np.ndarray[Any, Any] | None = np.zeros(3)
    seen, mapping = weakref.ref(array), Mapping(lost=lost)
    if not in_use:
        array = None
    _unmap(mapping, seen)
    dropped = weakref.ref(mapping)
    assert mapping.mapped == (lost or in_use)
    del mapping
    gc.collect()
    assert (dropped() is None) == (not lost and not in_use)
    del array


def test_pinned_memory_goes_back_with_the_last_view_of_it(device: Device) -> None:
    array = pinned(device, 5000)
    mapping = array.base
    view = array[7:19]
    del array
    gc.collect()
    assert view.sum() >= 0
    del view
    gc.collect()
    with pytest.raises(opencl().Error):
        mapping.release()  # it is unmapped
