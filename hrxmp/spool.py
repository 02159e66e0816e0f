"""What a trace source keeps until the aggregator has acknowledged it: memory, then a file.

Owned by the sender thread of `trace`. Both parts are bounded; what does not fit is refused, and
the caller counts it. Spool files have no name, so they are private and vanish with the process,
however it ends. Nothing here knows sockets or clocks.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque

import msgspec

from hrxmp.messages import Records

SEGMENTS = 8
"""A spool is so many files, so that acknowledged space is given back piece by piece."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Records).decode


class Segment:
    """One unnamed spool file and the number of batches in it that are still wanted."""

    __slots__ = ("descriptor", "live", "size")

    def __init__(self, folder: str) -> None:
        self.descriptor = _unnamed_file(folder)
        self.size = 0
        self.live = 0

    def append(self, data: bytes) -> int:
        """Write at the end; returns the offset. Raises OSError, e.g. when the disk is full."""
        offset, view = self.size, memoryview(data)
        while view:
            view = view[os.pwrite(self.descriptor, view, offset + len(data) - len(view)) :]
        self.size += len(data)
        self.live += 1
        return offset


class Kept(msgspec.Struct):
    """One batch: in memory (`records`) or in a segment."""

    first_seq: int
    end_seq: int
    size: int
    records: Records | None
    segment: Segment | None = None
    offset: int = 0


class Backlog:
    """A queue of batches with a send position; batches leave it when they are acknowledged."""

    def __init__(self, memory_bytes: int, spool_bytes: int, folder: str) -> None:
        self.memory_bytes = memory_bytes
        self.spool_bytes = spool_bytes
        self.folder = folder
        self.in_memory = 0
        self.in_file = 0
        self.in_flight = 0
        """Size of what was sent and not yet acknowledged."""
        self.acked_seq = 0
        """Every number below this is acknowledged."""
        self._kept: deque[Kept] = deque()
        self._sent = 0
        self._segments: list[Segment] = []

    @property
    def unsent(self) -> int:
        """Batches that wait to be sent."""
        return len(self._kept) - self._sent

    @property
    def empty(self) -> bool:
        """Whether everything is acknowledged."""
        return not self._kept

    @property
    def has_room(self) -> bool:
        """Whether a source that had to drop may go on: a quarter of some bound is free."""
        memory, file = self.memory_bytes * 3 // 4, self.spool_bytes * 3 // 4
        return self.in_file < file if self.spool_bytes else self.in_memory < memory

    def first_seq(self, otherwise: int) -> int:
        """The lowest number that is kept, or `otherwise` when nothing is."""
        return self._kept[0].first_seq if self._kept else otherwise

    def first_unsent_seq(self, otherwise: int) -> int:
        """The lowest number that is not sent, or `otherwise` when all are."""
        return self._kept[self._sent].first_seq if self.unsent else otherwise

    def put(self, records: Records) -> bool:
        """Keep a batch; False when neither memory nor spool has room for it."""
        size = sum(len(item[2]) + 64 for item in records.items)
        end = records.first_seq + len(records.items)
        kept = Kept(records.first_seq, end, size, records)
        if self.in_file or self.in_memory + size > self.memory_bytes:
            if not self._to_file(kept, _encode(records)):
                return False
        else:
            self.in_memory += size
        self._kept.append(kept)
        return True

    def next_batch(self) -> Records | None:
        """The next batch to send, or None. `advance` when it is on its way."""
        if self._sent == len(self._kept):
            return None
        kept = self._kept[self._sent]
        if kept.segment is None:
            return kept.records
        return _decode(os.pread(kept.segment.descriptor, kept.size, kept.offset))

    def advance(self) -> None:
        """The batch of `next_batch` was sent."""
        self.in_flight += self._kept[self._sent].size
        self._sent += 1

    def acknowledge(self, next_seq: int) -> None:
        """Let go of every batch that ends at or below `next_seq`."""
        self.acked_seq = max(self.acked_seq, next_seq)
        while self._kept and self._kept[0].end_seq <= next_seq:
            kept = self._kept.popleft()
            if self._sent:
                self._sent -= 1
                self.in_flight -= kept.size
            self._release(kept)

    def rewind(self, next_seq: int) -> None:
        """Send again from the batch on that holds `next_seq`."""
        done = [kept.size for kept in self._kept if kept.end_seq <= next_seq]
        self._sent, self.in_flight = len(done), sum(done)

    def unacknowledged(self) -> int:
        """Number of records that are still kept."""
        return sum(kept.end_seq - kept.first_seq for kept in self._kept)

    def close(self) -> None:
        """Give the files back."""
        for segment in self._segments:
            os.close(segment.descriptor)
        self._segments.clear()
        self._kept.clear()

    def _to_file(self, kept: Kept, data: bytes) -> bool:
        if self.in_file + len(data) > self.spool_bytes:
            return False
        try:
            segment = self._segment()
            kept.offset = segment.append(data)
        except OSError:
            return False
        kept.records, kept.segment, kept.size = None, segment, len(data)
        self.in_file += len(data)
        return True

    def _segment(self) -> Segment:
        if not self._segments or self._segments[-1].size * SEGMENTS > self.spool_bytes:
            self._segments.append(Segment(self.folder))
        return self._segments[-1]

    def _release(self, kept: Kept) -> None:
        segment = kept.segment
        if segment is None:
            self.in_memory -= kept.size
            return
        segment.live -= 1
        if not segment.live:
            self.in_file -= segment.size
            self._segments.remove(segment)
            os.close(segment.descriptor)


def _unnamed_file(folder: str) -> int:
    """A private file without a name, in `folder`."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system without O_TMPFILE
        descriptor, path = tempfile.mkstemp(prefix="hrxmp-spool-", dir=folder)
        os.unlink(path)
        return descriptor
