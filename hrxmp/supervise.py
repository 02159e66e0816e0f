"""A parent's side: start a child by exec, watch it by handle, restart within limits, stop it.

The launcher and the pool process use it, in their main thread; nothing else starts processes.
A child is opened by command line, never by fork, with an allow-list of descriptors, in a process
group of its own; it holds the reading end of a pipe whose other end only its parent has. This
module knows no message: a polite request to stop is handed in.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from hrxmp.clock import mono_ns
from hrxmp.errors import ChildError

_TAIL_BYTES = 4096
_READS = 32
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a child ended: exit code, or the signal that ended it."""

    code: int = 0
    signal: int = 0

    def __str__(self) -> str:
        if self.signal:
            return f"signal {self.signal} ({signal_name(self.signal)})"
        return f"exit code {self.code}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number as text when the system does not name it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Child:
    """One started child. `fd` (readable when it has ended) and `stderr_fd` are for polling."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        *,
        ready_fd: int,
        parent_fd: int,
        stderr_fd: int,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.started_ns = mono_ns()
        self.ready = False
        self.rung = ""
        """The step of the stop ladder that ended it: `message`, `terminate` or `kill`."""
        self.exit: Exit | None = None
        self.stderr_fd = stderr_fd
        self._process = process
        self._ready_fd = ready_fd
        self._parent_fd = parent_fd
        self._tail: collections.deque[bytes] = collections.deque(maxlen=64)
        self.fd = os.pidfd_open(process.pid)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for the ready byte. ChildError when it ends first (told at once) or is too late."""
        deadline = mono_ns() + int(timeout_s * 1e9)
        while not self.ready:
            left_ms = (deadline - mono_ns()) // 1_000_000
            if left_ms <= 0:
                raise ChildError(f"{self.name} was not ready in {timeout_s:g} s{self._said()}")
            if self._until(left_ms, self._ready_fd):
                self.ready = os.read(self._ready_fd, 1) == b"R"
            if not self.ready and self.poll() is not None:
                raise ChildError(f"{self.name} ended at its start: {self.exit}{self._said()}")

    def poll(self) -> Exit | None:
        """Its end, or None while it lives. Never blocks. What is left of its group is killed."""
        if self.exit is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
            self._signal_group(signal.SIGKILL)  # before reaping: the id is still its own
            code = self._process.wait()
            self.exit = Exit(signal=-code) if code < 0 else Exit(code=code)
            self.drain()
        return self.exit

    def stop(self, budget_s: float, ask: Callable[[], None] | None = None) -> str:
        """Stop it within `budget_s`, and say by which rung.

        Asks, waits half the budget, terminates, waits the other half, kills.
        """
        for rung, act in (("message", ask), ("terminate", self.terminate), ("kill", self.kill)):
            if act is None or self.poll() is not None:
                continue
            act()
            self.rung = rung
            self.wait(budget_s / 2 if rung != "kill" else 10.0)
        return self.rung

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait at most `timeout_s` for its end."""
        deadline = mono_ns() + int(timeout_s * 1e9)
        while self.poll() is None and (left := deadline - mono_ns()) > 0:
            self._until(left // 1_000_000 + 1)
        return self.poll()

    def terminate(self) -> None:
        """SIGTERM to the child itself."""
        self._signal_one(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        self._signal_group(signal.SIGKILL)
        self._signal_one(signal.SIGKILL)

    def drain(self) -> None:
        """Take what it wrote to stderr into `last_words`. Never blocks; of a flood only a part."""
        for _ in range(_READS if self.stderr_fd >= 0 else 0):
            try:
                piece = os.read(self.stderr_fd, 65536)
            except BlockingIOError:
                return
            if not piece:
                os.close(self.stderr_fd)
                self.stderr_fd = -1
                return
            self._tail.append(piece[-_TAIL_BYTES:])

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr, at most 4 KiB."""
        text = b"".join(self._tail)[-_TAIL_BYTES:].decode("utf-8", "replace")
        return text.strip()

    def close(self) -> None:
        """Give back the descriptors; a child that still lives sees its parent go."""
        for name in ("fd", "_ready_fd", "_parent_fd", "stderr_fd"):
            if (fd := getattr(self, name)) >= 0:
                os.close(fd)
                setattr(self, name, -1)

    def _until(self, timeout_ms: int, *extra: int) -> bool:
        """Wait for its end, its stderr or `extra`; whether `extra` is readable."""
        poller = select.poll()
        for fd in (self.fd, self.stderr_fd, *extra):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        found = {fd for fd, _ in poller.poll(timeout_ms)}
        if self.stderr_fd in found:
            self.drain()
        return bool(found & set(extra))

    def _signal_one(self, number: int) -> None:
        if self.exit is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.fd, number)

    def _signal_group(self, number: int) -> None:
        if self.exit is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _said(self) -> str:
        words = self.last_words
        return f"; its last words: {words[-600:]}" if words else ""


