"""`hrxmp-trace export`: the trace for other tools: Chrome's trace viewer (and Perfetto), or CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from hrxmp.records import Annotation, CompileEnd
from hrxmp.tracetool.view import RunView, Wanted, reason

Event = dict[str, Any]


def chrome(runs: list[RunView], out: IO[str]) -> None:
    """Trace Event JSON: a process a run, a track for executions, waits and each worker."""
    events = [event for pid, run in enumerate(runs, 1) for event in _events(pid, run)]
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    out.write(",\n".join(msgspec.json.encode(event).decode() for event in events))
    out.write("\n]}\n")


def table(runs: list[RunView], out: IO[str]) -> None:
    """One row a graph execution."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "exec", *COLUMNS])
    for run in runs:
        for execution in run.executions.values():
            if execution.end is not None:
                row = [getattr(execution.end, name) for name in COLUMNS]
                writer.writerow([run.run_id, execution.exec_id, *row])


COLUMNS = (
    "uid", "outcome", "program", "program_hit", "prepared_hit", "replayed", "requests",
    "compiles", "joins", "disk_hits", "memory_hits", "driver_compiles", "failures", "waits",
    "wait_ns", "dur_ns",
)  # fmt: skip


def _events(pid: int, run: RunView) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"run {run.run_id}"}}
    for execution in run.executions.values():
        if execution.begin is not None and execution.end is not None:
            start, stop = execution.begin.t_ns, execution.end.t_ns
            counts = {name: getattr(execution.end, name) for name in COLUMNS}
            yield _span(pid, "executor", f"execution {execution.exec_id}", start, stop, counts)
    for wait in run.waits:
        if wait.end is not None:
            name, args = f"wait: {wait.begin.kernel}", {"request": wait.begin.request}
            yield _span(pid, "executor", name, wait.begin.t_ns, wait.end.t_ns, args)
            yield _flow("f", pid, "executor", wait.begin.request, wait.end.t_ns)
    for wanted in run.requests.values():
        yield from _compiles(pid, wanted)
    for line in run.lines:
        if isinstance(line.record, Annotation):
            yield {"ph": "i", "s": "p", "pid": pid, "tid": "executor", "name": line.record.label,
                   "ts": line.record.t_ns / 1000}  # fmt: skip


def _compiles(pid: int, wanted: Wanted) -> Iterator[Event]:
    for begin, end in zip(wanted.begins, wanted.ends, strict=False):
        args = {
            "request": begin.request,
            "key": wanted.asked.key,
            "params": wanted.asked.params,
            "why": reason(wanted.asked),
            "outcome": end.outcome,
            "asked_by": wanted.asked.exec_id,
        }
        yield _span(pid, begin.worker, wanted.asked.kernel, begin.t_ns, end.t_ns, args)
        if end is wanted.ends[-1]:
            yield _flow("s", pid, begin.worker, begin.request, _inside(begin.t_ns, end))


def _inside(begin_ns: int, end: CompileEnd) -> int:
    return max(begin_ns, end.t_ns - 1000)


def _span(pid: int, tid: str, name: str, start: int, stop: int, args: Event) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start / 1000,
            "dur": max(stop - start, 0) / 1000, "args": args}  # fmt: skip


def _flow(phase: str, pid: int, tid: str, request: int, t_ns: int) -> Event:
    return {"ph": phase, "pid": pid, "tid": tid, "id": request, "name": "kernel", "cat": "kernel",
            "ts": t_ns / 1000, "bp": "e"}  # fmt: skip
