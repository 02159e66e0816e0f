"""Links: good messages arrive typed, bad ones are counted and dropped, endpoints are checked."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrxmp import wire
from hrxmp.clock import HybridLogicalClock, wall_ns
from hrxmp.errors import UsageError
from hrxmp.identity import new_identity
from hrxmp.messages import (
    MAX_BODY_BYTES,
    PROTOCOL,
    Ack,
    Envelope,
    FromAggregator,
    Heartbeat,
    Records,
    ToAggregator,
)

Pair = tuple[wire.Link[Any], wire.Link[Any]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """A ROUTER and a DEALER that are joined."""
    context = wire.context()
    endpoint = f"ipc://{tmp_path}/link"
    router = wire.Link[ToAggregator](
        wire.router(context, endpoint), ToAggregator, new_identity("r", "aggregator"),
        HybridLogicalClock(),
    )  # fmt: skip
    dealer = wire.Link[FromAggregator](
        wire.dealer(context, endpoint), FromAggregator, new_identity("r", "executor"),
        HybridLogicalClock(),
    )  # fmt: skip
    yield router, dealer
    router.close()
    dealer.close()
    context.term()


def raw(pair: Pair, *frames: bytes) -> None:
    """Put frames on the wire as they are."""
    pair[1].socket.send_multipart(frames)


def envelope(**changes: Any) -> bytes:
    """An encoded envelope."""
    fields: dict[str, Any] = {
        "protocol": PROTOCOL, "run_id": "r", "exec_id": None, "source": "executor",
        "incarnation": 1, "msg_seq": 0, "mono_ns": 1, "hlc": (1, 0),
    }  # fmt: skip
    return msgspec.msgpack.encode(Envelope(**(fields | changes)))


def received(pair: Pair) -> wire.Received[Any] | None:
    """The next message, if it is a good one."""
    pair[0].poll(60_000)
    return pair[0].receive()


def test_a_message_and_its_answer(pair: Pair) -> None:
    router, dealer = pair
    items = [(5, 1, b"line")]
    assert dealer.send(Records(first_seq=3, items=items), exec_id=9, buffers=(b"more",))
    message = received(pair)
    assert message is not None
    assert message.body == Records(first_seq=3, items=items)
    assert (message.envelope.exec_id, message.buffers) == (9, [b"more"])
    assert router.send(Ack(next_seq=4), to=message.peer, cause=message.envelope)
    assert dealer.poll(60_000)
    answer = dealer.receive()
    assert answer is not None
    assert answer.body == Ack(next_seq=4)
    assert answer.envelope.cause == ("executor", message.envelope.incarnation, 0)


def test_receiving_merges_the_clock(pair: Pair) -> None:
    router, _dealer = pair
    ahead = wall_ns() + 10**10
    raw(pair, envelope(hlc=(ahead, 7)), msgspec.msgpack.encode(Heartbeat(state="idle")))
    assert received(pair) is not None
    assert router.clock.now > (ahead, 7)


GOOD_BODY = msgspec.msgpack.encode(Heartbeat(state="idle"))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ((b"one",), "frames"),
        ((b"x",) * 12, "frames"),
        ((b"x" * 5000, GOOD_BODY), "size"),
        ((envelope(), b"x" * (MAX_BODY_BYTES + 1)), "size"),
        ((b"\xc1", GOOD_BODY), "envelope"),
        ((envelope(protocol=2), GOOD_BODY), "protocol"),
        ((envelope(), b"\x81\xa4kind\xa4nope"), "body"),
        ((envelope(), b"\x93" * 2000), "body"),
        ((envelope(hlc=(1 << 62, 0)), GOOD_BODY), "clock"),
        ((envelope(hlc=(-1, 0)), GOOD_BODY), "clock"),
    ],
)
def test_a_bad_message_is_counted_and_the_next_one_arrives(
    pair: Pair, frames: tuple[bytes, ...], reason: str
) -> None:
    raw(pair, *frames)
    raw(pair, envelope(), GOOD_BODY)
    message = received(pair)
    while message is None and pair[0].poll(60_000):
        message = pair[0].receive()
    assert message is not None
    assert pair[0].dropped == {reason: 1}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_rubbish_never_raises(pair: Pair, first: bytes, second: bytes) -> None:
    raw(pair, first, second)
    raw(pair, envelope(), GOOD_BODY)
    message = None
    while message is None:
        assert pair[0].poll(60_000)
        message = pair[0].receive()
    assert message.body == Heartbeat(state="idle")


def test_sending_to_a_stranger_is_false(pair: Pair) -> None:
    assert not pair[0].send(Ack(next_seq=0), to=b"nobody")


def test_an_immediate_dealer_queues_nothing_for_nobody(tmp_path: Path) -> None:
    context = wire.context()
    link = wire.Link[FromAggregator](
        wire.dealer(context, f"ipc://{tmp_path}/nobody", immediate=True), FromAggregator,
        new_identity("r", "executor"), HybridLogicalClock(),
    )  # fmt: skip
    assert not link.send(Heartbeat(state="idle"))
    link.close()
    context.term()


def test_the_socket_file_is_private(pair: Pair, tmp_path: Path) -> None:
    mode = (tmp_path / "link").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert mode & 0o077 == 0


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:1", "http://x", "ipc://" + "x" * 120, "inproc://x"]
)
def test_endpoints_that_are_refused(endpoint: str) -> None:
    with pytest.raises(UsageError):
        wire.check_endpoint(endpoint)


def test_a_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    context = wire.context()
    with pytest.raises(UsageError):
        wire.router(context, f"ipc://{tmp_path}/file").close()
    assert (tmp_path / "file").read_text() == "precious"
    context.destroy(0)
