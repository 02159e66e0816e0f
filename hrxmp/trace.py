"""The source's side of the trace: stamp, number, encode once, hand over.

Every process that emits records has one `Tracer` a run, or None when tracing is off: call sites
test that one reference and nothing else exists then. `emit` never blocks and may be called from
any thread; a `Delivery` thread takes the lines from here to the aggregator.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from hrxmp.clock import Hlc, HybridLogicalClock, mono_ns, wall_ns
from hrxmp.delivery import Delivery, Edge, Taken
from hrxmp.identity import Identity
from hrxmp.records import (
    MAX_LINE_BYTES,
    OPENING,
    CompileBegin,
    CompileEnd,
    GraphBegin,
    GraphEnd,
    Lost,
    Record,
    WaitBegin,
    WaitEnd,
)
from hrxmp.settings import Settings

PENDING_BYTES = 16 << 20
"""Bound of lines that the delivery thread has not fetched yet."""

_ROOM = MAX_LINE_BYTES - len(OPENING) - len(b'"late":true,') - 1
_EDGES: dict[type[Record], tuple[str, bool]] = {
    GraphBegin: ("graph", True),
    GraphEnd: ("graph", False),
    CompileBegin: ("compile", True),
    CompileEnd: ("compile", False),
    WaitBegin: ("wait", True),
    WaitEnd: ("wait", False),
}
_encode = msgspec.json.Encoder().encode


def open_tracer(
    settings: Settings,
    identity: Identity,
    clock: HybridLogicalClock,
    endpoint: str,
    run_begin_ns: int,
) -> Tracer | None:
    """A started tracer, or None when tracing is off."""
    if not settings.trace_compile:
        return None
    tracer = Tracer(identity, clock, endpoint, settings, run_begin_ns)
    tracer.start()
    return tracer


class Tracer:
    """One source's record stream of one run."""

    def __init__(
        self,
        identity: Identity,
        clock: HybridLogicalClock,
        endpoint: str,
        settings: Settings,
        run_begin_ns: int,
        *,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self.identity = identity
        self.clock = clock
        self.run_begin_ns = run_begin_ns
        self._lock = threading.Lock()
        self._pending: list[tuple[int, int, bytes]] = []
        self._edges: list[tuple[int, Edge]] = []
        self._pending_first = 0
        self._pending_bytes = 0
        self._pending_limit = pending_bytes
        self._seq = 0
        self._awake = False
        self._closed = False
        self._lost: list[tuple[int, int, str]] = []
        self._log_folder: Path | None = None
        self._delivery = Delivery(self, endpoint, settings)

    def start(self, welcome_s: float = 1.0) -> bool:
        """Start delivery and wait for the aggregator's welcome, so that what is emitted from now
        on stands after all that it has written. False when none answers; emitting works anyway.
        """
        return self._delivery.start(welcome_s)

    def emit(self, record: type[Record], *, exec_id: int | None = None, **fields: Any) -> None:
        """Append one record. Never blocks; what does not fit is counted and said in `lost`."""
        edge = _EDGES.get(record)
        with self._lock:
            if self._closed:
                return
            if self._lost and not self._say_lost():
                self._drop("the source could not keep up")
                return
            self._append(record, exec_id, fields, edge)
            wake, self._awake = not self._awake, True
        if wake:
            self._delivery.wake()

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all that was emitted so far is acknowledged; False when the time is over."""
        with self._lock:
            target = self._seq
        return self._delivery.wait_acknowledged(target, timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Deliver the rest and say goodbye. False when records could not be delivered in time."""
        finished = self._delivery.close(timeout_s)
        with self._lock:
            self._closed = True
        self._delivery.release()
        return finished

    # -- the delivery thread's side ----------------------------------------------------------

    def take(self) -> Taken:
        """Everything that is pending, with the promise that whatever comes later is later."""
        with self._lock:
            taken = Taken(
                first_seq=self._pending_first,
                items=self._pending,
                edges=self._edges,
                mark=self.clock.tick(wall_ns()),
            )
            self._pending, self._edges, self._pending_bytes = [], [], 0
            self._pending_first = self._seq
            self._awake = False
        return taken

    def lose(self, first: int, last: int, reason: str) -> None:
        """Note that these numbers were given up; a `lost` record will say so."""
        with self._lock:
            self._note_lost(first, last, reason)

    def tell_lost(self) -> bool:
        """Emit the `lost` records that are due, now that there is room; True when some were."""
        with self._lock:
            return bool(self._lost) and self._say_lost()

    def lost_count(self) -> int:
        """How many records are lost and not said to be so by a `lost` record yet."""
        with self._lock:
            return sum(last - first + 1 for first, last, _reason in self._lost)

    # -- under the lock ----------------------------------------------------------------------

    def _append(
        self, record: type[Record], exec_id: int | None, fields: dict[str, Any], edge: Any
    ) -> None:
        if self._pending_bytes > self._pending_limit:
            self._drop("the source could not keep up")
            return
        seq, identity = self._seq, self.identity
        stamp: Hlc = self.clock.tick(wall_ns())
        made = record(
            run_id=identity.run_id,
            source=identity.source,
            incarnation=identity.incarnation,
            seq=seq,
            t_ns=mono_ns() - self.run_begin_ns,
            exec_id=exec_id,
            **fields,
        )
        line = self._line(made)
        if edge is not None:
            key = exec_id if edge[0] == "graph" else fields["request"]
            self._edges.append((seq, (edge[0], key, edge[1])))
        self._pending.append((stamp[0], stamp[1], line))
        self._pending_bytes += len(line)
        self._seq = seq + 1

    def _line(self, record: Record) -> bytes:
        try:
            line = _encode(record)
        except UnicodeEncodeError:  # lone surrogates, e.g. in an undecodable file name
            return self._fit(record)
        return line[1:] if len(line) <= _ROOM else self._fit(record)

    def _fit(self, record: Record) -> bytes:
        columns = msgspec.to_builtins(record)
        if len(columns.get("log", "")) > 256:
            columns["log_path"] = columns.get("log_path") or self._log_file(record, columns["log"])
        return fit(columns, _ROOM)[1:]

    def _log_file(self, record: Record, text: str) -> str:
        """Keep a long log in a private file; an empty path when that is impossible."""
        try:
            if self._log_folder is None:
                self._log_folder = Path(tempfile.mkdtemp(prefix="hrxmp-logs-"))
            path = self._log_folder / f"{record.run_id}-{record.source}-{record.seq}.log"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode(errors="replace"))
            return str(path)
        except OSError:
            return ""

    def _drop(self, reason: str) -> None:
        self._note_lost(self._seq, self._seq, reason)
        self._seq += 1

    def _note_lost(self, first: int, last: int, reason: str) -> None:
        if self._lost and self._lost[-1][1] + 1 == first and self._lost[-1][2] == reason:
            first = self._lost.pop()[0]
        self._lost.append((first, last, reason))

    def _say_lost(self) -> bool:
        """Emit what was lost; False while there is no room, i.e. until all is fetched."""
        if not self._lost or self._pending or not self._delivery.has_room:
            return not self._lost
        self._pending_first = self._seq
        lost, self._lost = self._lost, []
        for first, last, reason in lost:
            fields = {"of": self.identity.source, "first": first, "last": last, "reason": reason}
            self._append(Lost, None, fields, None)
        return True


