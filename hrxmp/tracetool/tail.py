"""`hrxmp-trace tail`: the live trace through filters; in colour on a terminal, else as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import msgspec
from rich.console import Console
from rich.text import Text

from hrxmp.aggregator.reader import Line, read
from hrxmp.records import CompileEnd, GraphEnd, Guard, Lost, Record, RunEnd, WaitEnd
from hrxmp.tracetool.view import ms

COLORS = {
    "compile": "yellow",
    "wait": "magenta",
    "graph": "cyan",
    "kernel": "green",
    "worker": "blue",
    "run": "bold",
}


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted; everything by default."""

    run: str = "*"
    kernel: str = "*"
    events: frozenset[str] = frozenset()
    failures: bool = False
    waits_over_ms: float = -1.0

    def passes(self, record: Record) -> bool:
        """Whether the record is to be shown."""
        if self.events and event_of(record) not in self.events:
            return False
        if not fnmatchcase(record.run_id, self.run):
            return False
        if self.kernel != "*" and not fnmatchcase(getattr(record, "kernel", ""), self.kernel):
            return False
        if self.failures and not failed(record):
            return False
        return self.waits_over_ms < 0 or (
            isinstance(record, WaitEnd) and record.dur_ns >= self.waits_over_ms * 1e6
        )


def tail(blocks: Iterable[bytes], filters: Filters) -> Iterator[Line]:
    """The wanted records of a live stream."""
    for block in blocks:
        for line in read(block.splitlines()).lines:
            if filters.passes(line.record):
                yield line


def show(line: Line, console: Console) -> None:
    """One record in one coloured line."""
    record = line.record
    event = event_of(record)
    color = "red" if failed(record) else COLORS.get(event.split("-")[0], "")
    text = Text()
    text.append(f"{record.t_ns / 1e9:10.3f} ", "dim")
    text.append(f"{record.run_id[-8:]} {record.source:10.10s} ", "dim")
    text.append(f"{event:16s}", color)
    text.append("" if record.exec_id is None else f"exec {record.exec_id} ", "dim")
    text.append(words(record))
    if line.late:
        text.append(" (late)", "red")
    console.print(text, soft_wrap=True)


def words(record: Record) -> str:
    """The columns that matter to somebody who watches."""
    columns = msgspec.to_builtins(record)
    common = ("event", "run", "source", "incarnation", "seq", "t_ns", "exec")
    parts = []
    for name, value in columns.items():
        if name in common or value in (0, "", None, False, [], {}):
            continue
        if name.endswith("_ns") and isinstance(value, int):
            value, name = ms(value), name[:-3]
        parts.append(f"{name}={str(value)[:120]}")
    return " ".join(parts)


def event_of(record: Record) -> str:
    """The event's name."""
    return str(record.__struct_config__.tag)


def failed(record: Record) -> bool:
    """Whether the record tells of something that went wrong."""
    match record:
        case CompileEnd() | WaitEnd() | GraphEnd():
            return record.outcome != "ok"
        case RunEnd():
            return record.status != "ok"
        case Guard() | Lost():
            return True
    return False
