"""Reads a trace back and proves it right: numbers, causes, pairs, attribution, counts, totals.

Everything that a `graph-end` or `run-end` claims is computed again from the other records. Pure;
used by `hrxmp-trace check`, by `make validate` and by the tests of all processes.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from hrxmp.aggregator.reader import Line, Problem, Trace
from hrxmp.records import (
    CompileBegin,
    CompileEnd,
    CompileRequested,
    GraphBegin,
    GraphEnd,
    KernelLoad,
    Lost,
    RunEnd,
    WaitBegin,
    WaitEnd,
)

JOINS = ("in_flight", "prefetch")


class Report(msgspec.Struct):
    """What a check found. `notes` do not make a trace wrong, `problems` do."""

    problems: list[Problem] = []
    notes: list[Problem] = []
    records: int = 0
    other: int = 0
    repeats: int = 0
    late: int = 0
    runs: int = 0
    executions: int = 0
    requests: int = 0
    waits: int = 0

    @property
    def ok(self) -> bool:
        """Whether the trace is whole and consistent."""
        return not self.problems


def check(trace: Trace) -> Report:
    """Check every run of a trace."""
    report = Report(
        problems=list(trace.problems),
        records=len(trace.lines),
        other=trace.other,
        repeats=trace.repeats,
        late=sum(line.late for line in trace.lines),
    )
    if not trace.lines:
        report.problems.append(Problem("empty", "there are no records"))
    by_run: dict[str, list[Line]] = defaultdict(list)
    for line in trace.lines:
        by_run[line.record.run_id].append(line)
    for run_id, lines in by_run.items():
        report.runs += 1
        _Run(run_id, lines, report).check()
    return report


class _Run:
    """One run's records, indexed, and the checks on them."""

    def __init__(self, run_id: str, lines: list[Line], report: Report) -> None:
        self.run_id = run_id
        self.lines = lines
        self.report = report
        self.torn = False
        """A source was killed or records are lost: a missing end is no error of the trace."""
        self.begun: dict[int, Line] = {}
        self.ended: dict[int, Line] = {}
        self.requested: dict[int, Line] = {}
        self.compiles: list[tuple[Line | None, Line | None]] = []
        self.last_end: dict[int, Line] = {}
        self.waits: list[tuple[Line, Line | None]] = []
        self._via: dict[int | None, list[str]] = defaultdict(list)
        self._wait_ends: dict[int | None, list[WaitEnd]] = defaultdict(list)
        self._loads: dict[int | None, list[KernelLoad]] = defaultdict(list)
        self.run_end: RunEnd | None = None
        self._compiling: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._waiting: dict[tuple[int | None, int], int] = {}

    def check(self) -> None:
        """All checks of this run."""
        self._numbers()
        for line in self.lines:
            self._index(line)
        self._pairs()
        for wait, end in self.waits:
            self._wait(wait, end)
        for end in self.ended.values():
            self._graph(end)
        self._totals()
        self.report.executions += len(self.ended)
        self.report.requests += len(self.requested)
        self.report.waits += len(self.waits)

    # -- numbers -----------------------------------------------------------------------------

    def _numbers(self) -> None:
        """Every source's numbers have no gap that is not said to be lost, and do not go down."""
        sources: dict[tuple[str, int], list[Line]] = defaultdict(list)
        said: dict[str, list[Lost]] = defaultdict(list)
        for line in self.lines:
            sources[line.record.source, line.record.incarnation].append(line)
            if isinstance(line.record, Lost):
                said[line.record.of].append(line.record)
        for (source, incarnation), lines in sources.items():
            self._gaps(source, incarnation, lines, said[source])
        for lost in (one for many in said.values() for one in many):
            self.torn = True
            if lost.last < 0:
                text = f"{lost.of} ended without goodbye after number {lost.first - 1}"
                self._note("torn", f"{text}: {lost.reason}")
            else:
                count = lost.last - lost.first + 1
                self._problem("lost", f"{count} records of {lost.of} are lost: {lost.reason}")

    def _gaps(self, source: str, incarnation: int, lines: list[Line], said: list[Lost]) -> None:
        expected, time = 0, -(1 << 63)
        for line in lines:
            seq = line.record.seq
            if seq != expected and not line.late:
                known = any(lost.first <= expected and seq - 1 <= lost.last for lost in said)
                if seq < expected:
                    self._problem("order", f"{source} number {seq} after {expected - 1}", line)
                elif not known:
                    text = f"{source}/{incarnation} numbers {expected} to {seq - 1} are missing"
                    self._problem("gap", text, line)
            if line.record.t_ns < time and not line.late:
                self._problem("time", f"{source} number {seq}: t_ns goes back", line)
            expected, time = max(expected, seq + 1), max(time, line.record.t_ns)

    # -- indexing ----------------------------------------------------------------------------

    def _index(self, line: Line) -> None:
        record = line.record
        match record:
            case GraphBegin(exec_id=int(exec_id)):
                self._once(self.begun, exec_id, line, "graph-begin")
            case GraphEnd(exec_id=int(exec_id)):
                self._once(self.ended, exec_id, line, "graph-end")
            case CompileRequested():
                self._once(self.requested, record.request, line, "compile-request")
                self._via[record.exec_id].append(record.via)
            case CompileBegin():
                self._compile_begin(record, line)
            case CompileEnd():
                self._compile_end(record, line)
            case WaitBegin():
                self._waiting[record.exec_id, record.request] = len(self.waits)
                self.waits.append((line, None))
            case WaitEnd():
                self._wait_end(record, line)
            case KernelLoad():
                self._loads[record.exec_id].append(record)
            case RunEnd():
                self.run_end = record

    def _once(self, index: dict[int, Line], key: int, line: Line, name: str) -> None:
        if key in index:
            self._problem("twice", f"second {name} of {key}", line)
        index[key] = line

    def _compile_begin(self, record: CompileBegin, line: Line) -> None:
        """A pool that was restarted begins the same attempt again, before the aggregator closes
        what its predecessor had open."""
        open_ones = self._compiling[record.request, record.attempt]
        if open_ones and not self.torn:
            name = f"compile-begin of request {record.request} attempt {record.attempt}"
            self._problem("twice", f"second {name} before its end", line)
        open_ones.append(len(self.compiles))
        self.compiles.append((line, None))

    def _compile_end(self, record: CompileEnd, line: Line) -> None:
        self.last_end[record.request] = line
        open_ones = self._compiling[record.request, record.attempt]
        if open_ones:
            at = open_ones.pop(0 if record.synthetic else -1)
            self.compiles[at] = (self.compiles[at][0], line)
        else:
            self.compiles.append((None, line))

    def _wait_end(self, record: WaitEnd, line: Line) -> None:
        at = self._waiting.pop((record.exec_id, record.request), None)
        if at is None:
            self._problem("pair", f"wait-end of request {record.request} without begin", line)
        else:
            self.waits[at] = (self.waits[at][0], line)
            if not record.synthetic:
                self._wait_ends[record.exec_id].append(record)

    # -- pairs and causes --------------------------------------------------------------------

    def _pairs(self) -> None:
        """Request before begin before end; each begin has one end."""
        for exec_id, line in self.begun.items():
            self._before(line, self.ended.get(exec_id), f"graph-end of execution {exec_id}")
        for exec_id, line in self.ended.items():
            if exec_id not in self.begun:
                self._missing(f"graph-begin of execution {exec_id}", line)
        for begin, end in self.compiles:
            self._compile(begin, end)
        for request, line in self.requested.items():
            self._asked(request, line)

    def _compile(self, begin: Line | None, end: Line | None) -> None:
        """Request before begin before end, for the same execution."""
        record = (begin or end).record  # type: ignore[union-attr]
        if not isinstance(record, CompileBegin | CompileEnd):
            return
        name = f"request {record.request} attempt {record.attempt}"
        if begin is not None:
            self._before(begin, end, f"compile-end of {name}")
        elif isinstance(record, CompileEnd) and record.compiler_started and not record.synthetic:
            self._missing(f"compile-begin of {name}", end)
        asked = self.requested.get(record.request)
        if asked is None:
            self._missing(f"compile-request of {name}", begin or end)
            return
        for line in (begin, end):
            if line is not None:
                self._before(asked, line, f"{name}: {line.record.__struct_config__.tag}")
                self._same_exec(asked, line)

    def _asked(self, request: int, line: Line) -> None:
        """A request belongs into its execution, and one that is compiled has its end."""
        record = line.record
        if not isinstance(record, CompileRequested):
            return
        if record.via == "compile" and request not in self.last_end:
            self._unaccounted(request, line)
        if record.exec_id is not None:
            self._before(self.begun.get(record.exec_id), line, f"compile-request {request}")
            self._before(line, self.ended.get(record.exec_id), f"graph-end of {record.exec_id}")

    def _unaccounted(self, request: int, line: Line) -> None:
        """A compile without an end. Where there is no begin either, in a run that is over and has
        no loss on record, who compiled it was gone before anybody had heard of it."""
        begun = any(one == request for one, _attempt in self._compiling)
        if self.torn or begun or self.run_end is None:
            self._missing(f"compile-end of request {request}", line)
        else:
            text = f"request {request} was compiled and nothing says how"
            self._problem("lost", f"{text}: its pool's last records are lost", line)

    def _wait(self, begin: Line, end: Line | None) -> None:
        """A wait is attributed to a request and to the execution that asked for it."""
        record = begin.record
        if not isinstance(record, WaitBegin):
            return
        name = f"wait of execution {record.exec_id} on request {record.request}"
        self._before(begin, end, f"end of the {name}")
        asked = self.requested.get(record.request)
        if asked is None:
            self._missing(f"compile-request for the {name}", begin)
        elif asked.record.exec_id != record.asked_by:
            text = f"{name}: asked_by {record.asked_by}, but {asked.record.exec_id} asked"
            self._problem("attribution", text, begin)
        if end is None or not isinstance(end.record, WaitEnd) or end.record.synthetic:
            return
        compiled = self.last_end.get(record.request)
        # An end that was made up for a dead pool is no cause: another pool gave the kernel.
        made_up = compiled is not None and getattr(compiled.record, "synthetic", False)
        if compiled is not None and not made_up and end.record.outcome == "ok":
            self._before(compiled, end, f"end of the {name}")
        if record.exec_id is not None:
            self._before(self.begun.get(record.exec_id), begin, f"begin of the {name}")
            self._before(end, self.ended.get(record.exec_id), f"graph-end of {record.exec_id}")

    # -- counts ------------------------------------------------------------------------------

    def _graph(self, line: Line) -> None:
        """The counts of a graph-end, computed again."""
        record = line.record
        if not isinstance(record, GraphEnd) or record.synthetic:
            return
        exec_id = record.exec_id
        via, ends, loads = self._via[exec_id], self._wait_ends[exec_id], self._loads[exec_id]
        again = {
            "requests": len(via),
            "compiles": via.count("compile"),
            "joins": sum(via.count(name) for name in JOINS),
            "disk_hits": via.count("disk"),
            "driver_compiles": sum(load.driver_compiled for load in loads),
            "waits": len(ends),
            "wait_ns": sum(end.dur_ns for end in ends),
        }
        for name, count in again.items():
            said = getattr(record, name)
            if said != count:
                text = f"execution {exec_id}: {name} is {said}, the records say {count}"
                self._problem("count", text, line)
        if record.outcome == "ok" and record.error is not None:
            self._problem("count", f"execution {exec_id} is ok and has an error", line)

    def _totals(self) -> None:
        """The totals of a run-end are the sums of its graph-ends."""
        if self.run_end is None:
            if not self.torn:
                self._note("open", "no run-end")
            return
        if self.run_end.executions < 0:  # the launcher's word for an executor that was killed
            return
        ends = [line.record for line in self.ended.values()]
        graphs = [end for end in ends if isinstance(end, GraphEnd) and not end.synthetic]
        if self.run_end.executions != len(graphs):
            text = f"run-end says {self.run_end.executions} executions, {len(graphs)} are recorded"
            self._problem("total", text)
        for name, said in self.run_end.totals.items():
            if name in GraphEnd.__struct_fields__:
                total = sum(getattr(graph, name) for graph in graphs)
                if total != said:
                    self._problem("total", f"run-end says {name} {said}, the sum is {total}")

    # -- saying ------------------------------------------------------------------------------

    def _before(self, cause: Line | None, effect: Line | None, name: str) -> None:
        if cause is None or effect is None:
            self._missing(name, cause or effect)
        elif cause.number > effect.number and not cause.late and not effect.late:
            text = f"{name} (line {effect.number}) stands before its cause"
            self._problem("order", text, cause)

    def _same_exec(self, asked: Line, line: Line) -> None:
        if asked.record.exec_id != line.record.exec_id:
            text = f"execution {line.record.exec_id}, but {asked.record.exec_id} asked"
            self._problem("attribution", text, line)

    def _missing(self, name: str, line: Line | None) -> None:
        (self._note if self.torn else self._problem)("missing", f"no {name}", line)

    def _problem(self, kind: str, text: str, line: Line | None = None) -> None:
        number = line.number if line else 0
        self.report.problems.append(Problem(kind, f"run {self.run_id}: {text}", number))

    def _note(self, kind: str, text: str, line: Line | None = None) -> None:
        number = line.number if line else 0
        self.report.notes.append(Problem(kind, f"run {self.run_id}: {text}", number))