def fit(columns: dict[str, Any], room: int) -> bytes:
    """Encode a record's columns in at most `room` bytes: the longest text is halved until it fits.

    Texts keep their beginning. When no text is left to shorten, lists and free maps lose entries.
    """
    columns = _clean(columns)
    while len(line := _encode(columns)) > room:
        holder, key, value = max(_leaves(columns), key=lambda leaf: len(leaf[2]))
        if isinstance(value, str):
            holder[key] = value[: len(value) * 2 // 3 - 1] + "…"
        elif isinstance(value, list):
            holder[key] = value[: len(value) // 2]
        else:
            holder[key] = dict(list(value.items())[: len(value) // 2])
    return line


def _leaves(value: Any) -> list[tuple[Any, Any, Any]]:
    """(holder, key, value) of all that can be shortened; texts first, as long as any is long."""
    texts: list[tuple[Any, Any, Any]] = []
    others: list[tuple[Any, Any, Any]] = []
    stack = [value]
    while stack:
        holder = stack.pop()
        for key, child in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(child, str) and len(child) > 24:
                texts.append((holder, key, child))
            elif isinstance(child, dict | list):
                stack.append(child)
                if isinstance(child, list) or key in ("params", "options", "versions", "totals"):
                    others.append((holder, key, child))
    return texts or others


def _clean(value: Any) -> Any:
    """A copy in which every text can be encoded."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(child) for key, child in value.items()}
    return [_clean(child) for child in value] if isinstance(value, list | tuple) else value
