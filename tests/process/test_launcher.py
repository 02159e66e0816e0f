"""`hrxmp-run`: exit codes, the README's example, bad command lines, and death of each process."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.pool_fixture import PATIENCE_S, allowed, descendants_named
from tests.process.run_process import ROOT, hrxmp_run

WAITING = """
import signal, sys
import numpy as np
import hrxmp
executor = hrxmp.connect()
graph = hrxmp.Graph(uid=1)
graph.output(graph.scale(graph.input("x", (4,)), 2.0), "y")
executor.execute(graph, {"x": np.ones(4, np.float32)})
print("running", flush=True)
sys.stdin.read()
for n in range(2, 6):
    other = hrxmp.Graph(uid=n)
    x = other.input("x", (4, 8))
    ops = [other.soft_max, other.silu, lambda t: other.rms_norm(t, 1e-5), other.argmax]
    other.output(ops[n - 2](x), "y")
    executor.execute(other, {"x": np.ones((4, 8), np.float32)})
print("done", flush=True)
"""


def parents() -> dict[int, int]:
    """The parent of each process that is no zombie, from /proc."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                found[int(entry.name)] = int(stat[1])
    return found


def children(pid: int) -> set[int]:
    """The processes that `pid` started itself."""
    return {child for child, parent in parents().items() if parent == pid}


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    tree, found = parents(), {pid}
    while more := {child for child, parent in tree.items() if parent in found} - found:
        found |= more
    return found - {pid}


def role_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return words[words.index(b"hrxmp") + 1].decode() if b"hrxmp" in words else ""


def wait_for_end(pids: set[int], timeout_s: float) -> set[int]:
    """The processes that still live after `timeout_s`, or what is that here and now."""
    left = {pid: os.pidfd_open(pid) for pid in pids if Path(f"/proc/{pid}").exists()}
    stop = time.monotonic() + allowed(timeout_s)
    for fd in left.values():
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, stop - time.monotonic()) * 1000)
    alive = {pid for pid, fd in left.items() if not _readable(fd)}
    for fd in left.values():
        os.close(fd)
    return alive


def _readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


class Running:
    """A run whose script waits for its standard input to end."""

    def __init__(self, folder: Path, *options: str) -> None:
        script = folder / "waiting.py"
        script.write_text(WAITING)
        environ = {**os.environ, "HRXMP_CACHE": str(folder / "store"),
                   "HRXMP_RUNTIME_DIR": str(folder)}  # fmt: skip
        command = [sys.executable, "-m", "hrxmp", "run", *options, str(script)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"running\n"
        self.family = descendants(self.process.pid)

    def pid_of(self, role: str) -> int:
        """One of the launcher's own children: a child of those looks like its parent until it
        is another program."""
        (found,) = [pid for pid in children(self.process.pid) if role_of(pid) == role]
        return found

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=150)
        return self.process.returncode, out.decode(), err.decode()


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a short name: a socket's path may have 107 bytes."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="h-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_scripts_exit_code_and_arguments_pass_through(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys\nprint(sys.argv[1:], __name__)\nsys.exit(7)\n")
    done = hrxmp_run(script, "-n", "3", "--trace")
    assert (done.code, done.stdout) == (7, "['-n', '3', '--trace'] __main__\n")


