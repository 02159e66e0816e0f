"""The validation of the trace, as one program: `python -m tests.validate` or `make validate`.

Runs the demo's bench with asynchronous and with synchronous JIT on empty stores, the back-end
cases with tracing off and on, and a compile with an invalid sanitizer; then reconciles every
count with the records. `tests/process/test_validation.py` asserts the same facts one by one.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from hrxmp import records
from hrxmp.aggregator.check import check
from hrxmp.aggregator.reader import Line
from tests.model_files import write_tiny
from tests.process.run_process import DEVICES, PROGRAMS, Finished, R, hrxmp_run, usable_forms

BENCH = shlex.split("-p 0 -n 0 -pg 64,16 -b 64 -ub 64 -r 2 --no-warmup -o json")
CYCLE = 17
"""Executions of one repetition: one prefill, sixteen decodes."""
COUNTS = (
    "requests", "compiles", "joins", "disk_hits", "driver_compiles", "failures", "waits", "wait_ns",
)  # fmt: skip


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must hold, with what was found."""

    what: str
    ok: bool
    found: str = ""


class Validation:
    """All runs of one device and model, made when first looked at."""

    def __init__(self, folder: Path, model: Path | str, device: str = "") -> None:
        self.folder = folder
        self.model = model
        self.device = device

    def run(self, *args: str | Path, cache: str = "off", **environ: str) -> Finished:
        """One run of `hrxmp-run` with tracing on unless `environ` says otherwise."""
        environ.setdefault("HRXMP_TRACE_COMPILE", "1")
        return hrxmp_run(*args, cache=cache, device=self.device, environ=environ)

    @cached_property
    def asynchronous(self) -> Finished:
        """The bench with the pool, empty store."""
        store = str(self.folder / "store-async")
        return self.run("bench", "-m", self.model, *BENCH, cache=store)

    @cached_property
    def synchronous(self) -> Finished:
        """The bench that compiles in the executor, empty store."""
        store = str(self.folder / "store-sync")
        return self.run("bench", "-m", self.model, *BENCH, cache=store, HRXMP_ASYNC_JIT="0")

    @cached_property
    def cases(self) -> Finished:
        """The back-end cases, traced."""
        return self.run(PROGRAMS / "backend_cases.py")

    @cached_property
    def silent_cases(self) -> Finished:
        """The back-end cases with tracing off."""
        return self.run(PROGRAMS / "backend_cases.py", HRXMP_TRACE_COMPILE="0")

    @cached_property
    def refused(self) -> tuple[Finished, Finished]:
        """One compile with an invalid sanitizer, asynchronous and synchronous."""
        args = (PROGRAMS / "backend_cases.py", "add_f32")
        wrong = {"HRXMP_SANITIZER": "bogus"}
        return self.run(*args, **wrong), self.run(*args, **wrong, HRXMP_ASYNC_JIT="0")


# -- asynchronous against synchronous --------------------------------------------------------


def compared(v: Validation) -> Iterator[Fact]:
    """Both modes ask for the same kernels at the same executions; only one waits."""
    both = v.asynchronous, v.synchronous
    for name, run in zip(("asynchronous", "synchronous"), both, strict=True):
        yield Fact(what=f"{name} bench ends well", ok=run.code == 0, found=str(run.said[-3:]))
    ends = [run.records(records.GraphEnd) for run in both]
    yield _equal("graph executions", *(len(found) for found in ends))
    yield _equal("requests", *(sum(end.requests for end in found) for found in ends))
    yield _equal("requests by execution", *([end.requests for end in found] for found in ends))
    yield _equal("keys", *(_keys(run) for run in both), show=len)
    waits = [sum(end.waits for end in found) for found in ends]
    yield Fact(what="the asynchronous bench waited", ok=waits[0] > 0, found=str(waits[0]))
    yield Fact(what="the synchronous bench did not", ok=waits[1] == 0, found=str(waits[1]))


def zeros(v: Validation) -> Iterator[Fact]:
    """Everything is asked for by the first execution of each of the two graphs."""
    for name, run in (("asynchronous", v.asynchronous), ("synchronous", v.synchronous)):
        ends = run.records(records.GraphEnd)
        yield Fact(what=f"{name}: executions", ok=len(ends) == 2 * CYCLE, found=str(len(ends)))
        for what, end in zip(("prefill", "decode"), ends, strict=False):
            counts = {column: getattr(end, column) for column in COUNTS}
            ok = 0 < end.requests == end.compiles + end.joins and not end.failures
            yield Fact(what=f"{name}: counts of the first {what}", ok=ok, found=str(counts))
        later = [sum(getattr(end, column) for column in COUNTS) for end in ends[2:]]
        second = f"{name}: zeros from the third execution on, the second cycle included"
        yield Fact(what=second, ok=later == [0] * (2 * CYCLE - 2), found=str(sum(later)))


