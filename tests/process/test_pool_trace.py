"""The pool's records: in order behind the requests, in pairs, for the run that asked, and whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hrxmp import records
from hrxmp.aggregator.check import check
from hrxmp.aggregator.reader import Trace, read
from hrxmp.clock import mono_ns
from hrxmp.executor.compile_client import CompileClient, Ticket
from hrxmp.records import Record
from tests.process.aggregator_process import (
    PATIENCE_S,
    UNHURRIED,
    AggregatorProcess,
    aggregator,
    tracer,
)
from tests.process.pool_fixture import PoolProcess, make_request, outcome, running_pool

R = TypeVar("R", bound=Record)


class Run:
    """A traced executor, as far as the pool can tell: it notes requests as the real one does."""

    def __init__(self, pool: PoolProcess, endpoint: str, run_id: str) -> None:
        self.tracer = tracer(endpoint, "executor", run=run_id)
        self.client: CompileClient = pool.client(
            run_id, trace_endpoint=endpoint, run_begin_ns=mono_ns()
        )

    def request(self, exec_id: int, *, prefetch: bool = True, **params: Any) -> Ticket:
        body = make_request(**params)
        noted = partial(self._accepted, body, exec_id, prefetch=prefetch)
        return self.client.request(body, exec_id, noted)

    def _accepted(self, body: Any, exec_id: int, via: str, *, prefetch: bool = True) -> None:
        self.tracer.emit(
            records.CompileRequested, exec_id=exec_id, request=body.request_id,
            kernel=body.variant.label(), key=body.key, params={}, local_size=[1], via=via,
            why="first_use", near="", differs=[], prefetch=prefetch,
        )  # fmt: skip

    def close(self) -> None:
        self.client.close()
        assert self.tracer.close(PATIENCE_S)


@contextmanager
def traced_pool(tmp_path: Path, **kwargs: Any) -> Iterator[tuple[PoolProcess, str, Path]]:
    """A pool and an aggregator that writes to the file; both are over when the block is."""
    endpoint, file = f"ipc://{tmp_path}/trace", tmp_path / "trace.jsonl"
    with file.open("wb") as output, aggregator(endpoint, output.fileno(), *UNHURRIED):  # noqa: SIM117
        with running_pool(trace_compile=True, **kwargs) as pool:
            yield pool, endpoint, file


def trace_of(file: Path) -> Trace:
    trace = read(file.read_bytes().splitlines())
    assert trace.problems == []
    return trace


def of(kind: type[R], trace: Trace, run_id: str = "r1") -> list[R]:
    found = [line.record for line in trace.lines if isinstance(line.record, kind)]
    return [record for record in found if record.run_id == run_id]


def positions(trace: Trace, request: int) -> list[str]:
    """The events of one request, in the trace's order."""
    return [
        type(line.record).__struct_config__.tag  # type: ignore[misc]
        for line in trace.lines
        if getattr(line.record, "request", None) == request
    ]


def test_each_compile_is_asked_for_begun_and_ended_in_this_order(tmp_path: Path) -> None:
    with traced_pool(tmp_path) as (pool, endpoint, file):
        run = Run(pool, endpoint, "r1")
        tickets = [run.request(n, n=n) for n in range(40)]
        assert all(outcome(ticket).error is None for ticket in tickets)
        run.close()
        pool.stop()
    trace = trace_of(file)
    for number, ticket in enumerate(tickets):
        request = ticket.body.request_id
        assert positions(trace, request) == ["compile-request", "compile-begin", "compile-end"]
        (end,) = [r for r in of(records.CompileEnd, trace) if r.request == request]
        assert (end.exec_id, end.outcome, end.source) == (number, "ok", "pool")
        assert end.compile_ns == 1000
        assert end.finish_ns == 30
    assert len({r.worker for r in of(records.WorkerStart, trace)}) == len(
        {r.worker for r in of(records.CompileBegin, trace)}
    )


def test_a_slow_executor_does_not_get_its_compile_before_its_request(tmp_path: Path) -> None:
    """The acceptance is put on record late; the pool's records wait for it, and so does the
    answer."""
    with traced_pool(tmp_path) as (pool, endpoint, file):
        run = Run(pool, endpoint, "r1")
        body = make_request(n=1)

        def late(via: str) -> None:
            pool.until(lambda r: r.pending == 0 and r.totals["compiles"] == 1)  # it is compiled
            run._accepted(body, 1, via)

        ticket = run.client.request(body, 1, late)
        assert outcome(ticket).error is None
        run.close()
        pool.stop()
    assert positions(trace_of(file), body.request_id) == [
        "compile-request", "compile-begin", "compile-end",
    ]  # fmt: skip


