"""The pool under faults, with real processes: FAULTS X01 to X12, and what goes with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process.pool_fixture import (
    PATIENCE_S,
    PoolProcess,
    alive,
    allowed,
    descendants_named,
    gone_within,
    make_request,
    outcome,
    quick,
    running_pool,
)


def runs_of(log: Path) -> list[str]:
    """One line for each time that the compiler ran."""
    return log.read_text().splitlines() if log.exists() else []


def worker_pids(pool: PoolProcess, state: str = "busy", count: int = 1) -> list[int]:
    reply = pool.until(lambda r: sum(w.state.startswith(state) for w in r.workers) >= count)
    return [w.pid for w in reply.workers if w.state.startswith(state)]


def test_x01_a_killed_worker_costs_one_retry_and_nobody_else(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running_pool(workers=4) as pool:
        client = pool.client()
        tickets = [
            client.request(make_request(n=n, do="wait_file", arg=str(go)), n) for n in range(4)
        ]
        pids = worker_pids(pool, count=4)
        os.kill(pids[0], signal.SIGKILL)
        start = time.monotonic()
        pool.until(lambda r: sum(w.state == "busy" for w in r.workers) == 4 and pids[0] not in
                   [w.pid for w in r.workers])  # fmt: skip
        assert time.monotonic() - start < allowed(2.0)
        go.touch()
        found = [outcome(ticket) for ticket in tickets]
        assert [o.error for o in found] == [None] * 4
        assert sorted(o.attempt for o in found) == [1, 1, 1, 2]
        client.close()


def test_x01_killed_twice_is_a_crash_with_pid_and_signal() -> None:
    with running_pool(workers=1) as pool:
        client = pool.client()
        ticket = client.request(make_request(do="sleep", arg="30"), 1)
        pids = []
        for _ in range(2):
            pids += worker_pids(pool)
            os.kill(pids[-1], signal.SIGKILL)
            pool.until(lambda r, pid=pids[-1]: pid not in [w.pid for w in r.workers])
        found = outcome(ticket)
        assert found.outcome == "crash"
        assert found.attempt == 2
        assert str(pids[-1]) in found.error.message
        assert "SIGKILL" in found.error.message
        client.close()


def test_x02_a_killed_pool_is_replaced_and_every_waiter_answered(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running_pool(workers=2) as pool:
        client = pool.client()
        tickets = [
            client.request(make_request(n=n, do="wait_file", arg=str(go)), n) for n in range(5)
        ]
        old = worker_pids(pool, count=2)
        pool.kill()
        start = time.monotonic()
        assert gone_within(old, 3.0)
        go.touch()
        pool.start()
        assert [outcome(ticket).error for ticket in tickets] == [None] * 5
        assert time.monotonic() - start < allowed(5.0)
        assert client.reconnections == 1
        client.close()


def test_x02_without_a_new_pool_every_waiter_gets_an_error() -> None:
    with running_pool(pool_timeout_s=4.0) as pool:
        client = pool.client()
        tickets = [client.request(make_request(n=n, do="sleep", arg="30"), n) for n in range(3)]
        worker_pids(pool)
        pool.kill()
        for ticket in tickets:
            found = outcome(ticket)
            assert found.error.code == "pool-lost"
            assert "--sync-jit" in str(found.error)
        pool.start()
        assert outcome(client.request(make_request(n=9), 1)).error is None
        client.close()


def test_a_client_without_any_pool_gets_an_error_and_ends(tmp_path: Path) -> None:
    pool = PoolProcess(tmp_path, pool_timeout_s=0.5)
    client = pool.client()
    assert outcome(client.request(make_request(), 1)).error.code == "pool-lost"
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < allowed(2)
    assert outcome(client.request(make_request(), 1)).error.code == "pool-lost"


def test_closing_a_client_resolves_what_is_open() -> None:
    with running_pool() as pool:
        client = pool.client()
        ticket = client.request(make_request(do="sleep", arg="30"), 1)
        worker_pids(pool)
        client.close()
        assert outcome(ticket).error.code == "pool-lost"
        pool.until(lambda r: r.runs == ())


@pytest.mark.parametrize("delay_ms", [0, 5, 15, 30, 50])
def test_x04_a_worker_that_still_imports_goes_with_its_parent(delay_ms: int) -> None:
    """The parent here is a process of its own that starts one worker and says its pid."""
    program = (
        "import os, sys, time\n"
        "from hrxmp.supervise import spawn\n"
        "args = ['--endpoint', 'ipc:///nowhere', '--run', 'r', '--name', 'w']\n"
        "args += ['--scratch', '/tmp']\n"
        "child = spawn('worker', args, name='w', environ=os.environ)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(delay_ms / 1000)  # the point of the test: die at some moment of the child's start
    parent.kill()
    parent.wait(PATIENCE_S)
    parent.stdout.close()
    assert gone_within([pid], 3.0)


@pytest.mark.parametrize(("act", "name"), [("abort", "SIGABRT"), ("segfault", "SIGSEGV")])
def test_x07_a_crashing_compiler_runs_twice_in_all(act: str, name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_pool() as pool:
        client = pool.client()
        found = [outcome(client.request(make_request(do=act, log=str(log)), n)) for n in range(8)]
        assert len(runs_of(log)) == 2
        assert [o.outcome for o in found] == ["crash"] * 8
        assert name in found[0].error.message
        assert [o.via for o in found] == ["compile", *["quarantine"] * 7]
        assert quick([(o.done_ns - o.asked_ns) / 1e9 for o in found[2:]], 0.05)
        assert outcome(client.request(make_request(n=1), 5)).error is None
        client.close()


def test_x07_the_last_words_of_a_compiler_reach_the_error() -> None:
    with running_pool() as pool:
        client = pool.client()
        found = outcome(client.request(make_request(do="abort"), 1))
        assert "lost its mind" in found.error.message
        client.close()


def test_a_crash_of_the_first_worker_only_is_mended_by_the_second(tmp_path: Path) -> None:
    with running_pool() as pool:
        client = pool.client()
        once = str(tmp_path / "once")
        found = outcome(client.request(make_request(do="abort", once=once), 1))
        assert (found.error, found.attempt) == (None, 2)
        client.close()


def test_x08_a_spinning_compiler_is_a_timeout_in_four_seconds() -> None:
    with running_pool(job_timeout_s=2.0) as pool:
        client = pool.client()
        start = time.monotonic()
        ticket = client.request(make_request(do="spin"), 1)
        first = worker_pids(pool)
        found = outcome(ticket)
        assert time.monotonic() - start < allowed(4.0)
        assert found.outcome == "timeout"
        assert gone_within(first, 1.0)
        assert outcome(client.request(make_request(n=2), 2)).error is None
        client.close()


def test_a_deadline_of_the_request_itself_and_a_stopped_worker() -> None:
    """A process that was stopped does not even take a SIGTERM; the deadline still holds."""
    with running_pool() as pool:
        client = pool.client()
        start = time.monotonic()
        found = outcome(client.request(make_request(do="stop", deadline_ms=600), 1))
        assert found.outcome == "timeout"
        assert time.monotonic() - start < allowed(3.0)
        client.close()


def test_x09_a_compiler_that_eats_memory_is_stopped() -> None:
    with running_pool(job_memory_mb=150) as pool:
        client = pool.client()
        found = outcome(client.request(make_request(do="allocate", arg="2000"), 1))
        assert found.outcome == "memory"
        assert "the limit is 150 MB" in found.error.message
        taken = int(found.error.message.split("took ")[1].split()[0])
        assert taken < 600  # it was stopped on its way, not at its end
        assert outcome(client.request(make_request(n=2), 2)).error is None
        client.close()


def test_x10_late_heartbeats_kill_nobody_and_are_counted(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running_pool(workers=1) as pool:
        client = pool.client()
        ticket = client.request(make_request(do="wait_file", arg=str(go)), 1)
        (pid,) = worker_pids(pool)
        os.kill(pid, signal.SIGSTOP)  # it gets no time at all
        reply = pool.until(lambda r: any("late" in w.state for w in r.workers))
        assert reply.totals["late_heartbeats"] >= 1
        os.kill(pid, signal.SIGCONT)
        go.touch()
        assert outcome(ticket).error is None
        assert [w.pid for w in pool.status()[0].workers] == [pid]
        client.close()


def test_x11_status_is_answered_while_compiles_run(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running_pool(workers=2) as pool:
        client = pool.client()
        tickets = [
            client.request(make_request(n=n, do="wait_file", arg=str(go)), 40 + n, None)
            for n in range(6)
        ]
        worker_pids(pool, count=2)
        times = []
        for _ in range(20):
            reply, seconds = pool.status()
            times.append(seconds)
            assert reply.pending == 6
            assert reply.oldest_ms > 0
            assert sum(job.state == "compiling" for job in reply.jobs) == 2
            assert {job.requests[0][1] for job in reply.jobs} == set(range(40, 46))
        assert quick(times, 0.1)
        go.touch()
        assert all(outcome(ticket).error is None for ticket in tickets)
        client.close()


def test_x12_a_pipeline_ends_although_the_daemon_lives(tmp_path: Path) -> None:
    """The pool is a descendant of the client here; a third process keeps it alive."""
    program = (
        "import os, subprocess, sys, pathlib\n"
        "from tests.process.pool_fixture import PoolProcess, make_request, outcome\n"
        f"pool = PoolProcess(pathlib.Path({str(tmp_path)!r}))\n"
        "pool.start()\n"
        "client = pool.client()\n"
        "print(outcome(client.request(make_request(), 1)).via, pool.pid, flush=True)\n"
        "client.close()\n"
        "keeper = [sys.executable, '-c', 'import time; time.sleep(170)', str(pool.folder)]\n"
        "null = subprocess.DEVNULL\n"
        "subprocess.Popen(keeper, pass_fds=[pool.child._parent_fd], stdin=null, stdout=null,\n"
        "                 stderr=null)\n"
        "os._exit(0)\n"
    )
    try:
        done = subprocess.run(
            f"{sys.executable} -c \"$PROGRAM\" | cat",
            shell=True, capture_output=True, text=True, timeout=PATIENCE_S,
            env={**os.environ, "PROGRAM": program, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        via, pool_pid = done.stdout.split()
        assert via == "compile"
        assert alive(int(pool_pid))
    finally:
        for pid in descendants_named(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_has_no_descriptor_of_anybody_else() -> None:
    """Descriptors by allow-list: pipes of the parent watch and of readiness, stdio, its own."""
    leaked_read, leaked_write = os.pipe()
    os.set_inheritable(leaked_write, True)
    target = os.readlink(f"/proc/self/fd/{leaked_write}")
    try:
        with running_pool() as pool:
            client = pool.client()
            assert outcome(client.request(make_request(), 1)).error is None
            (pid,) = worker_pids(pool, "idle")
            for process in (pool.pid, pid):
                folder = f"/proc/{process}/fd"
                links = {os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}
                assert target not in links
            assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
            assert os.readlink(f"/proc/{pid}/fd/1") == "/dev/null"
            assert os.getpgid(pid) == pid
            client.close()
    finally:
        os.close(leaked_read)
        os.close(leaked_write)


def test_x16_eight_clients_one_compile(tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    with running_pool() as pool:
        clients = [pool.client() for _ in range(8)]
        tickets = [
            c.request(make_request(do="wait_file", arg=str(go), log=str(log)), 1) for c in clients
        ]
        pool.until(lambda r: r.jobs != () and len(r.jobs[0].requests) == 8)
        go.touch()
        found = [outcome(ticket) for ticket in tickets]
        assert len(runs_of(log)) == 1
        assert sorted(o.via for o in found) == ["compile"] + ["in_flight"] * 7
        assert len({o.binary for o in found}) == 1
        assert found[0].binary.startswith(b"binary of kernel")
        for client in clients:
            client.close()


def test_rubbish_from_a_compiler_is_a_typed_failure() -> None:
    with running_pool() as pool:
        client = pool.client()
        found = outcome(client.request(make_request(do="rubbish"), 1))
        assert found.outcome == "crash"
        assert "rubbish" in found.error.message
        client.close()


@pytest.mark.parametrize(
    ("act", "name", "started"), [("reject", "rejected", True), ("setup", "setup", False)]
)
def test_refusals_come_back_typed_and_the_worker_lives(act: str, name: str, started: bool) -> None:
    with running_pool(workers=1) as pool:
        client = pool.client()
        found = outcome(client.request(make_request(do=act, arg="line 7: error"), 1))
        assert (found.outcome, found.compiler_started) == (name, started)
        assert found.error.code == f"compile-{name}"
        if name == "rejected":
            assert found.error.log == "line 7: error"
        (pid,) = worker_pids(pool, "idle")
        assert outcome(client.request(make_request(n=2), 2)).error is None
        assert worker_pids(pool, "idle") == [pid]
        client.close()


def test_an_exception_in_a_compiler_comes_back_with_its_traceback() -> None:
    with running_pool() as pool:
        client = pool.client()
        found = outcome(client.request(make_request(do="raise", arg="boom"), 1))
        assert "RuntimeError: boom" in found.error.message
        assert "_raise" in found.error.traceback
        client.close()


def test_a_compiler_that_writes_much_to_stderr_does_not_block() -> None:
    with running_pool() as pool:
        client = pool.client()
        assert outcome(client.request(make_request(do="chatter", arg="4000"), 1)).error is None
        client.close()


def test_a_large_binary_comes_whole() -> None:
    with running_pool() as pool:
        client = pool.client()
        found = outcome(client.request(make_request(do="large", arg=str(20 << 20)), 1))
        assert found.binary == b"x" * (20 << 20)
        client.close()


def test_an_idle_worker_ends_and_gives_its_device_back(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running_pool(worker_idle_s=0.3) as pool:
        client = pool.client()
        ticket = client.request(make_request(do="wait_file", arg=str(go)), 1)
        (pid,) = worker_pids(pool)
        go.touch()
        assert outcome(ticket).error is None
        assert gone_within([pid], 3.0)
        pool.until(lambda r: r.workers == ())
        assert outcome(client.request(make_request(n=2), 1)).error is None
        client.close()


def test_a_worker_is_replaced_after_its_share_of_jobs() -> None:
    with running_pool(workers=1, worker_jobs=2) as pool:
        client = pool.client()
        workers = [outcome(client.request(make_request(n=n), 1)).worker for n in range(5)]
        assert workers == ["worker-1", "worker-1", "worker-2", "worker-2", "worker-3"]
        client.close()


def test_a_cancelled_request_is_answered_as_such(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running_pool(workers=1) as pool:
        client = pool.client()
        first = client.request(make_request(do="wait_file", arg=str(go)), 1)
        worker_pids(pool)
        second = client.request(make_request(n=2), 1)
        client.cancel(second.body.request_id)
        assert outcome(second).outcome == "cancelled"
        client.cancel(first.body.request_id)
        assert outcome(first).outcome == "cancelled"
        go.touch()
        assert outcome(client.request(make_request(n=3), 1)).error is None
        client.close()


def test_sigterm_finishes_what_runs_and_the_next_pool_does_the_rest(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running_pool(workers=1) as pool:
        client = pool.client()
        running = client.request(make_request(n=1, do="wait_file", arg=str(go)), 1)
        (pid,) = worker_pids(pool)
        queued = client.request(make_request(n=2), 1)
        pool.until(lambda r: r.pending == 2)
        assert pool.child is not None
        pool.child.terminate()
        pool.status()  # it has had its signal when it answers
        go.touch()
        assert outcome(running).error is None
        ended = pool.child.wait(PATIENCE_S)
        assert ended is not None
        assert ended.code == 0
        pool.child.close()
        assert gone_within([pid], 1.0)
        assert not queued.done
        pool.start()
        assert outcome(queued).error is None
        client.close()


def test_a_stopped_pool_delays_and_loses_nothing() -> None:
    with running_pool() as pool:
        client = pool.client()
        assert outcome(client.request(make_request(n=0), 1)).error is None
        os.kill(pool.pid, signal.SIGSTOP)
        ticket = client.request(make_request(n=1), 1)
        assert ticket.wait(1.0) is None
        os.kill(pool.pid, signal.SIGCONT)
        assert outcome(ticket).error is None
        client.close()


def test_a_dead_client_is_noticed_by_its_handle() -> None:
    """Its run leaves the pool at once, not after a silence."""
    with running_pool() as pool:
        program = (
            "import pathlib, time, sys\n"
            "from tests.process.pool_fixture import PoolProcess, make_request, outcome\n"
            f"pool = PoolProcess(pathlib.Path({str(pool.folder)!r}))\n"
            "client = pool.client('the-run')\n"
            "outcome(client.request(make_request(), 1))\n"
            "client.request(make_request(do='sleep', arg='20'), 1)\n"
            "print('ok', flush=True)\n"
            "time.sleep(60)\n"
        )
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "ok\n"
        pool.until(lambda r: r.runs == ("the-run",))
        other.kill()
        other.wait()
        other.stdout.close()
        pool.until(lambda r: r.runs == ())


def test_an_executor_that_stood_still_does_not_take_that_for_the_pool_s_silence() -> None:
    """Stopped for longer than it would wait for a lost pool; its answer came in the meantime."""
    with running_pool() as pool:
        program = (
            "import pathlib\n"
            "from tests.process.pool_fixture import PoolProcess, make_request, outcome\n"
            f"pool = PoolProcess(pathlib.Path({str(pool.folder)!r}), pool_timeout_s=2.5)\n"
            "client = pool.client('the-run')\n"
            "assert outcome(client.request(make_request(), 1)).error is None\n"
            "ticket = client.request(make_request(do='sleep', arg='0.5'), 1)\n"
            "print('asked', flush=True)\n"
            "print(outcome(ticket).outcome, flush=True)\n"
            "client.close()\n"
        )
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "asked\n"
        other.send_signal(signal.SIGSTOP)
        time.sleep(4.0)  # standing still is the fault itself
        other.send_signal(signal.SIGCONT)
        assert other.stdout.readline() == "ok\n"
        assert other.wait(PATIENCE_S) == 0
        other.stdout.close()