def _keys(run: Finished) -> set[str]:
    return {record.key for record in run.records(records.CompileRequested)}


def _equal(what: str, a: Any, b: Any, show: Callable[[Any], Any] = str) -> Fact:
    found = f"{show(a)}" if a == b else f"{show(a)} asynchronous, {show(b)} synchronous"
    return Fact(what=f"equal {what}", ok=a == b, found=found)


# -- reconciliation --------------------------------------------------------------------------


def reconciled(v: Validation) -> Iterator[Fact]:
    """Counts against records, pairs, order, attribution: computed again from the lines."""
    runs = {"asynchronous": v.asynchronous, "synchronous": v.synchronous, "cases": v.cases}
    for name, run in runs.items():
        report = check(run.trace)
        problems = [f"{problem.kind}: {problem.text}" for problem in report.problems]
        found = str(problems[:3]) if problems else f"{report.records} records"
        yield Fact(what=f"{name}: hrxmp-trace check finds nothing", ok=report.ok, found=found)
        yield from _matched(name, run)


def _matched(name: str, run: Finished) -> Iterator[Fact]:
    """Request, begin and end of each compile, one to one, in time and of one execution."""
    asked = {r.request: r for r in run.records(records.CompileRequested) if r.via == "compile"}
    begun = {r.request: r for r in run.records(records.CompileBegin)}
    ended = {r.request: r for r in run.records(records.CompileEnd)}
    total = len(run.records(records.CompileBegin)), len(run.records(records.CompileEnd))
    whole = asked.keys() == begun.keys() == ended.keys() and total == (len(asked), len(asked))
    found = f"{len(asked)} requests, {total[0]} begins, {total[1]} ends"
    yield Fact(what=f"{name}: request, begin and end matched one to one", ok=whole, found=found)
    triples = [(asked[i], begun[i], ended[i]) for i in asked if i in begun and i in ended]
    times = all(a.t_ns <= b.t_ns <= c.t_ns for a, b, c in triples)
    yield Fact(what=f"{name}: their times are in order", ok=times)
    same = all(a.exec_id == b.exec_id == c.exec_id for a, b, c in triples)
    yield Fact(what=f"{name}: they carry the execution that asked", ok=same)


def attributed(v: Validation) -> Iterator[Fact]:
    """Waits name the request, the execution that waits and the one that asked."""
    run = v.asynchronous
    asked = {r.request: r for r in run.records(records.CompileRequested)}
    waits = run.records(records.WaitEnd)
    right = all(
        wait.request in asked
        and asked[wait.request].exec_id == wait.asked_by
        and wait.exec_id is not None
        and wait.dur_ns > 0
        for wait in waits
    )
    found = f"{len(waits)} waits"
    yield Fact(what="each wait is attributed", ok=right and bool(waits), found=found)
    prefetched = [r for r in asked.values() if r.prefetch and r.via == "compile"]
    yield Fact(
        what="decode's kernels are asked for while prefill runs",
        ok=bool(prefetched) and all(r.exec_id is None for r in prefetched),
        found=f"{len(prefetched)} prefetched",
    )
    after = _after_first(run.trace.lines, records.GraphEnd, records.CompileEnd)
    right = all(asked[r.request].exec_id == r.exec_id for r in after)
    what = "a compile that ends after the first graph keeps the execution that asked"
    yield Fact(what=what, ok=right, found=f"{len(after)} such compiles")


def _after_first(lines: list[Line], first: type[records.Record], kind: type[R]) -> list[R]:
    """The records of a kind that stand after the first record of another kind."""
    numbers = [line.number for line in lines if isinstance(line.record, first)]
    return [
        line.record for line in lines if isinstance(line.record, kind) and line.number > numbers[0]
    ]


# -- back-end cases --------------------------------------------------------------------------


