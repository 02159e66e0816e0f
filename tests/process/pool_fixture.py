"""A real pool process with real workers for the process tests, and a client in this process."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from hrxmp import wire
from hrxmp.clock import HybridLogicalClock
from hrxmp.executor.compile_client import CompileClient, Ticket
from hrxmp.identity import new_identity, new_run_id
from hrxmp.kernels.keys import KeyComponents, Variant
from hrxmp.messages import CompileRequest, FromPool, StatusReply, StatusRequest
from hrxmp.settings import Settings
from hrxmp.supervise import Child, spawn

FAKE = "tests.faults.compilers:compile"
PATIENCE_S = 60.0
"""For what must come, however slow the machine: a bound on hanging, not on speed."""
_STALL_S = 3.0
"""A shared machine may stand still for so long at any moment."""
_START_S = 0.02
"""What the start of a bare interpreter takes where this project's figures were measured."""
_request_ids = count(1)


def components(variant: Variant) -> KeyComponents:
    """Key components of a kernel that only the fake compiler knows."""
    return KeyComponents(
        source="0" * 64,
        entry_point=variant.definition,
        params=variant.params,
        local_size=variant.local_size,
        build_options="",
        sanitizer="",
        platform="fake",
        device="fake",
        compute_units=1,
        driver="1",
    )


def make_request(
    name: str = "kernel",
    *,
    device: str = "fake",
    urgent: bool = False,
    deadline_ms: int = 0,
    **params: Any,
) -> CompileRequest:
    """A request for the fake compiler; its parameters say what it does."""
    variant = Variant(
        definition=name, params=tuple((k, v) for k, v in params.items()), local_size=(1,)
    )
    parts = components(variant)
    return CompileRequest(
        request_id=next(_request_ids),
        key=parts.digest(),
        variant=variant,
        components=parts,
        device=device,
        urgent=urgent,
        deadline_ms=deadline_ms,
    )


class PoolProcess:
    """One `hrxmp-workers` process on a private endpoint, which may be killed and started again."""

    def __init__(
        self,
        folder: Path,
        *,
        compiler: str = FAKE,
        workers: int = 2,
        endpoint: str = "",
        flags: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.flags = flags
        self.endpoint = endpoint or f"ipc://{folder}/pool"
        self.compiler = compiler
        self.workers = workers
        values = {
            "cache": str(folder / "store"),
            "runtime_dir": str(folder),
            "pool_timeout_s": 30.0,
        }
        self.settings = Settings(**{**values, **settings})
        self.child: Child | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        args = ["--bind", self.endpoint, "--workers", str(self.workers), *self.flags]
        if self.compiler:
            args += ["--compiler", self.compiler]
        environ = {**os.environ, **self.settings.to_environment()}
        self.child = spawn("workers", args, name="pool", environ=environ, capture_stderr=True)
        self.child.wait_ready(PATIENCE_S)

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.child is not None
        os.kill(self.child.pid, signal.SIGKILL)
        assert self.child.wait(PATIENCE_S) is not None
        self.child.close()
        self.child = None

    def stop(self) -> str:
        """Stop it by the ladder; the rung."""
        if self.child is None:
            return ""
        rung = self.child.stop(2 * PATIENCE_S)
        self.words = self.child.last_words
        self.child.close()
        self.child = None
        return rung

    def client(self, run_id: str = "", **kwargs: Any) -> CompileClient:
        """A started client of its own run."""
        identity = new_identity(run_id or new_run_id(), "executor")
        client = CompileClient(
            self.endpoint, identity, HybridLogicalClock(), self.settings, **kwargs
        )
        client.start()
        return client

    def status(self, timeout_s: float = PATIENCE_S) -> tuple[StatusReply, float]:
        """Its status, and how long the answer took, in seconds."""
        context = wire.context()
        identity = new_identity("status", "test")
        link: wire.Link[FromPool] = wire.Link(
            wire.dealer(context, self.endpoint, self.settings.curve_dir),
            FromPool,
            identity,
            HybridLogicalClock(),
        )
        try:
            start = time.monotonic()
            link.send(StatusRequest(token=7))
            while time.monotonic() - start < timeout_s:
                link.poll(100)
                if (message := link.receive()) is not None:
                    assert isinstance(message.body, StatusReply)
                    return message.body, time.monotonic() - start
            raise AssertionError("no status")
        finally:
            link.close()
            context.term()

    def until(
        self, what: Callable[[StatusReply], bool], timeout_s: float = PATIENCE_S
    ) -> StatusReply:
        """Ask for the status until it is as wanted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            reply, _ = self.status()
            if what(reply):
                return reply
        raise AssertionError(f"still {msgspec.to_builtins(reply)}")


@contextmanager
def running_pool(**kwargs: Any) -> Iterator[PoolProcess]:
    """A pool in a private folder; afterwards no process and no file of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="hrxmp-t-"))
    pool = PoolProcess(folder, **kwargs)
    try:
        pool.start()
        yield pool
        pool.stop()
        left = [path.name for path in folder.glob("hrxmp-*")]
        assert left == [], f"left behind: {left}"
        assert descendants_named(str(folder)) == []
    finally:
        if pool.child is not None:
            pool.child.kill()
            pool.child.wait(PATIENCE_S)
            pool.child.close()
        shutil.rmtree(folder, ignore_errors=True)


def allowed(seconds: float) -> float:
    """What a promise of `seconds` on an idle machine may take on this one, as it is now."""
    return _STALL_S + seconds * _slowness()


def quick(seconds: list[float], bound_s: float) -> bool:
    """Whether the faster half of some answers came within a bound, ten times that on a machine
    ten times slower. The slower half may have met a moment in which nobody ran."""
    return statistics.median_low(seconds) < bound_s * _slowness()


def _slowness() -> float:
    """How many times slower a process starts here and now than on the machine of the figures."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    return max(1.0, (time.monotonic() - begin) / _START_S)


def descendants_named(text: str) -> list[int]:
    """Live processes whose command line has `text` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if text in line and state != "Z":
                found.append(int(entry.name))
    return found


def gone_within(pids: list[int], timeout_s: float) -> bool:
    """Whether all these processes end within `timeout_s`, more where the machine is slow."""
    deadline = time.monotonic() + allowed(timeout_s)
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def outcome(ticket: Ticket, timeout_s: float = PATIENCE_S) -> Any:
    """The ticket's outcome; a test that gets none fails."""
    found = ticket.wait(allowed(timeout_s))
    assert found is not None, "the request was never answered"
    return found
