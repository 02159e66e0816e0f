"""The tracer without an aggregator: stamps, numbers, bounds, and what it does to nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hrxmp import delivery, trace
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.identity import new_identity
from hrxmp.messages import (
    Ack,
    Body,
    Goodbye,
    Heartbeat,
    Hello,
    Records,
    Welcome,
)
from hrxmp.record_lines import Item, RecordLines, edge
from hrxmp.records import OPENING, Annotation, AnyRecord, GraphBegin, GraphEnd, Lost
from hrxmp.settings import Settings
from hrxmp.spool import Backlog

decode = msgspec.json.Decoder(AnyRecord).decode


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[trace.Tracer]:
    """A tracer whose delivery was not started: nothing is fetched behind the test's back."""
    made = trace.Tracer(
        new_identity("r", "executor"), HybridLogicalClock(), f"ipc://{tmp_path}/x", Settings(),
        mono_ns(), pending_records=100,
    )  # fmt: skip
    yield made
    made.close()


def items(tracer: trace.Tracer, batch: delivery.Taken) -> list[Item]:
    """What the delivery thread makes of a batch."""
    lines = RecordLines(tracer.identity, tracer.run_begin_ns)
    return [lines.item(batch.first_seq + i, note) for i, note in enumerate(batch.notes)]


def taken(tracer: trace.Tracer) -> list[Any]:
    """What is pending, decoded."""
    return [decode(b"{" + line) for _wall, _counter, line in items(tracer, tracer.take())]


def test_off_is_none_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*_args: Any) -> None:
        raise AssertionError("tracing is off")

    for name in ("mono_ns", "wall_ns", "Delivery"):
        monkeypatch.setattr(trace, name, poisoned)
    identity = new_identity("r", "executor")
    opened = trace.open_tracer(Settings(), identity, HybridLogicalClock(), "ipc:///nowhere", 0)
    assert opened is None


def test_records_are_stamped_and_numbered(tracer: trace.Tracer) -> None:
    for number in range(5):
        tracer.emit(GraphBegin, exec_id=number, uid=1, nodes=number)
    batch = tracer.take()
    made = items(tracer, batch)
    records = [decode(b"{" + line) for _w, _c, line in made]
    assert [record.seq for record in records] == list(range(5))
    assert [record.exec_id for record in records] == list(range(5))
    clocks = [(wall, counter) for wall, counter, _line in made]
    assert clocks == sorted(set(clocks))
    assert batch.mark > clocks[-1]
    times = [record.t_ns for record in records]
    assert times == sorted(times)
    assert times[0] >= 0


def test_threads_share_one_numbering(tracer: trace.Tracer) -> None:
    def emit() -> None:
        for _ in range(20):
            tracer.emit(Annotation, label="x")

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batch = tracer.take()
    made = items(tracer, batch)
    assert [decode(b"{" + line).seq for _w, _c, line in made] == list(range(80))
    assert made == sorted(made)


def test_fields_may_be_given_later(tracer: trace.Tracer) -> None:
    tracer.note(Annotation, 7, lambda: {"label": "later"})
    (record,) = taken(tracer)
    assert (record.exec_id, record.label) == (7, "later")


