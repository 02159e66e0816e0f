"""Who sends: sessions of trace sources, their numbers, acknowledgements, gaps and ends.

A pure state machine between the socket and the merge: messages and times in, answers out. A
record is acknowledged only when the sink has written it. A source that ends without goodbye gets
its open intervals closed by records of the aggregator's own, marked as made up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from hrxmp.aggregator.merge import END, Lane, Merge, Released
from hrxmp.aggregator.voice import SOURCE, Voice, closing_records
from hrxmp.clock import HybridLogicalClock, wall_ns
from hrxmp.messages import Ack, Body, Envelope, Goodbye, Heartbeat, Hello, Records, Welcome
from hrxmp.records import Lost

Reply = tuple[bytes, Body]
"""(routing id, message)."""

ASK_NS = 2_000_000
"""A lagging source is asked for its clock at most this often,"""
ASK_AGAIN_NS = 50_000_000
"""and when it does not answer, so often."""
REMEMBERED = 4096
"""Ended sessions whose last number is remembered, for a goodbye that is said twice."""

HELD_BYTES = 64 << 20
"""What all sources together may have on its way here, divided among them."""
LEAST_WINDOW, LARGEST_WINDOW = 256 << 10, 8 << 20

SourceKey = tuple[str, str, int]
"""(run, source, incarnation)."""


class Session:
    """One life of one source of one run."""

    __slots__ = (
        "asked_ns", "begin_ns", "expected", "goodbye", "host", "key", "lane", "open", "peer",
        "pid", "wanted", "written",
    )  # fmt: skip

    def __init__(self, key: SourceKey, hello: Hello, peer: bytes, lane: Lane) -> None:
        self.key = key
        self.peer = peer
        self.lane = lane
        self.pid = hello.pid
        self.host = hello.boot_id
        self.begin_ns = hello.run_begin_ns
        self.expected = hello.first_unacked_seq
        """The next record number that is wanted."""
        self.written = hello.first_unacked_seq
        """Every record below this is written."""
        self.goodbye: int | None = None
        """Number of the last record, once the source has said goodbye."""
        self.open: dict[int, bytes] = {}
        """Begin records without an end, by number."""
        self.wanted = True
        """Whether the records of this run are to be written at all."""
        self.asked_ns = 0


class Sessions:
    """All sessions, and what is to be answered to whom."""

    def __init__(
        self,
        merge: Merge,
        clock: HybridLogicalClock,
        *,
        heartbeat_ms: int,
        incarnation: int,
        host: str,
        started_ns: int,
        settle_ns: int,
        run_glob: str = "*",
        wall: Callable[[], int] = wall_ns,
    ) -> None:
        self.merge = merge
        self.clock = clock
        self.heartbeat_ms = heartbeat_ms
        self.incarnation = incarnation
        self.host = host
        self.started_ns = started_ns
        self.settle_ns = settle_ns
        self.run_glob = run_glob
        self.wall = wall
        self.by_peer: dict[bytes, Session] = {}
        self.by_key: dict[SourceKey, Session] = {}
        self.seen = 0
        self.lost = 0
        self.received = 0
        self._by_lane: dict[Lane, Session] = {}
        self._own = Lane((SOURCE, incarnation, ""), started_ns)
        self._own.leaving = True  # it holds nobody back
        merge.add(self._own)
        self._voices: OrderedDict[str, Voice] = OrderedDict()
        self._ended: OrderedDict[SourceKey, int] = OrderedDict()

    # -- messages ----------------------------------------------------------------------------

    def handle(self, peer: bytes, envelope: Envelope, body: Any, now: int) -> list[Reply]:
        """One message of a source. Everything but hello needs a session."""
        if isinstance(body, Hello):
            return self._hello(peer, envelope, body, now)
        session = self.by_peer.get(peer)
        if session is None:
            return [(peer, Heartbeat(state="unknown"))]
        match body:
            case Records():
                return self._records(session, body, now)
            case Goodbye():
                return self._goodbye(session, body.last_seq, now)
        session.lane.heard_ns = now
        return []

    def _hello(self, peer: bytes, envelope: Envelope, hello: Hello, now: int) -> list[Reply]:
        key = (envelope.run_id, envelope.source, envelope.incarnation)
        session = self.by_key.get(key)
        if session is None:
            session = self._open(key, hello, peer, now)
        else:
            self.by_peer.pop(session.peer, None)
            session.peer = peer
            session.lane.heard_ns = now
        self.by_peer[peer] = session
        welcome = Welcome(
            heartbeat_ms=self.heartbeat_ms,
            liveness=2,
            next_seq=session.expected,
            hold_back_ms=self.merge.hold_back_ns // 1_000_000,
        )
        ack = Ack(next_seq=session.written, window_bytes=self.window())
        return [(peer, welcome), (peer, ack)]

    def _open(self, key: SourceKey, hello: Hello, peer: bytes, now: int) -> Session:
        session = Session(key, hello, peer, Lane((key[1], key[2], key[0]), now))
        session.wanted = fnmatchcase(key[0], self.run_glob)
        session.expected = session.written = max(session.expected, self._ended.get(key, 0))
        if hello.resumed and now - self.started_ns < self.settle_ns:
            self.merge.settled_ns = self.started_ns + self.settle_ns
            self.merge.raise_floor(hello.floor)
            session.lane.promised = min(hello.floor, hello.mark)
        self.by_key[key] = self._by_lane[session.lane] = session
        self.merge.add(session.lane)
        self.seen += 1
        return session

    def _records(self, session: Session, records: Records, now: int) -> list[Reply]:
        items, first = records.items, records.first_seq
        end = first + len(items)
        if first - records.skipped > session.expected:
            return [(session.peer, Ack(next_seq=session.written, again=session.expected))]
        if items:
            session.open = {
                seq: session.open.get(seq) or items[seq - first][2]
                for seq in records.open
                if seq in session.open or first <= seq < end
            }
            if first < session.expected:
                items, first = items[session.expected - first :], session.expected
        self.received += len(items)
        session.expected = max(session.expected, end)
        if not session.wanted:
            session.written, items = session.expected, []
        self.merge.push(session.lane, first, items, records.mark, now)
        if records.items and not items:  # a repeat, or not wanted: nothing will be written for it
            return [(session.peer, Ack(next_seq=session.written))]
        return []

    def _goodbye(self, session: Session, last_seq: int, now: int) -> list[Reply]:
        if last_seq >= session.expected:
            return [(session.peer, Ack(next_seq=session.written, again=session.expected))]
        session.goodbye = last_seq
        self._close_intervals(session, now)
        session.lane.leaving = True
        return self._settle(session)

    # -- times and ends ----------------------------------------------------------------------

    def ask(self, now: int) -> list[Reply]:
        """Questions to the sources whose silence keeps others back."""
        replies: list[Reply] = []
        for lane in self.merge.lagging(now):
            session = self._by_lane.get(lane)
            if session is None:
                continue
            answered = lane.heard_ns > session.asked_ns
            if now - session.asked_ns >= (ASK_NS if answered else ASK_AGAIN_NS):
                session.asked_ns = now
                replies.append((session.peer, Heartbeat(state="ask")))
        return replies

    def end(self, session: Session, reason: str, now: int) -> None:
        """The source is gone without goodbye: close its intervals, say what may be missing."""
        if session.goodbye is None:
            self.say(session, Lost, None, now, of=session.key[1], first=session.expected, last=-1,
                     reason=f"gone without goodbye: {reason}")  # fmt: skip
            self._close_intervals(session, now)
        session.goodbye = session.expected - 1
        session.lane.leaving = True
        self.by_peer.pop(session.peer, None)
        session.peer = b""
        self._settle(session)

    def written(self, released: Released) -> list[Reply]:
        """The sink has these lines for good: acknowledge them."""
        replies: list[Reply] = []
        for lane, next_seq in released.until:
            session = self._by_lane.get(lane)
            if session is None:
                continue
            session.written = max(session.written, next_seq)
            done = self._settle(session)
            if not done and session.peer:
                mark = session.lane.mark
                ack = Ack(
                    next_seq=session.written,
                    floor=released.floor,
                    mark=mark,
                    window_bytes=self.window(),
                )
                done = [(session.peer, ack)]
            replies += done
        return replies

    def window(self) -> int:
        """Each source's share of what may be on its way."""
        share = HELD_BYTES // max(len(self.by_key), 1)
        return max(LEAST_WINDOW, min(share, LARGEST_WINDOW))

    def say(
        self, session: Session, record: Any, exec_id: int | None, now: int, **fields: Any
    ) -> None:
        """A record of the aggregator's own, for the run of a session."""
        run = session.key[0]
        voice = self._voices.get(run)
        if voice is None:
            voice = self._voices[run] = Voice(run, self.incarnation, now)
            while len(self._voices) > REMEMBERED:
                self._voices.popitem(last=False)
        if session.begin_ns and session.host == self.host:
            voice.begin_ns = session.begin_ns
        if session.wanted:
            line = voice.line(record, exec_id, now, fields)
            item = (*self.clock.tick(self.wall()), line)
            self.merge.push(self._own, 0, [item], END, now)

    def _close_intervals(self, session: Session, now: int) -> None:
        lines, session.open = session.open, {}
        for record, exec_id, fields in closing_records(lines.values(), session.key[1]):
            self.say(session, record, exec_id, now, **fields)

    def _settle(self, session: Session) -> list[Reply]:
        """End a session whose last record is written; the answer to its goodbye."""
        if session.goodbye is None or session.written <= session.goodbye:
            return []
        peer = session.peer
        self.by_peer.pop(peer, None)
        self.by_key.pop(session.key, None)
        del self._by_lane[session.lane]
        self.merge.remove(session.lane)
        self._ended[session.key] = session.goodbye + 1
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return [(peer, Ack(next_seq=session.goodbye + 1, ended=True))] if peer else []
