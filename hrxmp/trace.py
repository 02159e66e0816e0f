"""The source's side of the trace: stamp, number, hand over.

Every process that emits records has one `Tracer` a run, or None when tracing is off: call sites
test that one reference and nothing else exists then. `emit` never blocks, may be called from any
thread, and does only what must happen at its moment; a `Delivery` thread makes lines of what was
noted and takes them to the aggregator.
"""

from __future__ import annotations

import threading
from typing import Any

from hrxmp.clock import HybridLogicalClock, mono_ns, wall_ns
from hrxmp.delivery import Delivery, Taken
from hrxmp.identity import Identity
from hrxmp.record_lines import Fields, Note
from hrxmp.records import Lost, Record
from hrxmp.settings import Settings

PENDING_RECORDS = 1 << 16
"""Bound of what the delivery thread has not fetched yet."""

_NOT, _SOMETIME, _SOON = range(3)
"""When the delivery thread will look for records, as far as it was told."""


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
        pending_records: int = PENDING_RECORDS,
    ) -> None:
        self.identity = identity
        self.clock = clock
        self.run_begin_ns = run_begin_ns
        self._lock = threading.Lock()
        self._pending: list[Note] = []
        self._pending_first = 0
        self._pending_limit = pending_records
        self._seq = 0
        self._called = _NOT
        self._closed = False
        self._lost: list[tuple[int, int, str]] = []
        self._delivery = Delivery(self, endpoint, settings)

    def start(self, welcome_s: float = 1.0) -> bool:
        """Start delivery and wait for the aggregator's welcome, so that what is emitted from now
        on stands after all that it has written. False when none answers; emitting works anyway.
        """
        return self._delivery.start(welcome_s)

    def emit(self, record: type[Record], *, exec_id: int | None = None, **fields: Any) -> None:
        """Append one record. Never blocks; what does not fit is counted and said in `lost`."""
        self.note(record, exec_id, fields, _SOON)

    def note(
        self, record: type[Record], exec_id: int | None, fields: Fields, when: int = _SOMETIME
    ) -> None:
        """Like `emit`, of something usual: in a stream of such records each waits for company.

        `fields`, or the function that gives them, is read in another thread, and must not change.
        """
        with self._lock:
            if self._closed or not self._has_room():
                return
            self._pending.append((self.clock.tick(wall_ns()), mono_ns(), record, exec_id, fields))
            self._seq += 1
            if self._called >= when:
                return
            self._called = when
        self._delivery.wake()

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all that was emitted so far is acknowledged; False when the time is over."""
        with self._lock:
            target = self._seq
        return self._delivery.wait_acknowledged(target, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
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
                notes=self._pending,
                mark=self.clock.tick(wall_ns()),
            )
            self._called = _SOMETIME if self._pending else _NOT  # it looks again by itself
            self._pending = []
            self._pending_first = self._seq
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

    def _has_room(self) -> bool:
        """Whether a record can be kept now; one that cannot is counted here."""
        full = len(self._pending) >= self._pending_limit
        if full or (self._lost and not self._say_lost()):
            self._note_lost(self._seq, self._seq, "the source could not keep up")
            self._seq += 1
            return False
        return True

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
            self._pending.append((self.clock.tick(wall_ns()), mono_ns(), Lost, None, fields))
            self._seq += 1
        return True
