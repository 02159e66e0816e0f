"""Takes a source's records to the aggregator: session, batches, acknowledgements, goodbye.

One thread a `Tracer`, which makes, uses and closes the trace socket. Nothing that happens here
reaches the process's own work: an absent, stopped or restarted aggregator costs memory, then a
spool file, then counted losses.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Protocol

import msgspec

import hrxmp
from hrxmp import lifecycle, wire
from hrxmp.clock import Hlc, HybridLogicalClock, mono_ns
from hrxmp.identity import Identity
from hrxmp.messages import (
    Ack,
    FromAggregator,
    Goodbye,
    Heartbeat,
    Hello,
    Records,
    Shutdown,
    Welcome,
)
from hrxmp.record_lines import Item, Note, RecordLines, edge
from hrxmp.settings import Settings
from hrxmp.spool import Backlog

BATCH_ITEMS = 1000
BATCH_BYTES = 256 << 10
WINDOW_BYTES = 256 << 10
"""So much may be sent and not yet acknowledged, until the aggregator allows more or less."""
MEMORY_BYTES = 16 << 20
OPEN_TOLD = 256
LINGER_NS = 10_000_000
"""A wake-up waits so long for company: one batch instead of many;"""
STREAM_LINGER_NS = 500_000_000
"""and so long in a steady stream, as decoding makes it: each batch costs each process of the run
some 200 us, at which the device waits when it is a processor."""
RETRY_NS = 200_000_000
PATIENCE_NS = 900_000_000
"""After so long without a welcome the user is told."""


class Taken(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was pending at one moment, and the clock of that moment."""

    first_seq: int
    notes: list[Note]
    mark: Hlc


class Source(Protocol):
    """What delivery needs of its tracer."""

    identity: Identity
    clock: HybridLogicalClock
    run_begin_ns: int

    def take(self) -> Taken: ...
    def lose(self, first: int, last: int, reason: str) -> None: ...
    def tell_lost(self) -> bool: ...
    def lost_count(self) -> int: ...


