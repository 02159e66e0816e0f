"""hrxmp-aggregator: the process that orders the records of all sources and writes them.

Owns the trace socket and one loop: receive, merge, hand to the sink, acknowledge what is written.
The logic is in `sessions` and `merge`; nothing here looks into a record. It never waits for its
reader, and it ends when its parent does, once the sources are gone and what they sent is written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from hrxmp import lifecycle, wire
from hrxmp.aggregator.merge import Merge
from hrxmp.aggregator.processes import Processes
from hrxmp.aggregator.readers import Readers
from hrxmp.aggregator.sessions import Reply, Sessions
from hrxmp.aggregator.sink import Sink
from hrxmp.clock import HybridLogicalClock, mono_ns, wall_ns
from hrxmp.delivery import host_id
from hrxmp.errors import HrxmpError
from hrxmp.identity import Identity, new_identity
from hrxmp.messages import Body, Shutdown, StatusReply, StatusRequest, Subscribe, ToAggregator
from hrxmp.notify import Service
from hrxmp.settings import Settings

RECEIVES = 64
"""Messages a round: bounds the time until the next release and status reply."""
SETTLE_NS = 600_000_000
"""After a restart, sources of the former life get so long to come back."""
ORPHAN_NS = 3_000_000_000
"""With the parent gone, sources get so long to end."""
SINK_CLOSE_S = 5.0


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
        self._gone_ns = 0

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
        self._release(now if drained else 0)
        self._acknowledge()
        self._answer(self.sessions.ask(now))
        self.service.beat(now)
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

    def _release(self, now: int) -> None:
        """Hand what is complete to the sink; `now` 0 counts nobody as silent."""
        if self.sink.full:
            return
        released = self.merge.release(now)
        if released is None:
            return
        if self.events:
            released.items = [item for item in released.items if _event(item[2]) in self.events]
            released.late = [item for item in released.late if _event(item[2]) in self.events]
        self.readers.show(self.sink.put(released), mono_ns())

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
        self._release(mono_ns())
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


def parser() -> argparse.ArgumentParser:
    """The command line of the daemon."""
    line = argparse.ArgumentParser(
        prog="hrxmp-aggregator", description="Order the trace records of many runs into one stream."
    )
    line.add_argument("--bind", required=True, metavar="ENDPOINT", help="ipc://PATH or tcp://…")
    line.add_argument("--group", action="store_true", help="the group may connect, not only me")
    line.add_argument("--output", default="-", metavar="FILE", help="append to FILE; - is stderr")
    line.add_argument("--run", default="*", metavar="GLOB", help="only runs whose id matches")
    line.add_argument("--event", nargs="*", default=[], metavar="NAME", help="only these events")
    line.add_argument("--hold-back-ms", type=int, help="longest wait for a silent source")
    line.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    line.add_argument("--parent-fd", type=int, default=-1, help=argparse.SUPPRESS)
    line.add_argument("--exit-when-idle", action="store_true", help="end with the last source")
    return line


def main(argv: list[str] | None = None) -> int:
    """Run the daemon; the exit code."""
    options = parser().parse_args(argv)
    environment: Mapping[str, str] = os.environ
    try:
        settings = Settings.from_environment(environment)
        return _serve(options, settings, Service(environment))
    except HrxmpError as error:
        sys.stderr.write(f"hrxmp-aggregator: {error}\n")
        return 2


def _serve(options: argparse.Namespace, settings: Settings, service: Service) -> int:
    wake = lifecycle.WakeUp()
    signals = lifecycle.StopSignals(wake)
    signals.install()
    identity = new_identity("-", "aggregator")
    clock = HybridLogicalClock()
    context = wire.context()
    link = wire.Link[ToAggregator](
        wire.router(context, options.bind, settings.curve_dir, group=options.group),
        ToAggregator,
        identity,
        clock,
    )
    hold_back_ms = settings.hold_back_ms if options.hold_back_ms is None else options.hold_back_ms
    sessions = _sessions(identity, clock, hold_back_ms, options.run)
    sink = Sink(_output(options.output), wake.set)
    events = frozenset(name.encode() for name in options.event)
    aggregator = Aggregator(link, sessions, sink, wake, service, events)
    aggregator.exit_when_idle = options.exit_when_idle

    def parent_gone() -> None:
        aggregator.parent_gone = True
        wake.set()

    lifecycle.arm_parent_watch(options.parent_fd, parent_gone)
    lifecycle.notify_ready(options.ready_fd)
    service.ready()
    aggregator.run(signals)
    context.term()
    return 0


def _sessions(
    identity: Identity, clock: HybridLogicalClock, hold_back_ms: int, run_glob: str
) -> Sessions:
    return Sessions(
        Merge(hold_back_ms * 1_000_000),
        clock,
        heartbeat_ms=max(min(hold_back_ms // 4, 250), 20),
        incarnation=identity.incarnation,
        host=host_id(),
        started_ns=mono_ns(),
        settle_ns=SETTLE_NS,
        run_glob=run_glob,
    )


def _output(path: str) -> int:
    """The descriptor to write to; a file is private and appended to."""
    if path == "-":
        return 2
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


if __name__ == "__main__":
    sys.exit(main())
