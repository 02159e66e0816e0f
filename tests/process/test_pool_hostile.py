"""Hostile and broken peers on the pool's sockets: others are served on, and nothing is believed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hrxmp import lifecycle
from hrxmp.clock import mono_ns, wall_ns
from hrxmp.messages import PROTOCOL, Envelope, Hello, JobDone, StatusRequest
from tests.process.pool_fixture import (
    PATIENCE_S,
    PoolProcess,
    make_request,
    outcome,
    quick,
    running_pool,
)

PATIENCE_MS = int(PATIENCE_S * 1000)


@contextmanager
def peer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A raw DEALER that may send anything."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def envelope(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL, "run_id": "evil", "exec_id": None, "source": "executor",
        "incarnation": 1, "msg_seq": 0, "mono_ns": mono_ns(), "hlc": (wall_ns(), 0),
    }  # fmt: skip
    return msgspec.msgpack.encode(Envelope(**{**fields, **changes}))


def body(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def hello(pid: int = 0) -> Hello:
    return Hello(role="executor", pid=pid, boot_id=lifecycle.boot_id(), package_version="")


def heard(evil: zmq.Socket[bytes]) -> list[str]:
    """Wait until the pool has taken all that this peer sent; the kinds of what it answered."""
    evil.send_multipart([envelope(), body(StatusRequest(token=9))])
    kinds = []
    while not kinds or kinds[-1] != "status_reply":
        kinds.append(msgspec.msgpack.decode(evil.recv_multipart()[1])["kind"])
    return kinds


def works(pool: PoolProcess) -> None:
    """Another client is served, with a compile and not only from the store."""
    client = pool.client()
    found = outcome(client.request(make_request(n=random.randrange(1 << 40)), 1))
    assert (found.error, found.via) == (None, "compile")
    client.close()


def dropped(pool: PoolProcess) -> dict[str, int]:
    totals = pool.status()[0].totals
    return {name: count for name, count in totals.items() if name.startswith("dropped_")}


def test_garbage_is_counted_and_dropped() -> None:
    good = envelope()
    messages = [
        [b""], [b"\xff" * 100], [good], [good, b"\xc1"], [good, b""], [b"", b""], [good] * 11,
        [b"x" * 5000, body(hello())], [envelope(protocol=99), body(hello())],
        [envelope(hlc=(wall_ns() + 10**15, 0)), body(hello())],
        [envelope(hlc=(-5, 0)), body(hello())], [good, body({"kind": "no_such_kind"})],
        [good, body({"kind": "hello"})], [good, b"\x91" * 5000],
        [good, body({"kind": "compile_request", "request_id": "seven"})],
    ]  # fmt: skip
    with running_pool() as pool:
        with peer(pool.endpoint) as evil:
            for frames in messages:
                evil.send_multipart(frames)
            heard(evil)
            works(pool)
        counts = dropped(pool)
        assert sum(counts.values()) >= len(messages) - 1
        assert counts["dropped_protocol"] == 1
        assert counts["dropped_clock"] == 2
        assert pool.child is not None
        assert pool.child.poll() is None


def test_random_bytes_and_mangled_messages_do_no_harm() -> None:
    chance = random.Random(7)
    request = body(make_request(n=1))
    with running_pool() as pool, peer(pool.endpoint) as evil:
        evil.send_multipart([envelope(), body(hello())])
        for _ in range(2000):
            frames = [envelope(), request]
            which = chance.randrange(2)
            mangled = bytearray(frames[which])
            for _ in range(chance.randrange(1, 6)):
                mangled[chance.randrange(len(mangled))] = chance.randrange(256)
            frames[which] = bytes(mangled[: chance.randrange(len(mangled) + 1)])
            evil.send_multipart(frames)
        heard(evil)
        works(pool)
        assert sum(dropped(pool).values()) > 500


def test_a_message_that_is_too_large_costs_its_sender_the_connection() -> None:
    with running_pool() as pool:
        with peer(pool.endpoint) as evil:
            evil.send_multipart([envelope(), b"x" * (65 << 20)])
            works(pool)
        with peer(pool.endpoint) as evil:
            evil.send_multipart([envelope(), b"x" * (5 << 20)])
            evil.send_multipart([envelope(), body(StatusRequest(token=3))])
            assert evil.recv_multipart()
            assert dropped(pool)["dropped_size"] == 1


def test_a_request_without_hello_is_told_to_say_hello() -> None:
    with running_pool() as pool, peer(pool.endpoint) as evil:
        evil.send_multipart([envelope(), body(make_request(n=1))])
        answer = msgspec.msgpack.decode(evil.recv_multipart()[1])
        assert (answer["kind"], answer["state"]) == ("heartbeat", "unknown")
        assert pool.status()[0].totals["requests"] == 0


def test_a_key_that_is_not_the_digest_gets_no_job() -> None:
    """Otherwise one run could plant a binary under another's key."""
    with running_pool() as pool:
        client = pool.client()
        planted = msgspec.structs.replace(make_request(n=1), key=make_request(n=2).key)
        found = outcome(client.request(planted, 1))
        assert (found.outcome, found.compiler_started) == ("setup", False)
        assert outcome(client.request(make_request(n=2), 1)).binary.endswith(b"n=2) local 1")
        client.close()


