"""A simulated world around the aggregator's state machines: sources, clocks, links, crashes.

Drives the real `Sessions`, `Merge` and `Backlog` with simulated time. Wall clocks are skewed and
step, messages are delayed, lost and repeated, sources join late, stop, and die, the aggregator is
killed and restarted. `World.verdict` says which promise was broken. Rules can be taken away: the
tests demand that the verdict is bad then.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import msgspec

from hrxmp.aggregator.merge import END, Merge, Released
from hrxmp.aggregator.sessions import Sessions
from hrxmp.clock import Hlc, HybridLogicalClock
from hrxmp.messages import Ack, Body, Envelope, Goodbye, Heartbeat, Hello, Records, Welcome
from hrxmp.spool import Backlog

MS = 1_000_000
EPOCH = 1_700_000_000 * 1000 * MS
HEARTBEAT = 40 * MS


class Rules(msgspec.Struct, frozen=True):
    """What can be switched: faults that must not matter, and rules whose loss must matter."""

    skew_ms: int = 200
    steps: bool = True
    loss: float = 0.02
    repeats: float = 0.02
    deaths: float = 0.1
    stops: float = 0.1
    """Share of sources that are silent for longer than the hold-back once."""
    aggregator_kills: int = 0
    hold_back_ms: int = 300
    merge_on_receive: bool = True
    merge_welcome: bool = True
    watermark: bool = True
    ack_after_write: bool = True


class Source:
    """A source of records: the protocol of `delivery`, without threads and sockets."""

    def __init__(self, world: World, index: int, begin: int) -> None:
        self.world = world
        self.name = f"source-{index:02d}"
        self.index = index
        self.chance = random.Random(world.seed * 1000 + index)
        self.offset = self.chance.randint(-1, 1) * self.chance.randrange(world.rules.skew_ms + 1)
        self.clock = HybridLogicalClock()
        self.backlog = Backlog(1 << 40, 0, "")
        self.pending: list[tuple[int, int, bytes]] = []
        self.seq = self.taken = 0
        self.life = 0
        self.welcomed = self.resumed = self.dead = self.done = self.closing = False
        self.acked = Ack(next_seq=0)
        self.until = 0
        self.silent_until = 0
        world.at(begin, self.hello)

    def wall(self) -> int:
        """This host's wall clock: skewed, and it may step."""
        if self.world.rules.steps and self.chance.random() < 0.001:
            self.offset += self.chance.randint(-50, 50)
        return EPOCH + self.world.now + self.offset * MS

    def emit(self) -> int:
        """One record; its global number in the world's log of emissions."""
        number = self.world.emitted(self.index, self.seq)
        wall, counter = self.clock.tick(self.wall())
        self.pending.append((wall, counter, b"%d" % number))
        self.seq += 1
        return number

    def hello(self) -> None:
        """Open a session, again and again until it is answered."""
        if self.dead or self.done or self.welcomed:
            return
        self.send(
            Hello(
                role="trace", pid=self.index, boot_id="", package_version="",
                first_unacked_seq=self.backlog.first_seq(self.taken), resumed=self.resumed,
                floor=self.acked.floor, mark=self.acked.mark,
            )
        )  # fmt: skip
        self.world.at(60 * MS, self.hello)

    def work(self) -> None:
        """Emit, tell another source about it, deliver; then again."""
        if self.dead or self.done or self.closing:
            return
        for _ in range(self.chance.randrange(1, 40)):
            number = self.emit()
        if self.chance.random() < 0.5:
            self.world.tell(self.world.other(self), number, self.clock.tick(self.wall()))
        self.deliver()
        if self.world.now >= self.until:
            self.closing = True
            self.goodbye()
        else:
            self.world.at(self.chance.randrange(1, 60) * MS, self.work)

    def told(self, cause: int, clock: Hlc) -> None:
        """A message of another source: what is emitted after it is its effect."""
        if self.dead or self.done or self.closing or not self.resumed:
            return
        if self.world.rules.merge_on_receive:
            self.clock.merge(clock, self.wall())
        self.world.effects.append((cause, self.emit()))

    def take(self) -> Hlc:
        """Pending records into the backlog; the promise that goes with them."""
        mark = self.clock.tick(self.wall())
        if self.pending:
            self.backlog.put(Records(first_seq=self.taken, items=self.pending, mark=mark))
            self.taken += len(self.pending)
            self.pending = []
        return mark

    def deliver(self) -> None:
        """Send all that is unsent; a heartbeat when there is nothing."""
        if not self.welcomed or self.dead or self.world.now < self.silent_until:
            return
        mark = self.take()
        if not self.backlog.unsent:
            self.send(Records(first_seq=self.taken, items=[], mark=mark))
        while (batch := self.backlog.next_batch()) is not None:
            self.send(batch)
            self.backlog.advance()

    def beat(self) -> None:
        """Periodic heartbeat."""
        if not self.dead and not self.done:
            self.deliver()
            self.world.at(HEARTBEAT, self.beat)

    def goodbye(self) -> None:
        """Say the last number until it is acknowledged."""
        if self.done or self.dead:
            return
        if self.welcomed:
            self.deliver()
            self.send(Goodbye(reason="done", last_seq=self.taken - 1))
        self.world.at(100 * MS, self.goodbye)

    def hear(self, body: Body, clock: Hlc) -> None:
        """An answer of the aggregator."""
        if self.dead or self.done:
            return
        match body:
            case Welcome():
                if self.world.rules.merge_welcome:
                    self.clock.merge(clock, self.wall())
                first, self.welcomed = not self.resumed, True
                self.resumed = True
                self.backlog.rewind(body.next_seq)
                self.deliver()
                if first:
                    self.work()
                    self.beat()
            case Ack():
                self.backlog.acknowledge(body.next_seq)
                if body.floor > self.acked.floor:
                    self.acked = body
                if body.again >= 0:
                    self.backlog.rewind(body.again)
                self.done = body.ended and body.next_seq >= self.seq
            case Heartbeat(state="unknown"):
                if self.welcomed:
                    self.welcomed = False
                    self.hello()
            case Heartbeat(state="ask"):
                self.deliver()

    def send(self, body: Body) -> None:
        """Into the network."""
        envelope = Envelope(
            protocol=1, run_id="run", exec_id=None, source=self.name, incarnation=1, msg_seq=0,
            mono_ns=0, hlc=self.clock.tick(self.wall()),
        )  # fmt: skip
        self.world.network(self, envelope, body)