def test_a_scripts_own_error_is_a_traceback_and_exit_code_1(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("1 / 0\n")
    done = hrxmp_run(script)
    assert done.code == 1 and "ZeroDivisionError" in done.stderr


def test_a_scripts_traceback_begins_at_the_script(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("def f():\n    1 / 0\nf()\n")
    done = hrxmp_run(script)
    assert done.code == 1 and "runpy" not in done.stderr and done.stderr.count("File") == 2


def test_an_output_path_means_a_trace(tmp_path: Path) -> None:
    script, trace = tmp_path / "s.py", tmp_path / "trace"
    script.write_text("import hrxmp\nhrxmp.connect()\n")
    done = hrxmp_run("--trace-output", trace, script)
    assert done.code == 0 and '"event":"run-end"' in trace.read_text()


@pytest.mark.parametrize("delay_s", [0.05, 0.3, 0.6, 1.0])
def test_a_stop_at_any_moment_of_the_start_is_quiet(tmp_path: Path, delay_s: float) -> None:
    """A terminal sends Ctrl-C to the whole group; how far the run has come must not matter."""
    script = tmp_path / "s.py"
    script.write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "-m", "hrxmp", "run", "--cache", "off", str(script)], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        process_group=0,
    )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay_s)  # the moment is what is tested
    begun = bool(descendants(process.pid))  # no longer in Python's own start
    os.killpg(process.pid, signal.SIGINT)
    _out, err = process.communicate(timeout=150)
    codes = {128 + signal.SIGINT} if begun else {128 + signal.SIGINT, -signal.SIGINT, 1}
    assert process.returncode in codes, err.decode()
    assert not begun or err == b""


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "two.py"
    script.write_text(code)
    done = hrxmp_run("--trace", script, cache=tmp_path / "store")
    assert done.code == 0, done.stderr
    assert '"event":"run-end"' in done.stderr
    alone = subprocess.run([sys.executable, str(script)], cwd=ROOT, timeout=150)
    assert alone.returncode == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing.py"], "neither a script nor one of bench"),
        (["bench", "-m", "x.gguf"], "x.gguf"),
        (["bench", "--frobnicate"], "unrecognized arguments"),
        (["--on-compile", "panic", "bench"], "invalid choice"),
        (["generate", "-m", "/dev/null", "-p", "x"], "/dev/null"),
        (["--workers", "-1", "devices"], "--workers='-1'"),
        (["--pool", "garbage", "devices"], "neither ipc:// nor tcp://"),
        (["--trace-output", "/nowhere/x", "devices"], "/nowhere/x"),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(words: list[str], text: str) -> None:
    done = hrxmp_run(*words)
    assert done.code in (1, 2)
    assert text in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_start_early_go_with_a_run_that_needs_none(short: Path, workers: int) -> None:
    """The pool starts them beside the executor, which finds no model and ends at once."""
    model = short / "nosuch.gguf"
    done = hrxmp_run(
        "--workers", str(workers), "generate", "-m", model, "-p", "Hello",
        environ={"HRXMP_RUNTIME_DIR": str(short)},
    )  # fmt: skip
    assert done.code == 1
    assert len(done.said) == 1
    assert str(model) in done.said[0]
    assert descendants_named(str(short)) == []
    assert not list(short.glob("hrxmp-*"))


def test_a_device_that_does_not_exist_is_named(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import hrxmp\nhrxmp.connect()\n")
    done = hrxmp_run("--device", "no such device", script)
    assert done.code == 1
    assert "[device-not-found]" in done.stderr and "hrxmp-run devices" in done.stderr


def test_help_and_devices_compile_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for words in (["--help"], ["bench", "--help"], ["devices"]):
        done = hrxmp_run("--trace", *words, cache=store)
        assert done.code == 0 and '"event"' not in done.stderr
    assert not store.exists()


def test_nothing_is_left_of_a_run_whose_launcher_was_killed(short: Path) -> None:
    run = Running(short, "--trace")
    assert {role_of(pid) for pid in run.family} >= {"aggregator", "workers", "executor", "worker"}
    run.process.kill()
    assert not wait_for_end(run.family, 3.0)
    code, _out, err = run.finish()
    assert code == -signal.SIGKILL
    assert '"event":"graph-end"' in err


def test_a_killed_pool_is_started_again_and_the_run_goes_on(short: Path) -> None:
    run = Running(short)
    os.kill(run.pid_of("workers"), signal.SIGKILL)
    code, out, err = run.finish()
    assert code == 0 and out == "done\n", err
    assert "workers ended (signal 9 (SIGKILL)); started again" in err


def test_a_pool_that_dies_again_and_again_is_waited_for_longer_each_time(short: Path) -> None:
    run = Running(short)
    for _ in range(3):
        pid = run.pid_of("workers")
        os.kill(pid, signal.SIGKILL)
        wait_for_end({pid}, PATIENCE_S)
        stop = time.monotonic() + PATIENCE_S
        while "workers" not in map(role_of, children(run.process.pid)):
            assert time.monotonic() < stop, "no pool was started again"
    code, out, err = run.finish()
    assert code == 0 and out == "done\n", err
    said = [line.partition("; ")[2] for line in err.splitlines() if "workers ended" in line]
    assert said == ["started again", "started again in 0.05 s", "started again in 0.1 s"]


def test_a_killed_aggregator_is_started_again_and_nothing_is_lost(short: Path) -> None:
    run = Running(short, "--trace")
    os.kill(run.pid_of("aggregator"), signal.SIGKILL)
    code, out, err = run.finish()
    assert code == 0 and out == "done\n", err
    (short / "trace").write_text(err)
    check = [sys.executable, "-m", "hrxmp", "trace", "check", str(short / "trace")]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"event":"lost"' not in err


def test_a_killed_executor_ends_the_run_and_the_trace_says_so(short: Path) -> None:
    run = Running(short, "--trace")
    os.kill(run.pid_of("executor"), signal.SIGKILL)
    code, _out, err = run.finish()
    assert code == 128 + signal.SIGKILL
    assert '"status":"signal 9"' in err and "ended by signal 9" in err
    assert not wait_for_end(run.family, 3.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_the_run_with_a_whole_trace(short: Path, number: int) -> None:
    run = Running(short, "--trace")
    run.process.send_signal(number)
    code, _out, err = run.finish()
    assert code == 128 + number
    assert f'"status":"signal {int(signal.SIGTERM)}"' in err
    assert not list(short.glob("hrxmp-*")), "the run's folder is left"