@pytest.mark.parametrize("kind", ["good", "bad"])
def test_a_flood_leaves_status_and_others_in_time(kind: str) -> None:
    with running_pool() as pool:
        stop = threading.Event()

        def flood() -> None:
            with peer(pool.endpoint) as evil:
                evil.send_multipart([envelope(), body(hello())])
                frames = [envelope(), body({"kind": "heartbeat", "state": "x" * 200})]
                frames = frames if kind == "good" else [b"garbage"] * 3
                while not stop.is_set():
                    evil.send_multipart(frames)

        attacker = threading.Thread(target=flood)
        attacker.start()
        try:
            for _ in range(3):
                works(pool)
            assert quick([pool.status()[1] for _ in range(11)], 0.5)
        finally:
            stop.set()
            attacker.join()


def test_a_peer_that_never_reads_does_not_stop_the_pool() -> None:
    with running_pool() as pool, peer(pool.endpoint) as evil:
        evil.setsockopt(zmq.RCVHWM, 1)
        evil.send_multipart([envelope(), body(hello(os.getpid()))])
        large = make_request(n=1, do="large", arg=str(1 << 20))
        for request_id in range(10_000, 10_100):
            again = msgspec.structs.replace(large, request_id=request_id)
            evil.send_multipart([envelope(), body(again)])
        works(pool)


def test_one_connection_is_one_executor_and_opens_only_so_much(tmp_path: Path) -> None:
    """Neither hellos under ever new names nor endless requests eat descriptors or memory."""
    with running_pool(workers=1) as pool, peer(pool.endpoint) as evil:
        for life in range(300):
            evil.send_multipart([envelope(incarnation=life + 1), body(hello(os.getpid()))])
        template = make_request(do="wait_file", arg=str(tmp_path / "go"))
        for n in range(5000):
            request = msgspec.structs.replace(template, request_id=n)
            evil.send_multipart([envelope(), body(request)])
        reply = pool.until(lambda r: r.totals["requests"] >= 4096)
        assert pool.status()[0].totals["requests"] == 4096
        assert reply.runs == ("evil",)
        assert len(os.listdir(f"/proc/{pool.pid}/fd")) < 60
        (tmp_path / "go").touch()
        pool.until(lambda r: r.pending == 0)


