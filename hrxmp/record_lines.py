"""Makes lines of notes: a record is encoded once, at its source, off its emitter's way.

Used by the thread of `delivery`. A note is what `emit` keeps: the stamps of its moment and the
fields, or a function that gives them. Here it becomes a checked struct and a JSON line that fits
the aggregator's pipe writes; long logs go to private files. It knows no socket and no lock.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hrxmp.clock import Hlc
from hrxmp.identity import Identity
from hrxmp.records import (
    MAX_LINE_BYTES,
    OPENING,
    CompileBegin,
    CompileEnd,
    GraphBegin,
    GraphEnd,
    Record,
    WaitBegin,
    WaitEnd,
)

Fields = dict[str, Any] | Callable[[], dict[str, Any]]
Note = tuple[Hlc, int, type[Record], int | None, Fields]
"""Hybrid time, monotonic ns, kind of record, graph execution, and what it says."""

Edge = tuple[str, int | None, bool]
"""Start (True) or end of an interval: kind and the id that joins both."""

Item = tuple[int, int, bytes]
"""Hybrid time in two parts, and the line without its opening."""

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


class RecordLines:
    """The lines of one source of one run."""

    def __init__(self, identity: Identity, run_begin_ns: int) -> None:
        self._identity = identity
        self._run_begin_ns = run_begin_ns
        self._log_folder: Path | None = None

    def item(self, seq: int, note: Note) -> Item:
        """The note as what a batch carries, with its number."""
        (wall, counter), mono, kind, exec_id, fields = note
        record = kind(
            run_id=self._identity.run_id,
            source=self._identity.source,
            incarnation=self._identity.incarnation,
            seq=seq,
            t_ns=mono - self._run_begin_ns,
            exec_id=exec_id,
            **(fields() if callable(fields) else fields),
        )
        return wall, counter, self._line(record)

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


def edge(note: Note) -> Edge | None:
    """The interval that a note begins or ends, if it does."""
    _hlc, _mono, kind, exec_id, fields = note
    if kind not in _EDGES:
        return None
    interval, begins = _EDGES[kind]
    if interval == "graph":
        return interval, exec_id, begins
    return interval, (fields() if callable(fields) else fields)["request"], begins


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
