"""The jit's bookkeeping: who asked, what was counted, what is said. No device, no pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hrxmp import records
from hrxmp.errors import CompileForbiddenError, CompileRejectedError
from hrxmp.executor.counts import GraphCounts
from hrxmp.executor.guard import Guard
from hrxmp.executor.jit import Binary, Cause, Jit, Wanted
from hrxmp.executor.kernel_table import LoadReport
from hrxmp.executor.reasons import Reasons, Storms
from hrxmp.kernels import catalog
from hrxmp.kernels.keys import KeyComponents, Variant
from hrxmp.kernels.store import Store


def wanted(name: str, **params: int) -> Wanted:
    variant = Variant(definition=name, params=tuple(params.items()), local_size=(1,))
    components = KeyComponents(
        source="s", entry_point=name, params=variant.params, local_size=(1,), build_options="",
        sanitizer="", platform="p", device="d", compute_units=1, driver="1",
    )  # fmt: skip
    return Wanted(key=components.digest(), variant=variant, components=components)


class Pool:
    """A compiler whose answers the test decides."""

    synchronous = False

    def __init__(self) -> None:
        self.accepted: dict[int, Callable[[str], None]] = {}
        self.finished: set[int] = set()
        self.broken: set[int] = set()
        self.settled: list[int] = []
        self.hurried: list[int] = []

    def submit(
        self, request: int, wanted: Wanted, exec_id: int | None, accepted: Callable[[str], None]
    ) -> None:
        self.accepted[request] = accepted

    def ready(self, request: int) -> bool:
        self.accepted.pop(request, lambda _via: None)("compile")
        return request in self.finished

    def result(self, request: int) -> Binary:
        if request in self.broken:
            raise CompileRejectedError("no", log="line 1: error")
        return Binary(payload=b"binary", compile_ns=1)

    def urgent(self, requests: list[int]) -> None:
        self.hurried += requests

    def settle(self, request: int) -> None:
        self.settled.append(request)


class Table:
    """Loads everything at once; `slow` makes the driver compile."""

    slow = False

    def load(self, key: str, variant: Variant, binary: bytes, compile_ns: int) -> LoadReport:
        return LoadReport(load_ns=1, launch_ns=1, driver_compiled=self.slow)


class Tracer:
    def __init__(self) -> None:
        self.said: list[tuple[type[records.Record], dict[str, Any]]] = []

    def emit(self, record: type[records.Record], **fields: Any) -> None:
        self.said.append((record, fields))

    def of(self, record: type[records.Record]) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.said if kind is record]


class Bench:
    """A jit with its parts."""

    def __init__(self, mode: str = "off") -> None:
        self.pool, self.table, self.tracer = Pool(), Table(), Tracer()
        self.guard = Guard(mode)  # type: ignore[arg-type]
        self.warned: list[str] = []
        reasons = Reasons(Store(None), Storms(2, 10), None, self.warned.append)
        parts: Any = (self.table, self.pool, reasons, self.guard, self.tracer)
        self.jit = Jit(*parts)

    def run(self, exec_id: int | None, *items: Wanted) -> GraphCounts:
        cause = Cause(exec_id=exec_id, counts=GraphCounts())
        self.jit.ask(items, cause)
        if exec_id is not None:
            for item in items:
                self.jit.need(item.key, cause)
        return cause.counts


def test_a_kernel_is_asked_for_once_and_then_found_in_memory() -> None:
    bench, item = Bench(), wanted("k", N=1)
    first, second = bench.run(1, item), bench.run(2, item)
    assert (first.requests, first.compiles, first.waits) == (1, 1, 1)
    assert (second.requests, second.memory_hits, second.waits) == (0, 1, 0)


def test_a_request_is_recorded_before_its_wait() -> None:
    bench = Bench()
    bench.run(1, wanted("k"))
    kinds = [kind for kind, _ in bench.tracer.said]
    assert kinds == [
        records.CompileRequested, records.WaitBegin, records.WaitEnd, records.KernelLoad
    ]  # fmt: skip


def test_what_is_there_already_is_no_wait() -> None:
    bench = Bench()
    bench.pool.finished.add(1)
    counts = bench.run(1, wanted("k"))
    assert counts.waits == 0 and not bench.tracer.of(records.WaitBegin)


def test_the_first_execution_after_a_prefetch_counts_its_request() -> None:
    bench, item = Bench(), wanted("k")
    bench.run(None, item)
    first, second = bench.run(7, item), bench.run(8, item)
    assert (first.requests, first.joins, first.compiles) == (1, 1, 0)
    assert second.requests == 0
    said = bench.tracer.of(records.CompileRequested)
    assert [(s["exec_id"], s["via"]) for s in said] == [(7, "prefetch"), (None, "compile")]
    assert bench.tracer.of(records.WaitBegin)[0]["asked_by"] is None


def test_a_prefetch_asks_for_the_longest_kernels_first_when_told_to() -> None:
    names = ["addresses", "rms_norm", "mul_mat_vec", "get_rows"]
    for longest_first, order in ((False, names), (True, sorted(names, key=longer, reverse=True))):
        bench = Bench()
        bench.jit.prefetch(map(wanted, names), longest_first=longest_first)
        for request in range(1, len(names) + 1):
            bench.pool.ready(request)
        said = bench.tracer.of(records.CompileRequested)
        assert [s["kernel"] for s in said] == order
        assert all(s["prefetch"] and s["exec_id"] is None for s in said)
    assert order[0] == "mul_mat_vec" and order[-1] == "addresses"


def longer(name: str) -> int:
    """The order of magnitude of its source: as much as that tells of its compile."""
    return len(catalog.source_text(catalog.get(name))).bit_length()


def test_a_failure_names_kernel_and_key_and_may_be_asked_again() -> None:
    bench, item = Bench(), wanted("k", N=3)
    bench.pool.broken.add(1)
    with pytest.raises(CompileRejectedError) as caught:
        bench.run(1, item)
    assert caught.value.kernel == "k(N=3) local 1" and caught.value.key == item.key
    assert caught.value.log == "line 1: error"
    assert bench.run(2, item).requests == 1


def test_the_guard_refuses_before_anything_is_asked() -> None:
    bench = Bench("error")
    bench.run(1, wanted("k", N=1))
    bench.guard.declare_warm()
    with pytest.raises(CompileForbiddenError, match=r"k\(N=2\).*differs in params.N 1 -> 2"):
        bench.run(2, wanted("k", N=2))
    assert 2 not in bench.pool.accepted
    (said,) = bench.tracer.of(records.Guard)
    assert said["why"] == "differs" and said["differs"][0].component == "params.N"


def test_the_guard_warns_once_a_graph() -> None:
    bench = Bench("warn")
    bench.guard.declare_warm()
    bench.run(1, wanted("a"), wanted("b"))
    bench.run(2, wanted("c"))
    assert len(bench.warned) == 2 and len(bench.tracer.of(records.Guard)) == 2


def test_a_compile_by_the_driver_is_counted_and_guarded() -> None:
    bench = Bench("error")
    bench.table.slow = True
    assert bench.run(1, wanted("a")).driver_compiles == 1
    bench.run(None, wanted("b"))
    bench.guard.declare_warm()
    with pytest.raises(CompileForbiddenError, match="driver"):
        bench.run(2, wanted("b"))


def test_no_compiles_holds_inside_only() -> None:
    bench = Bench()
    with bench.guard.no_compiles(), pytest.raises(CompileForbiddenError):
        bench.run(1, wanted("a"))
    assert bench.run(2, wanted("a")).compiles == 1


def test_abandoned_requests_are_settled() -> None:
    bench, items = Bench(), [wanted("a"), wanted("b")]
    bench.jit.ask(items, Cause(exec_id=1, counts=GraphCounts()))
    bench.jit.abandon([item.key for item in items])
    assert bench.pool.settled == [1, 2]
    assert bench.run(2, *items).requests == 2


def test_storms_are_told_once_with_their_exact_count() -> None:
    storms = Storms(2, 10)
    for time in range(5):
        assert storms.note("k", "params.N", time) == []
    assert storms.note("other", "driver", 100) == [("k", "params.N", 5)]
    assert storms.over() == []
