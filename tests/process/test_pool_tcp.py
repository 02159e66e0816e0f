"""tcp between boxes: CURVE keys are needed, and peers without a known key are refused."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from hrxmp import wire
from hrxmp.aggregator.check import check
from hrxmp.aggregator.reader import read
from hrxmp.errors import UsageError
from hrxmp.settings import Settings
from hrxmp.supervise import spawn
from hrxmp.workloads.keygen import main as keygen
from tests.process.pool_fixture import PoolProcess, make_request, outcome, running_pool
from tests.process.run_process import PROGRAMS, hrxmp_run


def keys(folder: Path) -> Path:
    assert keygen([str(folder)], Settings()) == 0
    return folder


def free_endpoint() -> str:
    """On a loopback address that no other process of these tests uses, where it stays free."""
    pid = os.getpid()
    host = f"127.{1 + (pid >> 16) % 250}.{pid >> 8 & 255}.{pid & 255 or 1}"
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def stranger(pool: PoolProcess, folder: Path, patience_s: float = 1.0) -> str:
    """The outcome for a client that has the keys in `folder`."""
    other = PoolProcess(pool.folder, curve_dir=str(folder), pool_timeout_s=patience_s)
    other.endpoint = pool.endpoint
    client = other.client()
    found = outcome(client.request(make_request(n=1), 1))
    client.close()
    return found.outcome if found.error else "ok"


def test_only_known_keys_are_let_in(tmp_path: Path) -> None:
    mine = keys(tmp_path / "mine")
    with running_pool(endpoint=free_endpoint(), curve_dir=str(mine)) as pool:
        client = pool.client()
        assert outcome(client.request(make_request(n=1), 1)).error is None
        client.close()
        thief = keys(tmp_path / "thief")  # knows the server's public key, has a key of its own
        shutil.copy(mine / "server.key", thief / "server.key")
        assert stranger(pool, thief) == "lost"
        assert stranger(pool, keys(tmp_path / "foreign")) == "lost"
        assert stranger(pool, mine, patience_s=30.0) == "ok"


def test_without_a_doorkeeper_nobody_is_let_in(tmp_path: Path) -> None:
    """A service that forgot it must fail closed."""
    mine, endpoint = keys(tmp_path / "mine"), free_endpoint()
    context = wire.context()
    server = wire.router(context, endpoint, str(mine))
    client = wire.dealer(context, endpoint, str(mine))
    client.send(b"hello")
    assert not server.poll(500)
    for one in (server, client):
        one.close()
    context.term()


def test_tcp_without_keys_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keygen"):
        wire.check_endpoint("tcp://127.0.0.1:5555")
    context = wire.context()
    with pytest.raises(UsageError, match="keygen"):
        wire.dealer(context, "tcp://127.0.0.1:5555", str(tmp_path))
    context.term()


def test_keys_are_private_and_never_replaced(tmp_path: Path) -> None:
    mine = keys(tmp_path / "mine")
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    for path in mine.rglob("*.key*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="already"):
        keygen([str(mine)], Settings())
    (mine / "client.key_secret").chmod(0o644)
    context = wire.context()
    with pytest.raises(UsageError, match="read by other users"):
        wire.dealer(context, "tcp://127.0.0.1:5555", str(mine))
    context.term()


def test_a_whole_run_over_tcp(tmp_path: Path) -> None:
    """Aggregator and pool on tcp endpoints, as on another box; the trace comes out whole."""
    mine, trace = keys(tmp_path / "mine"), tmp_path / "trace.jsonl"
    environ = {"HRXMP_CURVE_DIR": str(mine)}
    endpoint = free_endpoint()
    aggregator = spawn(
        "aggregator", ["--bind", endpoint, "--output", str(trace)], name="aggregator",
        environ={**os.environ, **environ},
    )  # fmt: skip
    aggregator.wait_ready(60)
    with running_pool(
        endpoint=free_endpoint(), curve_dir=str(mine), compiler="", trace_compile=True
    ) as pool:
        done = hrxmp_run(
            "--trace", "--aggregator", endpoint, "--pool", pool.endpoint,
            PROGRAMS / "backend_cases.py", "add_f32", cache=tmp_path / "store", environ=environ,
        )  # fmt: skip
        assert done.code == 0, done.stderr[-2000:]
        pool.stop()
    aggregator.stop(60.0)
    aggregator.close()
    report = check(read(trace.read_bytes().splitlines()))
    assert report.problems == []
    assert report.requests >= 1
