"""`hrxmp-trace summary`: a run in four tables."""

from __future__ import annotations

from collections import defaultdict

from rich import box
from rich.console import Console
from rich.table import Table

from hrxmp.tracetool.view import Execution, RunView, Wanted, ms, reason, title

TOP = 10


def show(run: RunView, console: Console) -> None:
    """Print what the run compiled, what it waited for, and that the rest was quiet."""
    _head(run, console)
    if run.compiled():
        console.print(_kernels(run.compiled()))
        console.print(_slowest(run.compiled()))
    busy = [one for one in run.executions.values() if not one.quiet]
    if busy:
        console.print(_busy(busy))
    console.print(quiet_sentence(run), highlight=False)


def quiet_sentence(run: RunView) -> str:
    """The proof of zero in words."""
    executions = list(run.executions.values())
    quiet = [one for one in executions if one.quiet]
    if not executions:
        return "No graph was executed."
    last = max((one.exec_id for one in executions if not one.quiet), default=None)
    text = f"{len(quiet)} of {len(executions)} executions asked for nothing and waited for nothing"
    if last is not None:
        text += f"; the last one that did is execution {last}"
    watched = ", ".join(run.begin.watched) if run.begin else ""
    return text + (f" (watched: {watched})." if watched else ".")


def _head(run: RunView, console: Console) -> None:
    where = f" on {run.begin.device} ({run.begin.driver})" if run.begin else ""
    status = run.end.status if run.end else "no run-end: still running, or torn"
    console.print(f"run {run.run_id}{where}: {status}", style="bold", highlight=False, markup=False)


def _kernels(compiled: list[Wanted]) -> Table:
    table = _table("Compiles by kernel definition")
    table.add_column("kernel")
    for name in ("compiles", "failed", "compiler", "finishing", "longest"):
        table.add_column(name, justify="right")
    groups: dict[str, list[Wanted]] = defaultdict(list)
    for one in compiled:
        groups[one.name].append(one)
    order = sorted(groups.items(), key=lambda group: -sum(one.compile_ns for one in group[1]))
    for name, ones in order:
        table.add_row(*_kernel_row(name, ones))
    if len(groups) > 1:
        table.add_section()
        table.add_row(*_kernel_row("all", compiled))
    return table


def _kernel_row(name: str, ones: list[Wanted]) -> list[str]:
    failed = sum(one.end is not None and one.end.outcome != "ok" for one in ones)
    return [
        name,
        str(len(ones)),
        str(failed),
        ms(sum(one.compile_ns for one in ones)),
        ms(sum(one.finish_ns for one in ones)),
        ms(max(one.compile_ns + one.finish_ns for one in ones)),
    ]


def _slowest(compiled: list[Wanted]) -> Table:
    table = _table("Slowest compiles")
    for name in ("request", "exec", "time"):
        table.add_column(name, justify="right")
    table.add_column("kernel, and why", overflow="fold")
    for one in sorted(compiled, key=lambda one: -(one.compile_ns + one.finish_ns))[:TOP]:
        asked = one.asked
        exec_id = "prefetch" if asked.exec_id is None else str(asked.exec_id)
        time = ms(one.compile_ns + one.finish_ns)
        kernel = title(asked).replace(",", ", ")  # it may be folded there
        table.add_row(str(asked.request), exec_id, time, _plain(f"{kernel}\n{reason(asked)}"))
    return table


def _busy(executions: list[Execution]) -> Table:
    table = _table("Executions that asked, compiled or waited")
    for name in ("exec", "time", "requests", "compiles", "joins", "disk", "waits", "waited"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    for one in executions[: 3 * TOP]:
        end = one.end
        if end is None:
            table.add_row(str(one.exec_id), *[""] * 7, "open")
            continue
        counts = (end.requests, end.compiles, end.joins, end.disk_hits, end.waits)
        cells = [str(count) for count in counts]
        table.add_row(str(one.exec_id), ms(end.dur_ns), *cells, ms(end.wait_ns), end.outcome)
    return table


def _table(heading: str) -> Table:
    """Light enough that all of ours fit 80 columns."""
    return Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