class Delivery:
    """The thread and its state. Only `start`, `wake`, `close` and `has_room` are for others."""

    def __init__(self, source: Source, endpoint: str, settings: Settings) -> None:
        self.source = source
        self.endpoint = endpoint
        self.settings = settings
        self.has_room = True
        self._backlog = Backlog(MEMORY_BYTES, settings.spool_mb << 20, spool_folder())
        self._wake = lifecycle.WakeUp()
        self._thread = threading.Thread(target=self._run, name="hrxmp-trace", daemon=True)
        self._welcome = threading.Event()
        self._progress = threading.Condition()
        self._closing_ns = 0
        """Deadline of `close` on the monotonic clock; 0 while open."""
        self._hurry = False
        self._finished = False
        self._started = self._released = False
        # The thread's own:
        self._welcomed = False
        self._resumed = False
        self._said = False
        self._lines = RecordLines(source.identity, source.run_begin_ns)
        self._next_seq = 0
        self._mark: Hlc = (0, 0)
        self._open: dict[tuple[str, int | None], int] = {}
        self._hello_ns = self._sent_ns = self._take_ns = 0
        self._heartbeat_ns = 250_000_000
        self._born_ns = mono_ns()
        self._window = WINDOW_BYTES
        self._acked = Ack(next_seq=0)
        """The last acknowledgement that says how far the whole trace is written."""
        self._goodbye_sent = False
        self._failure = ""

    def start(self, welcome_s: float) -> bool:
        """Start the thread; wait at most `welcome_s` for the aggregator."""
        self._started = True
        self._thread.start()
        return self._welcome.wait(welcome_s)

    def wake(self) -> None:
        """There is something to fetch. One system call, from any thread."""
        self._wake.set()

    def wait_acknowledged(self, next_seq: int, timeout_s: float) -> bool:
        """Wait until every record below the number is acknowledged."""
        self._hurry = True
        self.wake()
        with self._progress:
            return self._progress.wait_for(lambda: self._backlog.acked_seq >= next_seq, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Deliver, say goodbye, wait for its acknowledgement; bounded by `timeout_s`."""
        if not self._started:
            return False
        if not self._closing_ns:
            if not self._welcome.is_set() and mono_ns() - self._born_ns > PATIENCE_NS:
                timeout_s = min(timeout_s, 0.2)  # nobody answered so far
            self._closing_ns = mono_ns() + int(timeout_s * 1e9)
            self.wake()
        self._thread.join(timeout_s + 0.5)
        return self._finished

    def release(self) -> None:
        """Give the wake-up descriptor back; nobody may call `wake` any more."""
        if not self._released and not self._thread.is_alive():
            self._wake.close()
            self._released = True

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        context = wire.context()
        try:
            socket = wire.dealer(context, self.endpoint, self.settings.curve_dir, immediate=True)
            self._link = wire.Link[FromAggregator](
                socket, FromAggregator, self.source.identity, self.source.clock
            )
            while not self._step(mono_ns()):
                pass
            self._link.close(linger_ms=0)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._report()
            self._backlog.close()
            context.destroy(0)

    def _step(self, now: int) -> bool:
        """One round; True when the session is over."""
        if not self._welcomed and now - self._hello_ns >= RETRY_NS:
            self._hello(now)
        if 0 < self._take_ns <= now or self._closing_ns:
            self._collect()
        sent = self._send(now)
        if self._closing_ns:
            self._goodbye()
            if now >= self._closing_ns:
                return True
        self._wait(now, sent)
        # What follows the last acknowledgement answers repeats. Heeding it would say hello again,
        # and the aggregator would take the process's end for a death.
        while not self._finished and (message := self._link.receive()) is not None:
            self._handle(message.body)
        return self._finished

    def _wait(self, now: int, sent: bool) -> None:
        """Sleep until there is something to do: records, an answer, or a time."""
        if not self._welcomed:
            timeout = 50
        elif not sent:
            timeout = 10
        elif self._take_ns > now:
            timeout = (self._take_ns - now) // 1_000_000 + 1
        else:
            timeout = self._heartbeat_ns // 1_000_000
        if self._closing_ns:
            timeout = min(timeout, 20)
        if self._wake.fd in lifecycle.wait([self._link], [self._wake.fd], timeout):
            self._wake.clear()
            urgent = self._hurry or self._closing_ns
            self._hurry = False
            self._take_ns = mono_ns() + (0 if urgent else LINGER_NS)

    def _collect(self) -> None:
        """Move what is pending into the backlog, in batches. While there is something each time,
        the next time comes without a wake-up."""
        streaming = False
        while True:
            taken = self.source.take()
            self._divide(taken)
            streaming = streaming or bool(taken.notes)
            self.has_room = self._backlog.has_room
            if not self.has_room or not self.source.tell_lost():
                break
        self._take_ns = mono_ns() + STREAM_LINGER_NS if streaming else 0

    def _divide(self, taken: Taken) -> None:
        items = [self._lines.item(taken.first_seq + i, note) for i, note in enumerate(taken.notes)]
        for start, stop in _cuts(items):
            first = taken.first_seq + start
            for seq, note in enumerate(taken.notes[start:stop], first):
                self._follow(seq, note)
            last = stop == len(items)
            self._keep(
                Records(
                    first_seq=first,
                    items=items[start:stop],
                    mark=taken.mark if last else items[stop - 1][:2],
                    skipped=first - self._next_seq,
                    open=list(self._open.values())[-OPEN_TOLD:],
                )
            )
        self._mark = taken.mark

    def _follow(self, seq: int, note: Note) -> None:
        found = edge(note)
        if found is None:
            return
        kind, key, begins = found
        if begins:
            self._open[kind, key] = seq
        else:
            self._open.pop((kind, key), None)

    def _keep(self, records: Records) -> None:
        if self.has_room and self._backlog.put(records):
            self._next_seq = records.first_seq + len(records.items)
            return
        self.has_room = False
        last = records.first_seq + len(records.items) - 1
        self.source.lose(records.first_seq, last, "memory and spool of the source are full")

    def _send(self, now: int) -> bool:
        """Send what the window allows. False when the peer takes nothing now."""
        if not self._welcomed:
            return False
        while self._backlog.in_flight < self._window:
            batch = self._backlog.next_batch()
            if batch is None:
                break
            if not self._link.send(batch):
                return False
            self._backlog.advance()
            self._sent_ns = now
        return now - self._sent_ns < self._heartbeat_ns or self._beat(now)

    def _beat(self, now: int) -> bool:
        """A batch without records: alive, and no earlier record is to come than its mark."""
        if not self._backlog.unsent and not self._take_ns:
            self._collect()
        first = self._backlog.first_unsent_seq(self._next_seq)
        mark = (0, 0) if self._backlog.unsent else self._mark
        sent = self._link.send(Records(first_seq=first, items=[], mark=mark))
        if sent:
            self._sent_ns = now
        return sent

    def _hello(self, now: int) -> None:
        self._hello_ns = now
        self._link.send(
            Hello(
                role="trace",
                pid=os.getpid(),
                boot_id=host_id(),
                package_version=getattr(hrxmp, "__version__", ""),
                first_unacked_seq=self._backlog.first_seq(self._next_seq),
                run_begin_ns=self.source.run_begin_ns,
                resumed=self._resumed,
                floor=self._acked.floor,
                mark=self._acked.mark,
            )
        )
        if not self._said and not self._resumed and now - self._born_ns > PATIENCE_NS:
            self._say(f"no trace aggregator answers at {self.endpoint}; records are kept for now")

    def _handle(self, body: FromAggregator) -> None:
        match body:
            case Welcome():
                self._welcomed = self._resumed = True
                self._heartbeat_ns = max(body.heartbeat_ms, 10) * 1_000_000
                self._backlog.rewind(body.next_seq)
                self._sent_ns = 0
                self._goodbye_sent = False
                self._welcome.set()
            case Ack():
                self._acknowledged(body)
            case Heartbeat(state="ask"):
                self._collect()
                self._sent_ns = 0
            case Heartbeat(state="unknown"):
                if self._welcomed:
                    self._welcomed = False
                    self._hello_ns = 0
            case Shutdown():
                pass  # the records are kept; a successor may come

    def _acknowledged(self, ack: Ack) -> None:
        self._backlog.acknowledge(ack.next_seq)
        self._window = ack.window_bytes or self._window
        if ack.floor > self._acked.floor:
            self._acked = ack
        with self._progress:
            self._progress.notify_all()
        if ack.again >= 0:
            self._backlog.rewind(ack.again)
            self._goodbye_sent = False
        if ack.ended and ack.next_seq >= self._next_seq:
            self._finished = True

    def _goodbye(self) -> None:
        """Once everything is sent: the number of the last record. Its ack ends the session."""
        if self._goodbye_sent or not self._welcomed:
            return
        self._collect()
        if not self._backlog.unsent and self._link.send(
            Goodbye(reason="done", last_seq=self._next_seq - 1)
        ):
            self._goodbye_sent = True

    def _report(self) -> None:
        """Say once on stderr what could not be delivered."""
        count = self._backlog.unacknowledged() + len(self.source.take().notes)
        count += self.source.lost_count()
        if self._failure:
            self._say(f"tracing stopped: {self._failure}")
        elif count and not self._said:
            source = self.source.identity.source
            self._say(f"{self.endpoint}: {count} trace records of {source} were not delivered")

    def _say(self, text: str) -> None:
        self._said = True
        sys.stderr.write(f"hrxmp: {text}\n")
        sys.stderr.flush()


def _cuts(items: list[Item]) -> list[tuple[int, int]]:
    """Where to cut a list into batches."""
    cuts, start, size = [], 0, 0
    for index, item in enumerate(items):
        size += len(item[2])
        if size >= BATCH_BYTES or index - start + 1 >= BATCH_ITEMS:
            cuts.append((start, index + 1))
            start, size = index + 1, 0
    if start < len(items):
        cuts.append((start, len(items)))
    return cuts


def spool_folder() -> str:
    """Where unnamed spool files go: a folder on a disk rather than in memory."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp"


def host_id() -> str:
    """Equal for two processes whose pids mean the same: boot and pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