class World:
    """Time, network, the aggregator's lives, and the log of what was emitted and written."""

    def __init__(self, seed: int, sources: int, duration_ms: int, rules: Rules) -> None:
        self.seed = seed
        self.rules = rules
        self.chance = random.Random(seed)
        self.now = 0
        self.duration = duration_ms * MS
        self.origin: list[tuple[int, int]] = []
        """(source, number) of each emission, by global number."""
        self.effects: list[tuple[int, int]] = []
        """Pairs of emissions: cause, effect."""
        self.output: list[tuple[int, bool, Hlc]] = []
        """(emission, late, clock) as written."""
        self.said_lost = 0
        self.life = 0
        self.down = False
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._arrival: dict[tuple[int, bool], int] = {}
        self._boot()
        self.sources = [Source(self, index, self._begin()) for index in range(sources)]
        self._plan()

    def at(self, delay: int, act: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, act))

    def run(self) -> World:
        """Until all sources are done, or far too late."""
        while self._events and self.now < self.duration * 4 + 20_000 * MS:
            self.now, _, act = heapq.heappop(self._events)
            act()
            if all(one.done or one.dead for one in self.sources) and not self.merge.held():
                break
        self._release()
        self._written_all()
        return self

    def emitted(self, source: int, seq: int) -> int:
        """Note an emission."""
        self.origin.append((source, seq))
        return len(self.origin) - 1

    def other(self, source: Source) -> Source:
        """Somebody else."""
        return self.chance.choice([one for one in self.sources if one is not source])

    def tell(self, target: Source, cause: int, clock: Hlc) -> None:
        """A message between sources."""
        self.at(self.chance.randrange(1, 20) * MS // 10, lambda: target.told(cause, clock))

    def network(self, source: Source, envelope: Envelope, body: Body) -> None:
        """Source to aggregator: in order, delayed; a batch may be lost or come twice."""
        life = self.life
        if isinstance(body, Records) and body.items and self.chance.random() < self.rules.loss:
            return
        self._later(source, True, lambda: self._arrive(life, source, envelope, body))
        if isinstance(body, Records) and self.chance.random() < self.rules.repeats:
            self._later(source, True, lambda: self._arrive(life, source, envelope, body))

    # -- the aggregator ----------------------------------------------------------------------

    def _boot(self) -> None:
        self.life += 1
        self.merge = Merge(self.rules.hold_back_ms * MS)
        if not self.rules.watermark:
            self.merge.watermark = lambda now: END  # type: ignore[method-assign]
        self.sessions = Sessions(
            self.merge, HybridLogicalClock(), heartbeat_ms=40, incarnation=self.life, host="",
            started_ns=self.now, settle_ns=400 * MS, wall=lambda: EPOCH + self.now,
        )  # fmt: skip
        self._unwritten: list[Released] = []
        self.at(5 * MS, lambda life=self.life: self._tick(life))  # type: ignore[misc]

    def _arrive(self, life: int, source: Source, envelope: Envelope, body: Body) -> None:
        if self.down or life != self.life:
            return
        self.sessions.clock.merge(envelope.hlc, EPOCH + self.now)
        peer = b"%d.%d" % (source.index, life)
        self._answer(self.sessions.handle(peer, envelope, body, self.now))
        if isinstance(body, Records) and not self.rules.ack_after_write and body.items:
            end = body.first_seq + len(body.items)
            self._answer([(peer, Ack(next_seq=end))])

    def _tick(self, life: int) -> None:
        if life != self.life or self.down:
            return
        for source in self.sources:
            session = self.sessions.by_peer.get(b"%d.%d" % (source.index, life))
            if session and source.dead and self.now - session.lane.heard_ns > 200 * MS:
                self.sessions.end(session, "died", self.now)
        self._release()
        self._answer(self.sessions.ask(self.now))
        self.at(5 * MS, lambda: self._tick(life))

    def _release(self) -> None:
        released = self.merge.release(self.now)
        if released is not None:
            self._unwritten.append(released)
            life = self.life
            self.at(self.chance.randrange(4) * MS, lambda: self._write(life))

    def _write(self, life: int) -> None:
        if life == self.life and self._unwritten and not self.down:
            released = self._unwritten.pop(0)
            self._put(released)
            self.at(MS, lambda: self._note(life, released))

    def _note(self, life: int, released: Released) -> None:
        """Acknowledge; a kill between the write and this makes repeats."""
        if life == self.life and not self.down:
            self._answer(self.sessions.written(released))

    def _written_all(self) -> None:
        while self._unwritten:
            self._put(self._unwritten.pop(0))

    def _put(self, released: Released) -> None:
        for late, items in ((True, released.late), (False, released.items)):
            for wall, counter, line in items:
                if line.isdigit():
                    self.output.append((int(line), late, (wall, counter)))
                else:
                    self.said_lost += b'"lost"' in line

    def _answer(self, replies: list[tuple[bytes, Body]]) -> None:
        for peer, body in replies:
            source = self.sources[int(peer.split(b".")[0])]
            clock = self.sessions.clock.tick(EPOCH + self.now)
            self._later(source, False, lambda s=source, b=body, c=clock: s.hear(b, c))  # type: ignore[misc]

    def _later(self, source: Source, up: bool, act: Callable[[], None]) -> None:
        """Delay, but keep the order of the link."""
        due = self.now + self.chance.randrange(1, 30) * MS // 10
        due = self._arrival[source.index, up] = max(due, self._arrival.get((source.index, up), 0))
        self.at(due - self.now, act)

    # -- faults ------------------------------------------------------------------------------

    def _begin(self) -> int:
        """Most sources begin together, some join late."""
        late = self.chance.random() < 0.3
        return self.chance.randrange(self.duration // 2) if late else self.chance.randrange(MS)

    def _plan(self) -> None:
        for source in self.sources:
            source.until = self.chance.randrange(self.duration // 2, self.duration)
            if self.chance.random() < self.rules.deaths:
                self.at(self.chance.randrange(self.duration), lambda s=source: self._die(s))  # type: ignore[misc]
            if self.chance.random() < self.rules.stops:
                self.at(self.chance.randrange(self.duration), lambda s=source: self._silence(s))  # type: ignore[misc]
        for _ in range(self.rules.aggregator_kills):
            self.at(self.chance.randrange(self.duration), self._kill)

    def _die(self, source: Source) -> None:
        source.dead = not source.done

    def _silence(self, source: Source) -> None:
        source.silent_until = self.now + self.rules.hold_back_ms * 2 * MS

    def _kill(self) -> None:
        self.down = True
        self.at(self.chance.randrange(1, 100) * MS, self._restart)

    def _restart(self) -> None:
        if self.down:
            self.down = False
            self._boot()

    # -- promises ----------------------------------------------------------------------------

    def verdict(self) -> list[str]:
        """Every broken promise, in words; empty when all are kept.

        Order is not promised when a source was silent for longer than the hold-back, the
        aggregator was killed meanwhile, and everybody who knew how far it had written has left.
        """
        first: dict[int, int] = {}
        late: set[int] = set()
        for position, (number, is_late, _clock) in enumerate(self.output):
            if first.setdefault(number, position) == position and is_late:
                late.add(number)
        broken = self._completeness(first)
        if not (self.rules.stops and self.rules.aggregator_kills):
            broken += self._order(first, late)
        silent = self.rules.stops > 0 or self.rules.aggregator_kills > 0
        if late and not silent:
            broken.append(f"{len(late)} records are late and nobody was silent")
        if not self.rules.aggregator_kills and len(first) != len(self.output):
            broken.append("a record is written twice and the aggregator lived")
        return broken

    def _completeness(self, first: dict[int, int]) -> list[str]:
        missing = [number for number in range(len(self.origin)) if number not in first]
        unexplained = [n for n in missing if not self.sources[self.origin[n][0]].dead]
        stuck = [one.name for one in self.sources if not one.done and not one.dead]
        broken = [f"{len(unexplained)} records are missing"] if unexplained else []
        return broken + ([f"{stuck} did not end"] if stuck else [])

    def _order(self, first: dict[int, int], late: set[int]) -> list[str]:
        broken = []
        wrong = [
            pair
            for pair in self.effects
            if pair[1] in first
            and not late.intersection(pair)
            and first.get(pair[0], 1 << 60) > first[pair[1]]
            and not (pair[0] not in first and self.sources[self.origin[pair[0]][0]].dead)
        ]
        if wrong:
            broken.append(f"{len(wrong)} of {len(self.effects)} effects stand before their cause")
        by_source: dict[int, int] = {}
        for number in sorted(first, key=first.__getitem__):
            source, seq = self.origin[number]
            if number not in late and seq < by_source.get(source, -1):
                broken.append(f"source {source} number {seq} stands too late")
                break
            by_source[source] = max(seq, by_source.get(source, -1))
        clocks = [self.output[position][2] for number, position in first.items()
                  if number not in late]  # fmt: skip
        if any(a > b for a, b in itertools.pairwise(clocks)):
            broken.append("not one total order by clock")
        return broken