def test_a_compile_that_ends_after_its_graph_is_its_graphs(tmp_path: Path) -> None:
    """Asked for by execution 5, which gives up; begun and ended when 6 runs; still 5's."""
    go = tmp_path / "go"
    with traced_pool(tmp_path, workers=1) as (pool, endpoint, file):
        run = Run(pool, endpoint, "r1")
        first = run.request(4, do="wait_file", arg=str(go))
        pool.until(lambda r: bool(r.jobs) and r.jobs[0].phase == "compiler")
        run.tracer.emit(records.GraphBegin, exec_id=5, uid=1, nodes=1)
        late = run.request(5, prefetch=False, n=2)
        late.wait_accepted(PATIENCE_S)
        run.tracer.emit(records.GraphEnd, exec_id=5, outcome="failed", **graph_end(compiles=1))
        run.tracer.emit(records.GraphBegin, exec_id=6, uid=1, nodes=1)
        assert run.tracer.flush(PATIENCE_S)
        go.touch()
        assert outcome(late).error is None and outcome(first).error is None
        run.tracer.emit(records.GraphEnd, exec_id=6, outcome="ok", **graph_end(compiles=0))
        run.close()
        pool.stop()
    trace = trace_of(file)
    ends = [line.record for line in trace.lines if line.record.exec_id == 5][-3:]
    assert [type(end) for end in ends] == [
        records.GraphEnd, records.CompileBegin, records.CompileEnd,
    ]  # fmt: skip
    assert [end.request for end in ends[1:]] == [late.body.request_id] * 2  # type: ignore[attr-defined]
    found = [p.text for p in check(trace).problems if str(late.body.request_id) in p.text]
    assert found == []


def test_a_pool_that_dies_with_its_records_while_there_is_no_aggregator(tmp_path: Path) -> None:
    """Nobody can say what it had to say; the check says which compiles are not accounted for."""
    endpoint, file = f"ipc://{tmp_path}/trace", tmp_path / "trace.jsonl"
    with file.open("ab") as output, running_pool(trace_compile=True) as pool:
        first = AggregatorProcess(endpoint, output.fileno(), *UNHURRIED)
        run = Run(pool, endpoint, "r1")
        assert outcome(run.request(1, n=1)).error is None
        first.kill()
        unheard = run.request(2, n=2)
        assert outcome(unheard).error is None
        pool.kill()
        with aggregator(endpoint, output.fileno(), *UNHURRIED):
            pool.start()
            assert outcome(run.request(3, n=3)).error is None
            run.tracer.emit(records.RunEnd, status="ok", executions=0, totals={})
            run.close()
            pool.stop()
    problems = [problem for problem in check(trace_of(file)).problems if problem.kind == "lost"]
    said = [problem.text for problem in problems if str(unheard.body.request_id) in problem.text]
    assert said == [
        f"run r1: request {unheard.body.request_id} was compiled and nothing says how: its pool's"
        " last records are lost"
    ]


def graph_end(compiles: int) -> dict[str, Any]:
    """The other columns of an execution that asked for so many compiles and waited for none."""
    zeros = ("joins", "disk_hits", "memory_hits", "driver_compiles", "failures", "waits",
             "wait_ns", "dur_ns", "program")  # fmt: skip
    counts = dict.fromkeys(zeros, 0) | {"requests": compiles, "compiles": compiles}
    return counts | {"uid": 1, "error": None, "program_hit": False, "prepared_hit": False,
                     "replayed": False}  # fmt: skip


