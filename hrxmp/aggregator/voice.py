"""Records that the aggregator itself adds to a run: made-up ends, and what was lost.

Part of the aggregator's state machines: no sockets, no files. Only here are records of a source
decoded again, and only the few begin records of a source that ended without their ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hrxmp.errors import ErrorInfo
from hrxmp.records import CompileBegin, CompileEnd, GraphBegin, GraphEnd, Record, WaitBegin, WaitEnd

SOURCE = "aggregator"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(GraphBegin | CompileBegin | WaitBegin).decode
Closing = tuple[type[Record], int | None, dict[str, Any]]


class Voice:
    """The aggregator as a source of one run: its numbers and its origin of time."""

    def __init__(self, run_id: str, incarnation: int, now: int) -> None:
        self.run_id = run_id
        self.incarnation = incarnation
        self.begin_ns = now
        """When the run began, on this host's monotonic clock; else when it was first seen."""
        self._seq = 0
        self._t_ns = 0

    def line(
        self, record: type[Record], exec_id: int | None, now: int, fields: dict[str, Any]
    ) -> bytes:
        """The next record of this run, as a source would send it.

        Its origin of time may be learned, or corrected by another source, in between: time never
        goes back.
        """
        self._t_ns = max(self._t_ns, now - self.begin_ns)
        made = record(
            run_id=self.run_id,
            source=SOURCE,
            incarnation=self.incarnation,
            seq=self._seq,
            t_ns=self._t_ns,
            exec_id=exec_id,
            **fields,
        )
        self._seq += 1
        return _encode(made)[1:]


def closing_records(begins: Iterable[bytes], source: str) -> list[Closing]:
    """The ends of open intervals: compiles and waits first, their graphs after them."""
    opened = [_decode(b"{" + line) for line in begins]
    opened.sort(key=lambda begin: (isinstance(begin, GraphBegin), isinstance(begin, WaitBegin)))
    error = ErrorInfo(code="lost", message=f"{source} ended before it wrote the end")
    return [_closing(begin, error) for begin in opened]


def _closing(begin: GraphBegin | CompileBegin | WaitBegin, error: ErrorInfo) -> Closing:
    match begin:
        case CompileBegin():
            fields: dict[str, Any] = {
                "request": begin.request,
                "kernel": begin.kernel,
                "worker": begin.worker,
                "attempt": begin.attempt,
                "compiler_started": True,
                "outcome": "lost",
                "compile_ns": 0,
                "finish_ns": 0,
                "binary_bytes": 0,
                "log": "",
                "log_path": "",
                "error": error,
                "synthetic": True,
            }
            return CompileEnd, begin.exec_id, fields
        case WaitBegin():
            fields = {"request": begin.request, "kernel": begin.kernel, "asked_by": begin.asked_by}
            fields |= {"dur_ns": 0, "outcome": "lost", "synthetic": True}
            return WaitEnd, begin.exec_id, fields
    fields = dict.fromkeys(_COUNTS, 0)
    fields |= {"uid": begin.uid, "outcome": "lost", "error": error, "synthetic": True}
    fields |= {"program": 0, "program_hit": False, "prepared_hit": False, "replayed": False}
    return GraphEnd, begin.exec_id, fields


_COUNTS = (
    "requests", "compiles", "joins", "disk_hits", "memory_hits", "driver_compiles", "failures",
    "waits", "wait_ns", "dur_ns",
)  # fmt: skip
