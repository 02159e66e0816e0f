"""A child's side of being supervised: parent watch, ready byte, signals, descriptors.

Every process that `supervise` starts runs it, before its heavy imports: a worker whose parent was
killed while it was still importing must go too. It starts nothing and decides nothing; what to do
when the parent is gone is the caller's callback. Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1
_OOM_PREFER_ME = 500
PARENT_GONE_EXIT = 85
"""Exit code of a child that went because its parent did."""


class Pollable(Protocol):
    """A `wire.Link`, as `wait` sees it."""

    socket: Any

    def poll(self, timeout_ms: int) -> bool:
        """Whether there is something to receive."""


def arm_parent_watch(fd: int, on_gone: Callable[[], None], *, death_signal: int = 0) -> None:
    """Call `on_gone` (in a thread of its own) when the other end of the pipe `fd` closes.

    Only the parent holds that end, so end-of-file means that it is gone. With `death_signal` the
    kernel sends that signal too, which also reaches a process whose interpreter is stuck in a
    driver; it is meant for children of a parent's main thread only (the kernel watches the thread).
    A negative `fd` means that nobody watches over this process.
    """
    if fd < 0:
        return
    os.set_inheritable(fd, False)
    if death_signal:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    # The parent may have died before the signal was armed: the pipe tells.
    if _at_end(fd, timeout_ms=0):
        on_gone()
        return
    watch = threading.Thread(target=_watch, args=(fd, on_gone), name="parent-watch", daemon=True)
    watch.start()


def leave_now() -> None:
    """End this process at once, without running anything of it: for a worker's parent watch."""
    os._exit(PARENT_GONE_EXIT)


def notify_ready(fd: int) -> None:
    """Tell the parent that this process is ready (one byte), and close `fd`. Negative: nobody."""
    if fd < 0:
        return
    with contextlib.suppress(OSError):  # the parent may have given up on us already
        os.write(fd, b"R")
    os.close(fd)


def close_other_descriptors(keep: Iterable[int]) -> None:
    """Close everything above stderr that is not in `keep`: what was inherited by mistake."""
    kept = set(keep)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                os.close(number)


def volunteer_for_oom() -> None:
    """Let the kernel's memory killer prefer this process to the executor."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_PREFER_ME), encoding="ascii")


def boot_id() -> str:
    """This boot of this machine: process ids and monotonic times compare only within it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class WakeUp:
    """A descriptor to poll that other threads and signal handlers make readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Make the descriptor readable; safe from any thread and from a signal handler."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class StopSignals:
    """SIGTERM and SIGINT as a count and a readable descriptor; the handlers do nothing else.

    A handler may have interrupted the holder of any lock, so it must not call into the program.
    """

    def __init__(self, wake: WakeUp) -> None:
        self.count = 0
        self.last = 0
        """The number of the signal that came last."""
        self._wake = wake

    def install(self) -> None:
        """Take over SIGTERM and SIGINT; main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def stop_now(self) -> None:
        """As if the signal had come twice; from any thread."""
        self.count += 2
        self._wake.set()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.last = number
        self.count += 1
        self._wake.set()


def wait(links: Iterable[Pollable], descriptors: Iterable[int], timeout_ms: int) -> set[int]:
    """Wait until a link or a descriptor has something to read; the ready descriptors.

    A ZeroMQ socket's descriptor tells edges only, so each link is asked first.
    """
    poller = select.poll()
    for fd in descriptors:
        poller.register(fd, select.POLLIN)
    for link in links:
        if link.poll(0):
            timeout_ms = 0
        poller.register(link.socket.fileno(), select.POLLIN)
    return {fd for fd, _events in poller.poll(timeout_ms)}


def _watch(fd: int, on_gone: Callable[[], None]) -> None:
    while not _at_end(fd, timeout_ms=None):
        pass
    on_gone()


def _at_end(fd: int, timeout_ms: int | None) -> bool:
    """Whether the pipe is at its end; bytes in it are read and ignored."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(timeout_ms):
        return False
    try:
        return os.read(fd, 512) == b""
    except OSError:
        return True
