"""The aggregator's loop: receive, merge, hand to the sink, acknowledge what is written.

Owns the trace socket; one thread. The logic is in `sessions` and `merge`; nothing here looks into
a record or waits for a reader. It ends when its parent does, once the sources are gone and what
they sent is written.
"""

from __future__ import annotations

import os
from typing import Protocol

from hrxmp import lifecycle, wire
from hrxmp.aggregator.merge import Released
from hrxmp.aggregator.processes import Processes
from hrxmp.aggregator.readers import Readers
from hrxmp.aggregator.sessions import Reply, Sessions
from hrxmp.aggregator.sink import Sink
from hrxmp.clock import mono_ns, wall_ns
from hrxmp.messages import Body, Shutdown, StatusReply, StatusRequest, Subscribe, ToAggregator
from hrxmp.notify import Service

RECEIVES = 64
"""Messages a round: bounds the time until the next release and status reply."""
ORPHAN_NS = 3_000_000_000
"""With the parent gone, sources get so long to end."""
SINK_CLOSE_S = 5.0
NOTE_NS = 250_000_000


class Watcher(Protocol):
    """Somebody who is shown every released block, e.g. the metrics."""

    def feed(self, block: bytes) -> None: ...
    def note(self, status: StatusReply) -> None: ...


class Aggregator:
    """Sockets and loop around the state machines."""

    def __init__(
        self,
        link: wire.Link[ToAggregator],
        sessions: Sessions,
        sink: Sink,
        wake: lifecycle.WakeUp,
        service: Service,
        events: frozenset[bytes] = frozenset(),
    ) -> None:
        self.link = link
        self.sessions = sessions
        self.merge = sessions.merge
        self.sink = sink
        self.wake = wake
        self.service = service
        self.events = events
        self.processes = Processes(sessions)
        self.readers = Readers(link)
        self.started_ns = mono_ns()
        self.parent_gone = False
        self.exit_when_idle = False
        self.watcher: Watcher | None = None
        self._gone_ns = 0
        self._noted_ns = 0

    def run(self, signals: lifecycle.StopSignals) -> None:
        """Serve until a signal, or until the parent is gone and the sources with it."""
        while not signals.count and not self._over(mono_ns()):
            self.step()
        self._stop()

    def step(self) -> None:
        """One round of the loop."""
        now = mono_ns()
        drained = self._receive(now)
        self.processes.check(now, drained)
        while self._release(now if drained else 0):
            self._acknowledge()
        self._acknowledge()
        self._answer(self.sessions.ask(now))
        self.service.beat(now)
        if self.watcher is not None and now - self._noted_ns > NOTE_NS:
            self._noted_ns = now
            self.watcher.note(self._status(0, now))
        if drained:
            self._wait()

    # -- parts of a round --------------------------------------------------------------------

    def _receive(self, now: int) -> bool:
        """Take what is there, at most RECEIVES messages; whether that was all."""
        for _ in range(RECEIVES):
            message = self.link.receive()
            if message is None:
                return True
            peer, body = message.peer, message.body
            if isinstance(body, StatusRequest):
                self._answer([(peer, self._status(body.token, now))])
            elif isinstance(body, Subscribe):
                self.readers.subscribe(peer, now)
            else:
                self._answer(self.sessions.handle(peer, message.envelope, body, now))
        return False

    def _release(self, now: int) -> bool:
        """Hand what is complete to the sink, a portion at a time; False when nothing is or the
        sink is full. `now` 0 counts nobody as silent."""
        released = None if self.sink.full else self.merge.release(now)
        if released is None:
            return False
        self._filter(released)
        block = self.sink.put(released)
        self.readers.show(block, mono_ns())
        if self.watcher is not None:
            self.watcher.feed(block)
        return True

    def _filter(self, released: Released) -> None:
        if self.events:
            released.items = [item for item in released.items if _event(item[2]) in self.events]
            released.late = [item for item in released.late if _event(item[2]) in self.events]

    def _acknowledge(self) -> None:
        latest: dict[bytes, Body] = {}
        for released in self.sink.take_written():
            latest.update(self.sessions.written(released))
        self._answer(list(latest.items()))

    def _answer(self, replies: list[Reply]) -> None:
        for peer, body in replies:
            self.link.send(body, to=peer)  # a peer that is gone gets nothing

    def _wait(self) -> None:
        timeout = 10 if self.merge.held() else 200
        if lifecycle.wait([self.link], [self.wake.fd], timeout):
            self.wake.clear()

    def _over(self, now: int) -> bool:
        """Whether there is nobody left to serve."""
        sessions = self.sessions
        idle = not sessions.by_key and not self.merge.held() and self.sink.idle
        if self.exit_when_idle and sessions.seen and idle:
            return True
        if not self.parent_gone:
            return False
        self._gone_ns = self._gone_ns or now
        grace = 100_000_000 if sessions.seen else 0  # a source may be just about to say hello
        return now - self._gone_ns > (grace if idle else ORPHAN_NS)

    def _stop(self) -> None:
        """Drain: write what is complete; what is not stays with its sources, unacknowledged."""
        self.service.stopping()
        self._receive(mono_ns())
        while self._release(mono_ns()):
            pass
        self.sink.close(SINK_CLOSE_S)
        self._acknowledge()
        farewell = Shutdown(reason="the aggregator stops", grace_ms=0)
        self._answer([(peer, farewell) for peer in list(self.sessions.by_peer)])
        self.link.close(linger_ms=200)

    def _status(self, token: int, now: int) -> StatusReply:
        sessions, oldest = self.sessions, self.merge.oldest()
        return StatusReply(
            token=token,
            role="aggregator",
            pid=os.getpid(),
            uptime_ms=(now - self.started_ns) // 1_000_000,
            pending=self.merge.held(),
            oldest_ms=0 if oldest is None else max(wall_ns() - oldest[0], 0) // 1_000_000,
            runs=tuple(sorted({key[0] for key in sessions.by_key})),
            totals={
                "sessions": len(sessions.by_key),
                "received": sessions.received,
                "late": self.merge.late_count,
                "written_bytes": self.sink.written_bytes,
                "output_refused": int(bool(self.sink.blocked_since)),
                "output_gone": int(bool(self.sink.broken)),
            }
            | {f"dropped_{reason}": count for reason, count in self.link.dropped.items()},
        )


def _event(line: bytes) -> bytes:
    """The event's name in a line as it travels: msgspec writes the tag first."""
    return line[9 : line.index(b'"', 9)]
