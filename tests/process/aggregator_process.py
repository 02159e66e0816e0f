"""Starts real aggregators and trace sources for the tests. Not a test itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.identity import new_identity
from hrxmp.settings import Settings
from hrxmp.trace import PENDING_RECORDS, Tracer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
"""For what must come, however slow the machine."""
UNHURRIED = ("--hold-back-ms", str(int(PATIENCE_S * 1000)))
"""Flags: a source that gets no time for a while is waited for, so nothing of it comes late."""


class AggregatorProcess:
    """One life of an aggregator, bound to `endpoint`, writing to the given stderr."""

    def __init__(self, endpoint: str, stderr: int, *flags: str) -> None:
        ready, ready_end = os.pipe()
        self.parent_end_read, self.parent_end = os.pipe()
        command = [sys.executable, "-m", "hrxmp.aggregator.main", "--bind", endpoint]
        command += ["--ready-fd", str(ready_end), "--parent-fd", str(self.parent_end_read), *flags]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(ready_end, self.parent_end_read),
        )
        os.close(ready_end)
        os.close(self.parent_end_read)
        answer = os.read(ready, 1)
        os.close(ready)
        if not answer:
            raise RuntimeError(f"the aggregator ended with {self.process.wait()}")

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def let_go(self) -> None:
        """Close the parent's end: the aggregator ends by itself."""
        if self.parent_end >= 0:
            os.close(self.parent_end)
            self.parent_end = -1

    def finish(self, timeout_s: float = PATIENCE_S) -> int:
        """End as a launcher's death would end it; the exit code."""
        self.let_go()
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def aggregator(endpoint: str, stderr: int, *flags: str) -> Iterator[AggregatorProcess]:
    """An aggregator that is certainly gone afterwards."""
    running = AggregatorProcess(endpoint, stderr, *flags)
    try:
        yield running
    finally:
        running.let_go()
        try:
            running.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            running.kill()


def tracer(
    endpoint: str,
    source: str,
    *,
    run: str = "r1",
    welcome_s: float = PATIENCE_S,
    spool_mb: int = 256,
    pending_records: int = PENDING_RECORDS,
) -> Tracer:
    """A started tracer of this process."""
    made = Tracer(
        new_identity(run, source),
        HybridLogicalClock(),
        endpoint,
        Settings(trace_compile=True, spool_mb=spool_mb),
        mono_ns(),
        pending_records=pending_records,
    )
    made.start(welcome_s)
    return made
