"""`hrxmp-trace top`: a live table of all runs of an aggregator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hrxmp.aggregator.reader import read
from hrxmp.clock import mono_ns
from hrxmp.records import (
    CompileBegin,
    CompileEnd,
    CompileRequested,
    GraphEnd,
    Lost,
    Record,
    RunEnd,
    WaitBegin,
    WaitEnd,
)
from hrxmp.tracetool.live import Attached
from hrxmp.tracetool.view import ms

WINDOW_NS = 5_000_000_000


class RunState(msgspec.Struct):
    """What was seen of one run since this reader attached."""

    status: str = "running"
    executions: int = 0
    recent: deque[int] = msgspec.field(default_factory=deque)
    requests: int = 0
    hits: int = 0
    waits: int = 0
    wait_ns: int = 0
    failures: int = 0
    lost: int = 0
    compiling: dict[tuple[int, int], tuple[str, int]] = {}
    """(request, attempt) -> kernel, since when."""
    waiting: dict[tuple[int | None, int], tuple[str, int]] = {}

    def take(self, record: Record, now: int) -> None:
        """Count one record."""
        match record:
            case GraphEnd():
                self.executions += 1
                self.recent.append(now)
                self.hits += record.memory_hits + record.disk_hits
                self.failures += record.outcome != "ok"
            case CompileRequested():
                self.requests += 1
            case CompileBegin():
                self.compiling[record.request, record.attempt] = (record.kernel, now)
            case CompileEnd():
                self.compiling.pop((record.request, record.attempt), None)
            case WaitBegin():
                self.waiting[record.exec_id, record.request] = (record.kernel, now)
            case WaitEnd():
                self.waiting.pop((record.exec_id, record.request), None)
                self.waits += 1
                self.wait_ns += record.dur_ns
            case Lost():
                self.lost += max(record.last - record.first + 1, 1)
            case RunEnd():
                self.status = record.status

    def rate(self, now: int) -> float:
        """Executions a second, over the last seconds."""
        while self.recent and now - self.recent[0] > WINDOW_NS:
            self.recent.popleft()
        return len(self.recent) / (WINDOW_NS / 1e9)


class Top:
    """The table's state."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}

    def take(self, block: bytes, now: int) -> None:
        """Count a block of lines."""
        for line in read(block.splitlines()).lines:
            record = line.record
            self.runs.setdefault(record.run_id, RunState()).take(record, now)

    def render(self, attached: Attached, now: int) -> Group:
        """The table as it is now."""
        table = Table()
        table.add_column("run")
        for name in ("status", "exec/s", "executions", "requests", "hit rate", "compiling",
                     "waiting", "waits", "waited", "failures", "lost"):  # fmt: skip
            table.add_column(name, justify="right")
        for run_id, run in list(self.runs.items())[-40:]:
            table.add_row(run_id, *self._cells(run, now))
        return Group(table, self._foot(attached))

    def _cells(self, run: RunState, now: int) -> list[str]:
        asked = run.hits + run.requests
        return [
            run.status,
            f"{run.rate(now):.1f}",
            str(run.executions),
            str(run.requests),
            f"{run.hits / asked:.1%}" if asked else "",
            _oldest(run.compiling.values(), now),
            _oldest(run.waiting.values(), now),
            str(run.waits),
            ms(run.wait_ns),
            str(run.failures),
            str(run.lost),
        ]

    def _foot(self, attached: Attached) -> Text:
        status = attached.status
        if status is None:
            return Text("connecting")
        totals = status.totals
        text = (
            f"{attached.endpoint}: {totals.get('sessions', 0)} sources, {status.pending} records "
            f"held, oldest {status.oldest_ms} ms, {totals.get('late', 0)} late, "
            f"{totals.get('received', 0)} received"
        )
        missed = f", {attached.dropped} bytes missed by this table" if attached.dropped else ""
        return Text(text + missed, style="dim")


def run(attached: Attached, console: Console) -> None:
    """Show the table until interrupted."""
    top = Top()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        shown = 0
        for block in attached.blocks():
            now = mono_ns()
            if block:
                top.take(block, now)
            if now - shown > 250_000_000:
                shown = now
                live.update(top.render(attached, now), refresh=True)


def _oldest(open_ones: Iterable[tuple[str, int]], now: int) -> str:
    found = list(open_ones)
    if not found:
        return ""
    kernel, since = min(found, key=lambda one: one[1])
    return f"{len(found)}: {kernel.split('(')[0]} {(now - since) / 1e9:.1f} s"