def test_a_crash_a_timeout_and_a_refusal_are_on_record(tmp_path: Path) -> None:
    with traced_pool(tmp_path, job_timeout_s=1.0, progress_s=0.2) as (pool, endpoint, file):
        run = Run(pool, endpoint, "r1")
        crash = run.request(1, do="abort")
        assert outcome(crash).outcome == "crash"
        slow = run.request(2, do="spin")
        assert outcome(slow).outcome == "timeout"
        refused = run.request(3, do="reject", arg="x" * 5000)
        assert outcome(refused).outcome == "rejected"
        again = run.request(4, do="abort")
        assert outcome(again).via == "quarantine"
        run.close()
        pool.stop()
    trace = trace_of(file)
    pair = ["compile-begin", "compile-end"]
    assert positions(trace, crash.body.request_id) == ["compile-request", *pair, *pair]
    seen = positions(trace, slow.body.request_id)
    assert [e for e in seen if e != "compile-progress"] == ["compile-request", *pair, *pair]
    assert seen.index("compile-progress") < seen.index("compile-end")
    assert positions(trace, again.body.request_id) == ["compile-request"]
    ends = of(records.CompileEnd, trace)
    assert [(e.outcome, e.attempt) for e in ends] == [
        ("crash", 1), ("crash", 2), ("timeout", 1), ("timeout", 2), ("rejected", 1),
    ]  # fmt: skip
    assert ends[0].error is not None
    assert "SIGABRT" in ends[0].error.message
    log = ends[-1].log if not ends[-1].log_path else Path(ends[-1].log_path).read_text()
    assert log.count("x") == 5000
    exits = of(records.WorkerExit, trace)
    assert [e.signal for e in exits] == [6, 6, 9, 9]
    assert [e.held for e in exits] == [[crash.body.request_id]] * 2 + [[slow.body.request_id]] * 2
    progress = of(records.CompileProgress, trace)
    assert {(p.request, p.phase, p.exec_id) for p in progress} >= {
        (slow.body.request_id, "compiler", 2)
    }


def test_a_worker_that_dies_before_it_said_a_word_of_its_job_is_on_record(tmp_path: Path) -> None:
    """A compiler may take its process down before the word that it started is out."""
    with traced_pool(tmp_path, workers=1) as (pool, endpoint, file):
        one, two = Run(pool, endpoint, "r1"), Run(pool, endpoint, "r2")
        assert outcome(two.request(1, n=1)).error is None
        (worker,) = pool.status()[0].workers
        os.kill(worker.pid, signal.SIGSTOP)
        lost = one.request(1, n=2)
        pool.until(lambda r: bool(r.jobs) and r.jobs[0].state == "compiling")
        os.kill(worker.pid, signal.SIGKILL)
        assert outcome(lost).error is None  # another worker did it
        one.close()
        two.close()
        pool.stop()
    trace = trace_of(file)
    pair = ["compile-begin", "compile-end"]
    assert positions(trace, lost.body.request_id) == ["compile-request", *pair, *pair]
    starts = of(records.WorkerStart, trace)
    assert (starts[0].pid, starts[0].reason) == (worker.pid, "shared")
    assert len(starts) == 2
    (exit_,) = of(records.WorkerExit, trace)
    assert (exit_.pid, exit_.signal, exit_.held) == (worker.pid, 9, [lost.body.request_id])
    assert [e.held for e in of(records.WorkerExit, trace, "r2")] == [[]]


def test_two_runs_of_one_pool_have_their_own_records(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with traced_pool(tmp_path, workers=1) as (pool, endpoint, file):
        one, two = Run(pool, endpoint, "r1"), Run(pool, endpoint, "r2")
        shared = {"do": "wait_file", "arg": str(go)}
        first = one.request(1, **shared)
        pool.until(lambda r: r.pending == 1)
        joined = two.request(1, **shared)
        pool.until(lambda r: r.totals["joins"] == 1)
        go.touch()
        assert outcome(first).via == "compile"
        assert outcome(joined).via == "in_flight"
        own = two.request(2, n=5)
        assert outcome(own).error is None
        one.close()
        two.close()
        pool.stop()
    trace = trace_of(file)
    assert [r.request for r in of(records.CompileBegin, trace)] == [first.body.request_id]
    assert [r.request for r in of(records.CompileBegin, trace, "r2")] == [own.body.request_id]
    assert len(of(records.WorkerStart, trace, "r2")) == 1


def test_a_killed_pool_leaves_an_end_for_what_was_open(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with traced_pool(tmp_path, workers=1) as (pool, endpoint, file):
        run = Run(pool, endpoint, "r1")
        ticket = run.request(1, do="wait_file", arg=str(go))
        reply = pool.until(lambda r: bool(r.jobs) and r.jobs[0].phase == "compiler")
        os.kill(reply.workers[0].pid, 0)
        os.kill(pool.pid, signal.SIGKILL)
        pool.kill()
        go.touch()
        pool.start()
        assert outcome(ticket).error is None
        run.close()
        pool.stop()
    seen = positions(trace_of(file), ticket.body.request_id)
    assert seen[:2] == ["compile-request", "compile-begin"]
    assert seen.count("compile-begin") == seen.count("compile-end")


def test_a_run_without_trace_costs_the_pool_no_stream(tmp_path: Path) -> None:
    with traced_pool(tmp_path) as (pool, _endpoint, file):
        client = pool.client("quiet")
        assert outcome(client.request(make_request(n=1), 1)).error is None
        client.close()
        pool.stop()
    assert file.read_bytes() == b""
