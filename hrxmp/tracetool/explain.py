"""`hrxmp-trace explain`: each stall in words: who waited, on what, asked by whom, and why."""

from __future__ import annotations

from collections.abc import Iterator

from hrxmp.records import CompileEnd, Guard, SanitizerFinding, Storm, WorkerExit
from hrxmp.tracetool.summary import quiet_sentence
from hrxmp.tracetool.view import Execution, RunView, Wait, Wanted, ms, reason, title


def explain(run: RunView) -> Iterator[str]:
    """The lines of the explanation."""
    yield f"run {run.run_id}"
    for execution in run.executions.values():
        if execution.exec_id >= 0 and not execution.quiet:
            yield from _execution(run, execution)
    yield from _incidents(run)
    yield ""
    yield quiet_sentence(run)


def _execution(run: RunView, one: Execution) -> Iterator[str]:
    end = one.end
    yield ""
    if end is None:
        yield f"execution {one.exec_id} has not ended"
    else:
        share = f", of which it waited {ms(end.wait_ns)}" if end.wait_ns else ""
        yield f"execution {one.exec_id} (graph uid {end.uid}) took {ms(end.dur_ns)}{share}"
        if end.error:
            yield f"  failed: {end.error.message}"
    if one.requests:
        via = [wanted.asked.via for wanted in one.requests]
        counts = [f"{via.count(name)} {name.replace('_', ' ')}" for name in dict.fromkeys(via)]
        yield f"  asked for kernels: {', '.join(counts)}"
    for wait in one.waits:
        yield from _wait(run, wait)
    waited = {wait.begin.request for wait in one.waits}
    for wanted in one.requests:
        failed = wanted.end is not None and wanted.end.outcome != "ok"
        if failed and wanted.asked.request not in waited:
            yield f"  {title(wanted.asked)} [request {wanted.asked.request}]"
            yield from _compile(wanted)
    for wanted in one.requests:
        if wanted.load is not None and wanted.load.driver_compiled:
            cost = ms(wanted.load.load_ns + wanted.load.launch_ns)
            yield f"  the driver compiled {title(wanted.asked)} again in this process: {cost}"


def _wait(run: RunView, wait: Wait) -> Iterator[str]:
    begin = wait.begin
    length = f"waited {ms(wait.dur_ns)}" if wait.end else "has been waiting"
    wanted = run.requests.get(begin.request)
    name = title(wanted.asked) if wanted else begin.kernel
    yield f"  {length} for {name} [request {begin.request}]"
    if begin.asked_by != begin.exec_id:
        asker = "a prefetch" if begin.asked_by is None else f"execution {begin.asked_by}"
        yield f"      asked for by {asker}"
    if wanted is None:
        yield "      the trace has no request of that number"
        return
    yield from _compile(wanted)


def _compile(wanted: Wanted) -> Iterator[str]:
    yield f"      why: {reason(wanted.asked)}"
    for begin, end in zip(wanted.begins, [*wanted.ends, *[None] * 9], strict=False):
        queue = f" after {ms(begin.queue_ns)} in the queue" if begin.queue_ns > 1_000_000 else ""
        yield f"      attempt {begin.attempt} in {begin.worker}{queue}: {_outcome(end)}"
    if not wanted.begins and wanted.end is not None:
        yield f"      {_outcome(wanted.end)}"


def _outcome(end: CompileEnd | None) -> str:
    if end is None:
        return "still compiling"
    if end.outcome == "ok":
        return f"compiler {ms(end.compile_ns)}, finishing the driver's work {ms(end.finish_ns)}"
    started = "" if end.compiler_started else ", the compiler never started"
    text = f": {end.error.message}" if end.error else ""
    return f"{end.outcome}{started}{text}"


def _incidents(run: RunView) -> Iterator[str]:
    """What else is worth knowing: guard, storms, findings, dead workers."""
    for line in run.lines:
        record = line.record
        match record:
            case Guard():
                yield f"guard ({record.action}): execution {record.exec_id}, {record.kernel}"
            case Storm():
                yield f"storm: {record.count} keys of {record.kernel} differ in {record.component}"
            case SanitizerFinding():
                where = f"{record.kernel}, {record.binding}[{record.index}]"
                yield f"sanitizer: {record.check} in {where}, {record.count} times"
            case WorkerExit() if record.held or record.signal:
                held = f", held requests {record.held}" if record.held else ""
                yield f"{record.worker} (pid {record.pid}) ended: {record.reason}{held}"
