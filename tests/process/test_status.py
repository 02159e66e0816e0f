"""What a run says while compiles are under way: status within 100 ms, and waits that overlap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hrxmp.aggregator import reader
from hrxmp.aggregator.check import check
from hrxmp.records import CompileEnd, CompileProgress, GraphEnd, WaitEnd
from hrxmp.settings import Settings
from hrxmp.workloads.status import ask, endpoints
from tests.process.pool_fixture import PATIENCE_S, PoolProcess, quick
from tests.process.run_process import PROGRAMS, ROOT, hrxmp_run

SLOW = "tests.process.programs.slow_compiler:compile"


@pytest.fixture
def slow_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcess]:
    """A pool of two workers whose compiles take a second and end when the file `go` is there."""
    monkeypatch.setenv("HRXMP_TEST_GO", str(tmp_path / "go"))
    pool = PoolProcess(tmp_path, compiler=SLOW, workers=2, progress_s=0.5)
    pool.start()
    yield pool
    pool.stop()


def start(pool: PoolProcess) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hrxmp", "run", "--trace", "--cache", "off"]
    command += ["--pool", pool.endpoint, str(PROGRAMS / "three_kernels.py")]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HRXMP_")}
    environ = {**clean, "PYTHONPATH": str(ROOT), "HRXMP_RUNTIME_DIR": str(pool.folder)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def busy(pool: PoolProcess) -> Any:
    """The first status of the pool that shows all three jobs."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        (answer,) = ask(endpoints(Settings(pool=pool.endpoint)))
        assert answer.status is not None
        if len(answer.status.jobs) == 3 and answer.status.oldest_ms > 200:
            return answer
        time.sleep(0.02)
    raise AssertionError("three jobs were never seen at once")


def test_status_and_waits_while_kernels_compile(slow_pool: PoolProcess) -> None:
    """X33 and X11: three kernels of a second each on two workers; everything says so."""
    run = start(slow_pool)
    answer = busy(slow_pool)
    times = [busy(slow_pool).answer_ms / 1000 for _ in range(11)]
    shown = hrxmp_run("--pool", slow_pool.endpoint, "status", "-o", "json")
    (slow_pool.folder / "go").touch()
    out, err = run.communicate(timeout=300)
    assert (run.returncode, out.decode().strip()) == (0, "right"), err.decode()[-2000:]
    assert quick(times, 0.1)
    states = sorted(job.state for job in answer.status.jobs)
    assert states == ["compiling", "compiling", "queued"]
    (run_id,) = answer.status.runs
    assert {job.requests[0][:2] for job in answer.status.jobs} == {(run_id, 1)}
    (printed,) = json.loads(shown.stdout)
    assert printed["status"]["role"] == "pool" and shown.code == 0
    trace = reader.read(err.splitlines(keepends=True))
    assert check(trace).problems == []
    records = [line.record for line in trace.lines]
    compiled = sum(r.compile_ns for r in records if isinstance(r, CompileEnd))
    first, second = (r for r in records if isinstance(r, GraphEnd))
    assert compiled >= 3e9
    assert (first.compiles, first.waits >= 1, second.compiles, second.waits) == (3, True, 0, 0)
    assert first.wait_ns < compiled  # two at a time
    waits = [r for r in records if isinstance(r, WaitEnd)]
    assert {(w.exec_id, w.asked_by) for w in waits} == {(1, 1)}
    assert {w.kernel for w in waits} <= {"binary", "unary"}
    slow = [r for r in records if isinstance(r, CompileProgress)]
    assert slow and all(r.elapsed_ns >= 0.5e9 for r in slow)


def test_no_live_run_is_no_error(tmp_path: Path) -> None:
    done = hrxmp_run("status", environ={"HRXMP_RUNTIME_DIR": str(tmp_path)})
    assert (done.code, done.stdout.strip()) == (0, "no run of yours is live")


def test_a_service_that_does_not_answer_is_told(tmp_path: Path) -> None:
    """A socket file that nobody serves any more."""
    import socket

    folder = tmp_path / "hrxmp-dead"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "pool"))
    done = hrxmp_run("status", environ={"HRXMP_RUNTIME_DIR": str(tmp_path)})
    assert done.code == 1 and "no answer" in done.stdout
