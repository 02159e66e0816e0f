"""One run of a trace, joined: what was asked for, compiled, waited for, and by whom.

The readers' common model; pure. All of it comes from the records alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hrxmp.aggregator.reader import Line, Trace
from hrxmp.errors import UsageError
from hrxmp.kernels.keys import Difference
from hrxmp.records import (
    CompileBegin,
    CompileEnd,
    CompileRequested,
    GraphBegin,
    GraphEnd,
    KernelLoad,
    RunBegin,
    RunEnd,
    WaitBegin,
    WaitEnd,
)


class Wanted(msgspec.Struct):
    """One request with everything that became of it."""

    asked: CompileRequested
    begins: list[CompileBegin] = []
    ends: list[CompileEnd] = []
    load: KernelLoad | None = None

    @property
    def end(self) -> CompileEnd | None:
        """The last attempt's end."""
        return self.ends[-1] if self.ends else None

    @property
    def compile_ns(self) -> int:
        """Compiler time of all attempts."""
        return sum(end.compile_ns for end in self.ends)

    @property
    def finish_ns(self) -> int:
        """Time in which the driver was made to finish."""
        return sum(end.finish_ns for end in self.ends)

    @property
    def name(self) -> str:
        """The kernel definition without its parameters."""
        return self.asked.kernel.split("(")[0]


class Wait(msgspec.Struct):
    """One wait of one execution."""

    begin: WaitBegin
    end: WaitEnd | None = None

    @property
    def dur_ns(self) -> int:
        """How long; 0 while it lasts."""
        return self.end.dur_ns if self.end else 0


class Execution(msgspec.Struct):
    """One graph execution."""

    exec_id: int
    begin: GraphBegin | None = None
    end: GraphEnd | None = None
    waits: list[Wait] = []
    requests: list[Wanted] = []

    @property
    def dur_ns(self) -> int:
        """How long it took."""
        return self.end.dur_ns if self.end else 0

    @property
    def quiet(self) -> bool:
        """Whether nothing was asked for, waited for or compiled."""
        end = self.end
        return not self.waits and not self.requests and not (end and end.driver_compiles)


class RunView(msgspec.Struct):
    """All of one run."""

    run_id: str
    lines: list[Line]
    begin: RunBegin | None = None
    end: RunEnd | None = None
    executions: dict[int, Execution] = {}
    requests: dict[int, Wanted] = {}
    waits: list[Wait] = []

    def compiled(self) -> list[Wanted]:
        """Requests for which a compiler ran, or should have."""
        return [one for one in self.requests.values() if one.ends]

    def keys(self) -> dict[str, Wanted]:
        """The first request for each kernel key."""
        found: dict[str, Wanted] = {}
        for one in self.requests.values():
            found.setdefault(one.asked.key, one)
        return found


def view(run_id: str, lines: Iterable[Line]) -> RunView:
    """Join the records of one run."""
    run = RunView(run_id, list(lines))
    open_waits: dict[tuple[int | None, int], Wait] = {}
    for line in run.lines:
        record = line.record
        match record:
            case RunBegin():
                run.begin = record
            case RunEnd():
                run.end = record
            case GraphBegin():
                _execution(run, record.exec_id).begin = record
            case GraphEnd():
                _execution(run, record.exec_id).end = record
            case CompileRequested():
                wanted = run.requests[record.request] = Wanted(record)
                if record.exec_id is not None:
                    _execution(run, record.exec_id).requests.append(wanted)
            case CompileBegin() if record.request in run.requests:
                run.requests[record.request].begins.append(record)
            case CompileEnd() if record.request in run.requests:
                run.requests[record.request].ends.append(record)
            case KernelLoad() if record.request in run.requests:
                run.requests[record.request].load = record
            case WaitBegin():
                wait = open_waits[record.exec_id, record.request] = Wait(record)
                run.waits.append(wait)
                _execution(run, record.exec_id).waits.append(wait)
            case WaitEnd() if (record.exec_id, record.request) in open_waits:
                open_waits.pop((record.exec_id, record.request)).end = record
    return run


def views(trace: Trace, run_id: str = "") -> list[RunView]:
    """All runs of a trace, or the one that is named (its beginning is enough)."""
    by_run: dict[str, list[Line]] = {}
    for line in trace.lines:
        by_run.setdefault(line.record.run_id, []).append(line)
    names = [name for name in by_run if name.startswith(run_id)]
    if not by_run:
        raise UsageError("there is no trace record in it")
    if not names:
        there = ", ".join(by_run)
        raise UsageError(f"no run {run_id!r} in this trace; it has {there}")
    return [view(name, by_run[name]) for name in names]


def ms(nanoseconds: int) -> str:
    """Milliseconds for people."""
    value = nanoseconds / 1e6
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def title(asked: CompileRequested) -> str:
    """A kernel with its specialisation, e.g. `mul_mat_vec(W0=q4_1,K=576)`."""
    params = ",".join(f"{name}={value}" for name, value in asked.params.items())
    return f"{asked.kernel}({params})" if params and "(" not in asked.kernel else asked.kernel


def reason(asked: CompileRequested) -> str:
    """Why a kernel had to be asked for, in words."""
    if asked.why == "differs":
        parts = "; ".join(_difference(one) for one in asked.differs)
        return f"nearest known key {asked.near[:12]} differs in {parts}"
    return asked.why.replace("_", " ")


def _difference(one: Difference) -> str:
    return f"{one.component}: {one.before} -> {one.after}"


def _execution(run: RunView, exec_id: int | None) -> Execution:
    number = -1 if exec_id is None else exec_id
    if number not in run.executions:
        run.executions[number] = Execution(number)
    return run.executions[number]