def spawn(
    role: str,
    args: Sequence[str],
    *,
    name: str,
    environ: Mapping[str, str],
    capture_stderr: bool = False,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    new_group: bool = True,
    module: str = "hrxmp",
) -> Child:
    """Start `python -m hrxmp <role> --ready-fd N --parent-fd N <args>`.

    `stdout=None` inherits; so does stderr unless it is captured as last words. ChildError when the
    system refuses to start it. Main thread only: a child may ask to die with its parent's thread.
    """
    ready_read, ready_write = os.pipe()
    parent_read, parent_write = os.pipe()
    command = [sys.executable, "-P", "-m", module, role]
    command += ["--ready-fd", str(ready_write), "--parent-fd", str(parent_read), *args]
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE if capture_stderr else None,
            env=child_environment(environ),
            pass_fds=(ready_write, parent_read, *pass_fds),
            process_group=0 if new_group else None,
            bufsize=0,
        )
    except OSError as error:
        os.close(ready_read)
        os.close(parent_write)
        raise ChildError(f"{name} could not be started: {error}") from error
    finally:
        os.close(ready_write)
        os.close(parent_read)
    stderr_fd = -1
    if process.stderr is not None:
        stderr_fd = os.dup(process.stderr.fileno())
        process.stderr.close()
        os.set_blocking(stderr_fd, False)
    return Child(name, process, ready_fd=ready_read, parent_fd=parent_write, stderr_fd=stderr_fd)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with this very package in front: `-P` keeps the user's folder out of the path,
    so a file there that is called like a library cannot break or take over a child."""
    rest = environ.get("PYTHONPATH", "")
    path = f"{_PACKAGE_PARENT}{os.pathsep}{rest}" if rest else _PACKAGE_PARENT
    return {**environ, "PYTHONPATH": path}


def without_blas_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child that multiplies nothing with numpy: OpenBLAS would start a thread a
    core at import, which spin for 50 ms on the cores that other processes start on."""
    return {"OPENBLAS_NUM_THREADS": "1", **environ}


class Restarter:
    """How often a child may be restarted: at most `limit` times in a row.

    A life of `stable_s` starts the count anew; alive is not ready, so the caller counts lives.
    """

    def __init__(self, limit: int = 5, stable_s: float = 10.0) -> None:
        self.limit = limit
        self.failures = 0
        self._stable_ns = int(stable_s * 1e9)

    def ended(self, life_ns: int) -> bool:
        """Note that a child ended after `life_ns`; whether it may be started again."""
        self.failures = 1 if life_ns >= self._stable_ns else self.failures + 1
        return self.failures <= self.limit

    def delay_s(self) -> float:
        """How long to wait before the next start: none at first, then doubling up to 2 s."""
        return 0.0 if self.failures <= 1 else min(2.0, 0.05 * 2 ** (self.failures - 2))
