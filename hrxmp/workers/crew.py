"""The pool's worker processes: started, handed jobs, measured, ended.

Runs in the pool process. It decides nothing: the broker says who starts and who ends, the crew
does it and tells what happened to each process, with its last words. A worker that is asked to end
and does not is terminated, then killed, without the pool waiting for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hrxmp import wire
from hrxmp.clock import mono_ns
from hrxmp.messages import Body, StatusWorker
from hrxmp.supervise import Child, Exit, spawn, without_blas_threads

GRACE_NS = 2_000_000_000
LATE_NS = 2_500_000_000
"""A worker whose heartbeat is older is late: counted and shown, never killed for it."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process that ended."""

    worker: str
    pid: int
    exit: Exit
    reason: str
    words: str
    held: tuple[Any, ...]


class Member:
    """One worker process."""

    def __init__(self, child: Child, scratch: Path) -> None:
        self.child = child
        self.scratch = scratch
        self.peer = b""
        self.reason = ""
        """Why it was told to end; empty when nobody told it."""
        self.held: tuple[Any, ...] = ()
        self.asked_ns = 0
        self.terminated = False
        self.jobs = 0
        self.start_rss = 0
        self.job_rss = 0
        self.heard_ns = mono_ns()
        self.late = False
        self.phase = "starting"


class Crew:
    """All worker processes of a pool."""

    def __init__(
        self, endpoint: str, run_id: str, folder: Path, environ: Mapping[str, str], compiler: str
    ) -> None:
        self.members: dict[str, Member] = {}
        self._endpoint = endpoint
        self._run_id = run_id
        self._folder = folder
        self._environ = without_blas_threads(environ)
        self._compiler = compiler

    def start(self, name: str, *, try_device: bool) -> int:
        """Start a worker process; its pid. ChildError when the system refuses."""
        scratch = self._folder / name
        scratch.mkdir(mode=0o700, exist_ok=True)
        args = ["--endpoint", self._endpoint, "--run", self._run_id, "--name", name]
        args += ["--scratch", str(scratch)]
        if try_device:
            args.append("--try-device")
        if self._compiler:
            args += ["--compiler", self._compiler]
        child = spawn("worker", args, name=name, environ=self._environ, capture_stderr=True)
        self.members[name] = Member(child, scratch)
        return child.pid

    def hello(self, name: str, pid: int, peer: bytes) -> bool:
        """A worker said hello; False when it is none of ours (of an earlier pool, or a liar)."""
        member = self.members.get(name)
        if member is None or member.child.pid != pid:
            return False
        member.peer = peer
        member.start_rss = member.job_rss = _rss(pid)
        member.phase = "idle"
        return True

    def known(self, name: str, peer: bytes) -> Member | None:
        """The member that speaks over this connection, or None."""
        member = self.members.get(name)
        return member if member is not None and member.peer == peer else None

    def send(self, link: wire.Link[Any], name: str, body: Body) -> bool:
        """Send to a worker; False when it cannot be reached now."""
        member = self.members.get(name)
        return member is not None and bool(member.peer) and link.send(body, to=member.peer)

    def assigned(self, name: str) -> None:
        """A job goes to this worker: measure memory from here."""
        member = self.members[name]
        member.jobs += 1
        member.job_rss = _rss(member.child.pid)
        member.phase = "assigned"

    def leave(self, name: str, reason: str) -> None:
        """It was asked to end; from now on its time runs."""
        member = self.members.get(name)
        if member is not None:
            member.reason, member.asked_ns = reason, mono_ns()

    def kill(self, name: str, reason: str, held: tuple[Any, ...] = ()) -> None:
        """End it at once."""
        member = self.members.get(name)
        if member is not None:
            member.reason, member.held = reason, held
            member.child.kill()

    def descriptors(self) -> list[int]:
        """What to poll: the handle and the stderr of each."""
        return [
            fd
            for member in self.members.values()
            for fd in (member.child.fd, member.child.stderr_fd)
            if fd >= 0
        ]

    def collect(self) -> Iterator[Gone]:
        """Read their stderr and take leave of those that have ended."""
        for name, member in list(self.members.items()):
            member.child.drain()
            ended = member.child.poll()
            if ended is not None:
                del self.members[name]
                yield self._bury(name, member, ended)

    def press(self, now: int) -> None:
        """Terminate, then kill, those that were asked to end and do not."""
        for member in self.members.values():
            waited = now - member.asked_ns if member.asked_ns else 0
            if waited > 2 * GRACE_NS:
                member.child.kill()
            elif waited > GRACE_NS and not member.terminated:
                member.terminated = True
                member.child.terminate()

    def grown_mb(self, name: str) -> int:
        """How much memory it took since its job began, MB."""
        member = self.members.get(name)
        return (_rss(member.child.pid) - member.job_rss) >> 20 if member else 0

    def total_growth_mb(self, name: str) -> int:
        """How much memory it took since it said hello, MB."""
        member = self.members.get(name)
        return (_rss(member.child.pid) - member.start_rss) >> 20 if member else 0

    def count_late(self, now: int) -> int:
        """How many became late since the last time this was asked."""
        newly = 0
        for member in self.members.values():
            late = now - member.heard_ns > LATE_NS
            newly += late and not member.late
            member.late = late
        return newly

    def phases(self) -> dict[str, str]:
        """What each is doing."""
        return {name: member.phase for name, member in self.members.items()}

    def status(self, states: dict[str, str]) -> Iterator[StatusWorker]:
        """Every worker process, for status."""
        for name, member in self.members.items():
            yield StatusWorker(
                worker=name,
                pid=member.child.pid,
                state=states.get(name, "leaving") + (" (late)" if member.late else ""),
                jobs=member.jobs,
                rss_mb=_rss(member.child.pid) >> 20,
            )

    def close(self) -> None:
        """Kill whoever is left and remove what they left."""
        for member in self.members.values():
            member.child.kill()
        for name, member in list(self.members.items()):
            member.child.wait(2.0)
            self._bury(name, member, member.child.exit or Exit(signal=9))
        self.members.clear()

    def _bury(self, name: str, member: Member, ended: Exit) -> Gone:
        member.child.close()
        shutil.rmtree(member.scratch, ignore_errors=True)
        return Gone(
            worker=name,
            pid=member.child.pid,
            exit=ended,
            reason=member.reason,
            words=member.child.last_words,
            held=member.held,
        )


def _rss(pid: int) -> int:
    """Resident bytes of a process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