def test_replayed_requests_are_answered_once_each(tmp_path: Path) -> None:
    """The same messages again and again: one job, one accepted request."""
    go = tmp_path / "go"
    with running_pool() as pool, peer(pool.endpoint) as evil:
        frames = [envelope(), body(make_request(n=1, do="wait_file", arg=str(go)))]
        evil.send_multipart([envelope(), body(hello())])
        for _ in range(50):
            evil.send_multipart(frames)
        kinds = heard(evil)
        go.touch()
        while kinds[-1] != "compile_done":
            kinds.append(msgspec.msgpack.decode(evil.recv_multipart()[1])["kind"])
        totals = pool.status()[0].totals
        assert (totals["requests"], totals["compiles"]) == (1, 1)
        assert kinds.count("compile_done") == 1


def test_nobody_can_speak_for_a_worker(tmp_path: Path) -> None:
    """Results count from the connection that said hello with the started process's id."""
    go = tmp_path / "go"
    with running_pool(workers=1) as pool:
        client = pool.client()
        ticket = client.request(make_request(do="wait_file", arg=str(go)), 1)
        pool.until(lambda r: any(w.state == "busy" for w in r.workers))
        (work,) = pool.folder.glob("hrxmp-*/work")
        with peer(f"ipc://{work}") as evil:
            done = JobDone(
                job_id=1, compile_ns=1, create_ns=1, launch_ns=1, read_ns=1, binary_kind="evil",
                log="",
            )  # fmt: skip
            liar = Hello(role="worker", pid=os.getpid(), boot_id="", package_version="")
            head = envelope(source="worker-1")
            evil.send_multipart([head, body(done), b"poison"])
            evil.send_multipart([head, body(liar)])
            answer = msgspec.msgpack.decode(evil.recv_multipart()[1])
            assert answer["kind"] == "shutdown"
            evil.send_multipart([head, body(done), b"poison"])
            evil.send_multipart([head, body(liar)])
            assert evil.recv_multipart()  # so the poison was looked at
            go.touch()
            assert outcome(ticket).binary.startswith(b"binary of")
        client.close()


def test_a_client_believes_no_answer_of_an_unknown_pool_and_survives_rubbish() -> None:
    """The other direction: a fake pool on the endpoint."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="hrxmp-t-") as folder:
        pool = PoolProcess(Path(folder), pool_timeout_s=1.0)
        context = zmq.Context()
        fake = context.socket(zmq.ROUTER)
        fake.setsockopt(zmq.LINGER, 0)
        fake.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        fake.bind(pool.endpoint)
        client = pool.client()
        ticket = client.request(make_request(n=1), 1)
        who, *_ = fake.recv_multipart()
        for frames in ([b"\xff"], [envelope(), b"\xc1"], [envelope(protocol=9), b""]):
            fake.send_multipart([who, *frames])
        done = {"kind": "compile_done", "request_id": ticket.body.request_id, "worker": "w",
                "attempt": 1, "binary_kind": "x", "binary_bytes": 3, "compile_ns": 0,
                "finish_ns": 0, "log": ""}  # fmt: skip
        fake.send_multipart([who, envelope(), body(done), b"abc"])  # before any welcome
        assert outcome(ticket).error.code == "pool-lost"
        client.close()
        fake.close()
        context.term()


def test_the_sockets_are_private() -> None:
    with running_pool() as pool:
        client = pool.client()
        assert outcome(client.request(make_request(n=1), 1)).error is None
        (work,) = pool.folder.glob("hrxmp-*/work")
        for path in (pool.folder / "pool", work):
            assert path.lstat().st_mode & 0o177 == 0
        for folder in (pool.folder, work.parent):
            assert folder.stat().st_mode & 0o077 == 0
        client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_can_neither_read_nor_inject() -> None:
    import subprocess
    import sys

    program = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try:\n"
        "    s.connect(sys.argv[1])\n"
        "except PermissionError:\n"
        "    print('refused')\n"
        "else:\n"
        "    print('connected')\n"
    )
    with running_pool() as pool:
        pool.folder.chmod(0o755)  # even when the folder lets them look, the socket does not
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-I", "-c", program,
             str(pool.folder / "pool")],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"this interpreter cannot run as another user: {done.stderr[-200:]}")
        assert done.stdout == "refused\n"
        works(pool)