def test_the_delivery_thread_is_called_as_seldom_as_can_be(
    tracer: trace.Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(tracer._delivery, "wake", lambda: calls.append(1))

    def usual() -> int:
        calls.clear()
        tracer.note(GraphBegin, 1, {"uid": 1, "nodes": 1})
        return len(calls)

    def special() -> int:
        calls.clear()
        tracer.emit(Annotation, label="x")
        return len(calls)

    assert (usual(), usual()) == (1, 0)
    assert (special(), special(), usual()) == (1, 0, 0)
    assert len(tracer.take().notes) == 5
    assert usual() == 0  # it looks again by itself
    assert (special(), special()) == (1, 0)
    tracer.take()
    tracer.take()
    assert usual() == 1


def test_a_wrong_field_is_the_delivery_threads_failure(
    tracer: trace.Tracer, capfd: pytest.CaptureFixture[str]
) -> None:
    tracer.emit(Annotation, wrong=1)
    tracer.start(0.0)
    assert not tracer.close(5.0)
    assert "tracing stopped: TypeError" in capfd.readouterr().err


def test_what_does_not_fit_is_counted_and_said(tracer: trace.Tracer) -> None:
    for _ in range(300):
        tracer.emit(Annotation, label="x" * 100)
    kept = taken(tracer)
    assert 0 < len(kept) < 300
    tracer.emit(Annotation, label="again")
    lost, again = taken(tracer)
    assert isinstance(lost, Lost)
    assert (lost.of, lost.first, lost.last) == ("executor", len(kept), 299)
    assert (lost.seq, again.seq) == (300, 301)


def test_a_line_never_is_too_long(tracer: trace.Tracer) -> None:
    tracer.emit(Annotation, label='\u00e4"\\\n\ud800' * 2000)
    ((_wall, _counter, line),) = items(tracer, tracer.take())
    assert len(OPENING + line) < 3072
    assert b"\n" not in line
    assert decode(b"{" + line).label.startswith('\u00e4"\\\n')


def test_edges_follow_begin_and_end(tracer: trace.Tracer) -> None:
    tracer.emit(GraphBegin, exec_id=4, uid=1, nodes=1)
    tracer.emit(Annotation, label="between")
    counts = dict.fromkeys(
        ("program", "requests", "compiles", "joins", "disk_hits", "memory_hits",
         "driver_compiles", "failures", "waits", "wait_ns", "dur_ns"), 0)  # fmt: skip
    tracer.emit(
        GraphEnd, exec_id=4, uid=1, outcome="ok", error=None, program_hit=True,
        prepared_hit=True, replayed=True, **counts,
    )  # fmt: skip
    edges = [edge(note) for note in tracer.take().notes]
    assert edges == [("graph", 4, True), None, ("graph", 4, False)]


def batch(first: int, count: int) -> Records:
    """Records of 100 bytes."""
    return Records(first_seq=first, items=[(n, 0, b"x" * 100) for n in range(first, first + count)])


def test_backlog_spools_and_comes_back(tmp_path: Path) -> None:
    backlog = Backlog(5_000, 1 << 20, str(tmp_path))
    batches = [batch(10 * n, 10) for n in range(30)]
    assert all(backlog.put(one) for one in batches)
    assert backlog.in_memory <= 5_000
    assert backlog.in_file > 0
    assert list(tmp_path.iterdir()) == []  # the file has no name
    sent = []
    while (one := backlog.next_batch()) is not None:
        sent.append(one)
        backlog.advance()
    assert sent == batches
    backlog.rewind(145)
    assert backlog.next_batch() == batches[14]
    backlog.acknowledge(300)
    assert backlog.empty
    assert (backlog.in_memory, backlog.in_file, backlog.in_flight) == (0, 0, 0)
    backlog.close()


def test_backlog_gives_file_space_back_piece_by_piece(tmp_path: Path) -> None:
    backlog = Backlog(0, 100_000, str(tmp_path))
    count = 0
    for n in range(3000):  # far more than fits at once
        assert backlog.put(batch(10 * n, 10))
        count += 10
        backlog.acknowledge(count - 300)
    assert backlog.in_file <= 100_000
    backlog.close()


def test_backlog_refuses_what_neither_part_holds(tmp_path: Path) -> None:
    backlog = Backlog(5_000, 20_000, str(tmp_path))
    held = 0
    while backlog.put(batch(10 * held, 10)):
        held += 1
    assert not backlog.has_room
    assert backlog.unacknowledged() == 10 * held
    backlog.acknowledge(10 * held)
    assert backlog.has_room
    backlog.close()


def test_backlog_on_a_disk_that_refuses() -> None:
    backlog = Backlog(5_000, 1 << 20, "/proc/self/no-such-folder")
    held = 0
    while backlog.put(batch(10 * held, 10)):
        held += 1
    assert 0 < held < 10
    backlog.close()


def test_batches_are_cut_by_count_and_by_size() -> None:
    small = [(n, 0, b"x") for n in range(2500)]
    assert delivery._cuts(small) == [(0, 1000), (1000, 2000), (2000, 2500)]
    large = [(n, 0, b"x" * 100_000) for n in range(7)]
    assert delivery._cuts(large) == [(0, 3), (3, 6), (6, 7)]
    assert delivery._cuts([]) == []


class Aggregator:
    """A link to an aggregator that got a goodbye twice: the second finds the session ended."""

    def __init__(self) -> None:
        self.sent: list[type[Body]] = []
        self.answers: list[Body] = []

    def send(self, body: Body) -> bool:
        """Take a message; what is answered comes with the next `receive`."""
        self.sent.append(type(body))
        if isinstance(body, Hello):
            self.answers.append(Welcome(heartbeat_ms=1000, liveness=2, next_seq=0))
        elif isinstance(body, Goodbye):
            self.answers += [Ack(next_seq=1, ended=True), Heartbeat(state="unknown")]
        return True

    def receive(self) -> SimpleNamespace | None:
        """The next answer."""
        return SimpleNamespace(body=self.answers.pop(0)) if self.answers else None


def test_nothing_is_said_after_the_last_acknowledgement(
    tracer: trace.Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when a repeat is answered: hello would open a session that nobody ends."""
    made, aggregator = tracer._delivery, Aggregator()
    monkeypatch.setattr(made, "_link", aggregator, raising=False)
    monkeypatch.setattr(made, "_wait", lambda _now, _sent: None)
    tracer.emit(Annotation, label="x")
    made._closing_ns = mono_ns() + 10**12
    while not made._step(mono_ns()):
        pass
    assert aggregator.sent == [Hello, Records, Goodbye]
