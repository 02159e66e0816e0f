"""The sink writes whole lines, whatever the descriptor does to it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hrxmp.aggregator.merge import Item, Released
from hrxmp.aggregator.sink import QUEUE_BYTES, Sink, lines_of, mend_tail
from hrxmp.records import OPENING


def released(count: int, size: int = 300, late: int = 0) -> Released:
    """So many records, the first ones late."""
    items: list[Item] = [(n, 0, b'"n":%06d%s}' % (n, b"x" * size)) for n in range(count)]
    return Released(items[:late], items[late:], [], (count, 0))


class Done:
    """Counts what was written."""

    def __init__(self) -> None:
        self.event = threading.Condition()
        self.count = 0

    def __call__(self) -> None:
        with self.event:
            self.count += 1
            self.event.notify_all()

    def wait(self, count: int) -> bool:
        with self.event:
            return self.event.wait_for(lambda: self.count >= count, 60)


def test_lines_and_late_lines() -> None:
    assert lines_of(released(3, 1, late=1)) == (
        OPENING + b'"late":true,"n":000000x}\n'
        + OPENING + b'"n":000001x}\n'
        + OPENING + b'"n":000002x}\n'
    )  # fmt: skip


def test_a_file_gets_all_lines_and_the_writer_is_told(tmp_path: Path) -> None:
    done = Done()
    with open(tmp_path / "out", "ab") as file:
        sink = Sink(file.fileno(), done)
        first, second = released(5000), released(10)
        sink.put(first)
        sink.put(second)
        assert done.wait(2)
        assert sink.take_written() == [first, second]
        assert sink.close(60)
    assert (tmp_path / "out").read_bytes() == lines_of(first) + lines_of(second)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_pipe_that_others_write_to_has_only_whole_lines(non_blocking: bool) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, not non_blocking)
    done = Done()
    sink = Sink(write_end, done)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            try:
                os.write(write_end, b"chatter " * 20 + b"\n")
            except BlockingIOError:
                stop.wait(0.001)

    lines: list[bytes] = []

    def read() -> None:
        with os.fdopen(read_end, "rb") as pipe:
            lines.extend(pipe)

    reader = threading.Thread(target=read)
    other = threading.Thread(target=chatter)
    reader.start()
    other.start()
    sink.put(released(3000, 700))
    assert done.wait(1)
    stop.set()
    other.join()
    sink.close(60)
    os.close(write_end)
    reader.join()
    ours = [line for line in lines if line.startswith(OPENING)]
    assert b"".join(ours) == lines_of(released(3000, 700))
    assert {line for line in lines if not line.startswith(OPENING)} <= {b"chatter " * 20 + b"\n"}
    assert len(lines) > len(ours)


def test_a_reader_that_stops_fills_the_queue_and_nothing_is_reported_written() -> None:
    read_end, write_end = os.pipe()
    done = Done()
    sink = Sink(write_end, done)
    while not sink.full:
        sink.put(released(4000))
    assert sink.take_written() == []
    received = bytearray()

    def read() -> None:
        while chunk := os.read(read_end, 1 << 20):
            received.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    assert sink.close(60)
    os.close(write_end)
    reader.join()
    os.close(read_end)
    assert len(received) > QUEUE_BYTES
    assert received.endswith(b"}\n")
    assert sink.idle is False
    assert len(sink.take_written()) == done.count


def test_a_reader_that_is_gone_ends_the_writing_only() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = Done()
    sink = Sink(write_end, done)
    sink.put(released(10))
    assert done.wait(1)
    assert sink.broken
    assert len(sink.take_written()) == 1
    sink.close(60)
    os.close(write_end)


def test_a_full_disk_is_waited_for() -> None:
    """/dev/full refuses every write as a full disk does."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    done = Done()
    sink = Sink(descriptor, done)
    sink.put(released(10))
    waiting = threading.Event()
    while not sink.blocked_since:
        waiting.wait(0.01)
    assert sink.take_written() == []
    assert sink.broken == ""
    assert sink.close(60)  # at the end it gives up, and says why
    assert "space" in sink.broken
    os.close(descriptor)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (OPENING + b'"a":1}\n', OPENING + b'"a":1}\n'),
        (OPENING + b'"a":1}\n' + OPENING + b'"b":', OPENING + b'"a":1}\n'),
        (OPENING + b'"a":1}\n{"hrx', OPENING + b'"a":1}\n'),
        (b"half a warning", b"half a warning\n"),
    ],
)
def test_half_a_record_of_a_predecessor_is_cut_off(
    tmp_path: Path, before: bytes, after: bytes
) -> None:
    path = tmp_path / "out"
    path.write_bytes(before)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    mend_tail(descriptor)
    os.close(descriptor)
    assert path.read_bytes() == after
