"""Supervision from both sides, with real child processes that misbehave on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hrxmp import lifecycle, supervise
from hrxmp.errors import ChildError
from hrxmp.scratch import ScratchFolder, remove_abandoned
from hrxmp.supervise import Child, Exit, Restarter
from hrxmp.workers.capacity import bounded, usable_cores

PATIENCE_S = 60.0
"""For what must come, however slow the machine."""


def child(name: str) -> Child:
    """Start a child program of tests/faults/children.py in the place of a role."""
    return supervise.spawn(
        name, [], name=name, environ=os.environ, capture_stderr=True,
        module="tests.faults.children",
    )  # fmt: skip


def test_a_ready_child_is_ready_and_a_deaf_one_too_late() -> None:
    good, deaf = child("ready"), child("never_ready")
    good.wait_ready(PATIENCE_S)
    assert good.ready
    with pytest.raises(ChildError, match=r"not ready in 0\.3 s"):
        deaf.wait_ready(0.3)
    for one in (good, deaf):
        one.kill()
        assert one.wait(PATIENCE_S) == Exit(signal=9)
        one.close()


def test_a_child_that_dies_at_its_start_is_told_at_once_with_its_last_words() -> None:
    dying = child("dies")
    with pytest.raises(ChildError, match=r"exit code 7.*no such driver"):
        dying.wait_ready(PATIENCE_S)
    dying.close()


def test_a_child_killed_while_starting_is_told_by_its_signal() -> None:
    deaf = child("never_ready")
    deaf.kill()
    with pytest.raises(ChildError, match="SIGKILL"):
        deaf.wait_ready(PATIENCE_S)
    deaf.close()


def test_the_stop_ladder_goes_only_as_far_as_needed() -> None:
    polite, stubborn, frozen = child("ready"), child("ignores_terminate"), child("ready")
    for one in (polite, stubborn, frozen):
        one.wait_ready(PATIENCE_S)
    os.kill(frozen.pid, signal.SIGSTOP)
    asked = []
    assert (
        polite.stop(2 * PATIENCE_S, lambda: (asked.append(1), polite.terminate())[0]) == "message"
    )
    assert asked == [1]
    assert stubborn.stop(0.4) == "kill"
    assert frozen.stop(0.4) == "kill"
    for one in (polite, stubborn, frozen):
        assert one.exit is not None
        one.close()


def test_what_a_dead_child_started_goes_with_it() -> None:
    """A compiler may start programs of its own; its group is swept before it is reaped."""
    parent = child("leaves_a_grandchild")
    parent.wait_ready(PATIENCE_S)
    parent.drain()
    deadline = time.monotonic() + PATIENCE_S
    while not parent.last_words and time.monotonic() < deadline:
        parent.drain()
    grandchild = int(parent.last_words)
    assert parent.wait(PATIENCE_S) is not None
    deadline = time.monotonic() + PATIENCE_S
    while _lives(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(grandchild)
    parent.close()


def test_a_file_in_the_working_folder_cannot_take_a_library_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('taken over')")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.chdir(tmp_path)
    good = child("ready")
    good.wait_ready(PATIENCE_S)
    good.kill()
    good.wait(PATIENCE_S)
    good.close()


def test_the_watch_tells_that_the_parent_is_gone() -> None:
    read, write = os.pipe()
    wake = lifecycle.WakeUp()
    lifecycle.arm_parent_watch(read, wake.set)
    os.write(write, b"not the end")
    assert lifecycle.wait([], [wake.fd], 50) == set()
    os.close(write)
    assert lifecycle.wait([], [wake.fd], 60_000) == {wake.fd}
    wake.clear()
    assert lifecycle.wait([], [wake.fd], 0) == set()
    wake.close()
    os.close(read)


def test_a_parent_that_died_before_the_watch_is_noticed_at_once() -> None:
    read, write = os.pipe()
    os.close(write)
    gone: list[int] = []
    lifecycle.arm_parent_watch(read, lambda: gone.append(1))
    assert gone == [1]
    os.close(read)


def test_readiness_is_one_byte_and_a_missing_parent_does_no_harm() -> None:
    read, write = os.pipe()
    lifecycle.notify_ready(write)
    assert os.read(read, 10) == b"R"
    os.close(read)
    read, write = os.pipe()
    os.close(read)
    lifecycle.notify_ready(write)
    lifecycle.notify_ready(-1)


def test_other_descriptors_are_closed() -> None:
    program = (
        "import os\n"
        "from hrxmp import lifecycle\n"
        "lifecycle.close_other_descriptors({3})\n"
        "print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:4])\n"
    )
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        pass_fds=files, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.stdout.strip() in ("[0, 1, 2, 3]", "[0, 1, 2, 4]")
    for fd in files:
        os.close(fd)


def test_restarts_have_a_limit_and_a_stable_life_forgives() -> None:
    restarter = Restarter(limit=3, stable_s=1.0)
    assert [restarter.ended(10) for _ in range(4)] == [True, True, True, False]
    assert restarter.ended(2_000_000_000)
    assert restarter.delay_s() == 0
    restarter.ended(10)
    assert 0 < restarter.delay_s() <= 2


def test_workers_follow_affinity_and_quota(tmp_path: Path) -> None:
    file = tmp_path / "cgroup"
    file.write_text("0::/outer/inner\n")
    inner = tmp_path / "root" / "outer" / "inner"
    inner.mkdir(parents=True)
    cores = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "root", file) == cores
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("100000 100000\n")
    assert usable_cores(tmp_path / "root", file) == 1
    (inner.parent / "cpu.max").write_text("nonsense\n")
    assert usable_cores(tmp_path / "root", file) == cores
    assert usable_cores(tmp_path / "root", tmp_path / "missing") == cores


def test_folders_of_dead_pools_are_removed_and_living_ones_are_not(tmp_path: Path) -> None:
    """X19: the lock of a process that was killed is free at once."""
    program = (
        "import sys, pathlib, time\n"
        "from hrxmp.scratch import ScratchFolder\n"
        "print(ScratchFolder(pathlib.Path(sys.argv[1])).path, flush=True)\n"
        "time.sleep(60)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    mine = ScratchFolder(tmp_path)
    assert theirs.exists()
    other.kill()
    other.wait()
    other.stdout.close()
    assert remove_abandoned(tmp_path) == 1
    assert not theirs.exists()
    assert mine.path.exists()
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_workers_follow_what_is_asked_within_reason() -> None:
    said: list[str] = []
    assert bounded(0, 2, said.append) == 2
    assert bounded(5, 2, said.append) == 5
    assert not said
    assert bounded(100_000, 2, said.append) == 16
    assert "100000 workers" in said[0]
