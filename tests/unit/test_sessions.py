"""Sessions of trace sources: numbers, acknowledgements, gaps, goodbyes, ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hrxmp import records
from hrxmp.aggregator.merge import Merge, Released
from hrxmp.aggregator.sessions import LARGEST_WINDOW, LEAST_WINDOW, Reply, Sessions
from hrxmp.aggregator.voice import Voice
from hrxmp.clock import HybridLogicalClock
from hrxmp.messages import (
    PROTOCOL,
    Ack,
    Body,
    Envelope,
    Goodbye,
    Heartbeat,
    Hello,
    Records,
    Welcome,
)

SECOND = 1_000_000_000
PEER = b"peer"


class Desk:
    """A `Sessions` and the time."""

    def __init__(self, **options: Any) -> None:
        self.merge = Merge(SECOND)
        self.sessions = Sessions(
            self.merge, HybridLogicalClock(), heartbeat_ms=100, incarnation=77, host="here",
            started_ns=0, settle_ns=0, wall=lambda: 10**9, **options,
        )  # fmt: skip
        self.now = 1

    def say(self, body: Body, peer: bytes = PEER, source: str = "executor") -> list[Reply]:
        """A message arrives."""
        envelope = Envelope(
            protocol=PROTOCOL, run_id="run", exec_id=None, source=source, incarnation=3,
            msg_seq=0, mono_ns=0, hlc=(1, 0),
        )  # fmt: skip
        return self.sessions.handle(peer, envelope, body, self.now)

    def hello(self, **fields: Any) -> Welcome:
        """A session is opened."""
        (_peer, welcome), _ack = self.say(hello(**fields))
        assert isinstance(welcome, Welcome)
        return welcome

    def write(self) -> list[Reply]:
        """Everything that can be released is written."""
        released = self.merge.release(self.now)
        return [] if released is None else self.sessions.written(released)

    def lines(self) -> list[records.AnyRecord]:
        """What is released, decoded."""
        released = self.merge.release(self.now) or Released([], [], [], (0, 0))
        decode = msgspec.json.Decoder(records.AnyRecord).decode
        return [decode(b"{" + item[2]) for item in released.late + released.items]


def hello(**fields: Any) -> Hello:
    """A hello of a trace source on this host."""
    return Hello(**({"role": "trace", "pid": 9, "boot_id": "here", "package_version": ""} | fields))


def batch(first: int, count: int, **fields: Any) -> Records:
    """Records whose clock is one above their number."""
    items = [(number + 1, 0, b"%d" % number) for number in range(first, first + count)]
    return Records(first_seq=first, items=items, mark=(first + count, 0), **fields)


def test_a_stranger_is_told_to_say_hello() -> None:
    assert Desk().say(batch(0, 1)) == [(PEER, Heartbeat(state="unknown"))]


def test_acknowledged_is_what_is_written_and_nothing_else() -> None:
    desk = Desk()
    assert desk.hello().next_seq == 0
    assert desk.say(batch(0, 5)) == []
    ((peer, ack),) = desk.write()
    assert peer == PEER
    assert isinstance(ack, Ack)
    assert (ack.next_seq, ack.again, ack.floor) == (5, -1, (5, 0))


def test_a_hole_is_asked_for_and_does_not_acknowledge() -> None:
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    assert desk.say(batch(8, 2)) == [(PEER, Ack(next_seq=0, again=5))]
    assert desk.merge.held() == 5
    assert desk.say(batch(5, 5)) == []
    assert desk.merge.held() == 10


def test_what_the_source_gave_up_is_no_hole() -> None:
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    assert desk.say(batch(8, 2, skipped=3)) == []
    ((_, ack),) = desk.write()
    assert isinstance(ack, Ack)
    assert ack.next_seq == 10


def test_a_repeat_is_not_taken_twice() -> None:
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    assert desk.say(batch(3, 4)) == []
    assert desk.merge.held() == 7
    assert desk.say(batch(0, 3)) == [(PEER, Ack(next_seq=0))]
    assert desk.merge.held() == 7


def test_a_source_that_reconnects_goes_on_where_it_was() -> None:
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    (other, welcome), (_, ack) = desk.say(hello(first_unacked_seq=0, resumed=True), peer=b"new")
    assert other == b"new"
    assert isinstance(welcome, Welcome)
    assert welcome.next_seq == 5
    assert isinstance(ack, Ack)
    assert ack.next_seq == 0
    assert desk.say(batch(5, 1), peer=PEER) == [(PEER, Heartbeat(state="unknown"))]


def test_a_source_of_a_former_life_begins_at_its_first_unacknowledged() -> None:
    assert Desk().hello(first_unacked_seq=40, resumed=True).next_seq == 40


def test_many_sources_share_what_may_be_on_its_way() -> None:
    desk = Desk()
    desk.hello()
    alone = desk.sessions.window()
    for number in range(1, 1000):
        desk.say(hello(), peer=b"%d" % number, source=f"s{number}")
    assert alone == LARGEST_WINDOW
    assert desk.sessions.window() == LEAST_WINDOW


def test_goodbye_is_answered_when_the_last_record_is_written() -> None:
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    assert desk.say(Goodbye(reason="done", last_seq=4)) == []
    assert desk.write() == [(PEER, Ack(next_seq=5, ended=True))]
    assert desk.sessions.by_key == {}
    assert desk.merge.held() == 0


def test_the_last_records_acknowledgement_is_not_the_goodbyes() -> None:
    """A source that took it for that would be gone before its goodbye is on its way."""
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    ((_peer, ack),) = desk.write()
    assert (ack.next_seq, ack.ended) == (5, False)
    reply = desk.say(Goodbye(reason="done", last_seq=4))
    assert reply == [(PEER, Ack(next_seq=5, ended=True))]


def test_goodbye_before_the_last_record_asks_for_the_rest() -> None:
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    reply = desk.say(Goodbye(reason="done", last_seq=9))
    assert reply == [(PEER, Ack(next_seq=0, again=5))]


def test_goodbye_of_a_source_that_said_nothing() -> None:
    desk = Desk()
    desk.hello()
    assert desk.say(Goodbye(reason="done", last_seq=-1)) == [(PEER, Ack(next_seq=0, ended=True))]


def test_goodbye_said_again_after_a_reconnect_is_answered_again() -> None:
    desk = Desk()
    desk.hello()
    desk.say(batch(0, 5))
    desk.say(Goodbye(reason="done", last_seq=4))
    desk.write()
    (_, welcome), _ = desk.say(hello(first_unacked_seq=0, resumed=True), peer=b"new")
    assert isinstance(welcome, Welcome)
    assert welcome.next_seq == 5
    reply = desk.say(Goodbye(reason="done", last_seq=4), peer=b"new")
    assert reply == [(b"new", Ack(next_seq=5, ended=True))]


def test_a_lagging_source_is_asked_but_not_all_the_time() -> None:
    desk = Desk()
    desk.hello()
    desk.say(hello(), peer=b"other", source="pool")
    desk.say(batch(0, 5))
    assert desk.sessions.ask(desk.now + SECOND // 2) == [(b"other", Heartbeat(state="ask"))]
    assert desk.sessions.ask(desk.now + SECOND // 2 + 10**7) == []


def begin(
    seq: int, kind: type[records.Record], exec_id: int, **fields: Any
) -> tuple[int, int, bytes]:
    """A begin record as it travels."""
    made = kind(
        run_id="run", source="executor", incarnation=3, seq=seq, t_ns=5, exec_id=exec_id, **fields
    )
    return seq, 0, msgspec.json.encode(made)[1:]


def test_a_source_that_dies_gets_its_ends() -> None:
    desk = Desk()
    desk.hello(run_begin_ns=1)
    items = [
        begin(0, records.GraphBegin, 4, uid=1, nodes=1),
        begin(1, records.GraphBegin, 5, uid=2, nodes=1),
        begin(2, records.CompileBegin, 5, request=8, kernel="k", worker="w", attempt=2, queue_ns=0),
    ]
    desk.say(Records(first_seq=0, items=items, mark=(9, 0), open=[1, 2]))
    (session,) = desk.sessions.by_key.values()
    desk.now = 1001
    desk.sessions.end(session, "process 9 ended", desk.now)
    graph4, _graph5, _compile, lost, compile_end, graph_end = desk.lines()
    assert isinstance(graph4, records.GraphBegin)
    assert isinstance(lost, records.Lost)
    assert (lost.of, lost.first, lost.last, lost.t_ns) == ("executor", 3, -1, 1000)
    assert isinstance(compile_end, records.CompileEnd)
    assert (compile_end.request, compile_end.attempt, compile_end.exec_id) == (8, 2, 5)
    assert isinstance(graph_end, records.GraphEnd)
    assert (graph_end.exec_id, graph_end.uid, graph_end.outcome) == (5, 2, "lost")
    assert [one.seq for one in (lost, compile_end, graph_end)] == [0, 1, 2]
    assert compile_end.synthetic
    assert graph_end.synthetic


def test_runs_that_are_not_wanted_are_acknowledged_and_dropped() -> None:
    desk = Desk(run_glob="other-*")
    desk.hello()
    assert desk.say(batch(0, 5)) == [(PEER, Ack(next_seq=5))]
    assert desk.merge.held() == 0
    assert desk.say(Goodbye(reason="done", last_seq=4)) == [(PEER, Ack(next_seq=5, ended=True))]


@pytest.mark.parametrize("first", [0, 3])
def test_numbers_may_begin_anywhere(first: int) -> None:
    desk = Desk()
    desk.hello(first_unacked_seq=first)
    desk.say(batch(first, 2))
    ((_, ack),) = desk.write()
    assert isinstance(ack, Ack)
    assert ack.next_seq == first + 2


def test_the_aggregators_own_time_never_goes_back() -> None:
    voice = Voice("run", 1, 1000)
    fields = {"of": "executor", "first": 0, "last": 0, "reason": "gone"}
    lines = []
    for begin in (1000, 200, 1500):
        voice.begin_ns = begin
        lines.append(msgspec.json.decode(b"{" + voice.line(records.Lost, None, 2000, fields)))
    assert [line["t_ns"] for line in lines] == [1000, 1800, 1800]