def backend(v: Validation) -> Iterator[Fact]:
    """Small graphs: right values and the right use of programs, whether traced or not."""
    for name, run in (("off", v.silent_cases), ("on", v.cases)):
        answers = [msgspec.json.decode(line) for line in run.stdout.splitlines()]
        what = f"tracing {name}: cases end well"
        yield Fact(what=what, ok=run.code == 0, found=str(len(answers)))
        for answer in answers:
            case = answer["case"]
            yield Fact(what=f"tracing {name}: {case} is right", ok=answer["right"])
            if case in REUSE:
                built = {key: answer[key] for key in REUSE[case]}
                what = f"tracing {name}: {case} builds and reuses"
                yield Fact(what=what, ok=built == REUSE[case], found=str(built))
    yield Fact(
        what="tracing off writes nothing at all",
        ok=not v.silent_cases.trace.lines and not v.silent_cases.stderr,
        found=v.silent_cases.stderr[:200],
    )
    uids = [r.uid for r in v.cases.records(records.GraphEnd) if r.program_hit]
    yield Fact(what="the trace shows the one program hit", ok=uids == [7], found=str(uids))


REUSE = {
    "same_uid_same_structure": {
        "program_builds": 1, "program_hits": 1, "prepared_builds": 2, "prepared_hits": 0,
    },
    "same_uid_other_structure": {
        "program_builds": 2, "program_hits": 0, "prepared_builds": 2, "prepared_hits": 0,
    },
}  # fmt: skip


# -- a compiler that cannot be set up --------------------------------------------------------


def refused(v: Validation) -> Iterator[Fact]:
    """An invalid sanitizer: one failed compile, a failed graph, a typed error, an exit code."""
    for name, run in zip(("asynchronous", "synchronous"), v.refused, strict=True):
        ends = run.records(records.CompileEnd)
        asked = [r.request for r in run.records(records.CompileRequested)]
        one = [(end.request, end.compiler_started, end.outcome) for end in ends]
        yield Fact(
            what=f"{name}: one matching compile-end, the compiler never started",
            ok=len(asked) == 1 and one == [(asked[0], False, "setup")],
            found=str(one),
        )
        error = ends[0].error if ends else None
        said = bool(error and error.code == "compile-setup" and "bogus" in error.message)
        yield Fact(what=f"{name}: it carries the set-up error", ok=said, found=str(error))
        graphs = [(g.outcome, g.failures) for g in run.records(records.GraphEnd)]
        what = f"{name}: the graph failed"
        yield Fact(what=what, ok=graphs == [("failed", 1)], found=str(graphs))
        told = [line for line in run.said if "compile-setup" in line]
        code = f"{name}: the caller's typed error, a non-zero exit code"
        yield Fact(what=code, ok=bool(told) and run.code == 1, found=f"{run.code} {told}")
        report = check(run.trace)
        yield Fact(what=f"{name}: check finds nothing", ok=report.ok, found=str(report.problems))


SECTIONS: dict[str, Callable[[Validation], Iterable[Fact]]] = {
    "asynchronous and synchronous JIT": compared,
    "counts by execution": zeros,
    "records reconciled": reconciled,
    "waits and late ends": attributed,
    "back-end cases": backend,
    "invalid sanitizer": refused,
}


# -- the program -----------------------------------------------------------------------------


def main() -> int:
    """Print every fact; 1 when one does not hold."""
    parser = argparse.ArgumentParser(prog="tests.validate", description=main.__doc__)
    parser.add_argument("-m", "--model", help="file or name (default: a tiny random llama)")
    parser.add_argument("--device", help="device SPEC (default: each CPU runtime that works)")
    args = parser.parse_args()
    devices = [args.device] if args.device else [DEVICES[form] for form in sorted(usable_forms())]
    console = Console()
    failed = 0
    for device in devices:
        with tempfile.TemporaryDirectory(prefix="hrxmp-validate-") as name:
            folder = Path(name)
            model = args.model or write_tiny(folder / "tiny.gguf")
            failed += _report(console, Validation(folder, model, device))
    console.print(f"[bold red]{failed} facts do not hold" if failed else "[bold green]all holds")
    return 1 if failed or not devices else 0


def _report(console: Console, validation: Validation) -> int:
    failed = 0
    for title, section in SECTIONS.items():
        table = Table("", "fact", "found", title=f"{title} on {validation.device}", expand=True)
        for fact in section(validation):
            failed += not fact.ok
            mark = "[green]ok[/]" if fact.ok else "[bold red]NO[/]"
            table.add_row(mark, fact.what, fact.found.replace("[", r"\["))
        console.print(table)
    return failed


if __name__ == "__main__":
    sys.exit(main())
