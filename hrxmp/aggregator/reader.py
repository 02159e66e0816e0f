"""Reads a trace back out of a mixed stream: finds the lines, decodes them, removes repeats.

For the checker and the reader tools; the aggregator itself never decodes a line. A repeat is a
record that was written twice around a crash of the aggregator: same run, source, incarnation and
number, same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from hrxmp.records import MAX_LINE_BYTES, OPENING, AnyRecord

Stream = IO[bytes]
LATE = b'"late":true,'
_decode = msgspec.json.Decoder(AnyRecord).decode


class Line(msgspec.Struct, frozen=True):
    """One record in its place."""

    number: int
    """Line number in the stream, from 1."""
    record: AnyRecord
    late: bool
    raw: bytes
    """The line without its newline and without other text in front of it."""


class Problem(msgspec.Struct, frozen=True):
    """Something that a right trace does not have."""

    kind: str
    text: str
    number: int = 0
    """Line number; 0 when it is not about one line."""


class Trace(msgspec.Struct):
    """What a stream holds."""

    lines: list[Line]
    other: int = 0
    """Lines that are no records."""
    repeats: int = 0
    problems: list[Problem] = []

    def runs(self) -> list[str]:
        """The ids of all runs, in order of their first record."""
        return list(dict.fromkeys(line.record.run_id for line in self.lines))

    def of_run(self, run_id: str) -> list[Line]:
        """The records of one run."""
        return [line for line in self.lines if line.record.run_id == run_id]


def find(text: bytes) -> bytes | None:
    """The record in a line of mixed output: from its opening on, whatever stands before it."""
    start = text.find(OPENING)
    return None if start < 0 else text[start:].rstrip(b"\r\n")


def extract(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Only the records of a mixed stream, as they are."""
    return (raw for text in stream if (raw := find(text)) is not None)


def read(stream: Iterable[bytes]) -> Trace:
    """Decode a stream. Lines that do not decode are problems, never exceptions."""
    trace = Trace([])
    seen: dict[tuple[str, str, int, int], bytes] = {}
    for number, text in enumerate(stream, 1):
        raw = find(text)
        if raw is None:
            trace.other += 1
            continue
        line = _line(number, raw, trace)
        if line is None:
            continue
        record = line.record
        key = (record.run_id, record.source, record.incarnation, record.seq)
        first = seen.setdefault(key, raw)
        if first is raw:
            trace.lines.append(line)
            continue
        trace.repeats += 1
        if first.replace(LATE, b"", 1) != raw.replace(LATE, b"", 1):
            text_ = f"{record.source} number {record.seq} stands twice with different content"
            trace.problems.append(Problem("repeat", text_, number))
    return trace


def read_file(path: str | Path) -> Trace:
    """Decode a file."""
    with open(path, "rb") as stream:
        return read(stream)


def open_stream(path: str) -> Stream:
    """A file, or standard input for `-`."""
    return sys.stdin.buffer if path == "-" else open(path, "rb")


def _line(number: int, raw: bytes, trace: Trace) -> Line | None:
    if len(raw) >= MAX_LINE_BYTES:
        trace.problems.append(Problem("length", f"a line of {len(raw)} bytes", number))
    try:
        return Line(number, _decode(raw), raw.startswith(OPENING + LATE), raw)
    except msgspec.DecodeError as error:
        trace.problems.append(Problem("parse", f"{error}: {raw[:120]!r}", number))
        return None
