"""Real sources and a real aggregator: whole lines, one order, nothing missing (scenario X34)."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from hrxmp.aggregator.check import check
from hrxmp.aggregator.reader import Trace, read
from hrxmp.records import MAX_LINE_BYTES
from tests.process.aggregator_process import PATIENCE_S, ROOT, UNHURRIED, aggregator

PAIRS = 4
EXECUTIONS = 2000


class PipeReader:
    """Reads a pipe to its end in a thread, as a terminal or a log shipper would."""

    def __init__(self, read_end: int = -1) -> None:
        self.read_end, self.write_end = (read_end, -1) if read_end >= 0 else os.pipe()
        self.lines: list[bytes] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with os.fdopen(self.read_end, "rb") as pipe:
            self.lines = pipe.readlines()

    def finish(self) -> list[bytes]:
        """All lines, once every writer has closed."""
        if self.write_end >= 0:
            os.close(self.write_end)
        self.thread.join(PATIENCE_S)
        return self.lines


def start(role: str, *arguments: str, descriptor: int = -1) -> subprocess.Popen[bytes]:
    """A producer process."""
    command = [sys.executable, "-m", "tests.process.trace_producers", role, *arguments]
    keep = (descriptor,) if descriptor >= 0 else ()
    return subprocess.Popen(command, cwd=ROOT, pass_fds=keep)


def start_pair(endpoint: str, run: str, executions: int, log_bytes: int) -> list[subprocess.Popen]:
    """An executor and its pool, joined by a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        a, b = ours.fileno(), theirs.fileno()
        return [
            start("pair", endpoint, run, str(a), str(executions), descriptor=a),
            start("pool", endpoint, run, str(b), str(log_bytes), descriptor=b),
        ]


def ends(processes: list[subprocess.Popen]) -> list[int]:
    """Exit codes."""
    return [process.wait(600) for process in processes]


def test_eight_producers_to_a_pipe(tmp_path: Path) -> None:
    """Every line parses, numbers have no gap, causes stand before effects, counts reconcile."""
    reader = PipeReader()
    endpoint = f"ipc://{tmp_path}/trace"
    with aggregator(endpoint, reader.write_end, *UNHURRIED):
        producers = [
            one
            for index in range(PAIRS)
            for one in start_pair(endpoint, f"run-{index}", EXECUTIONS, 5000)
        ]
        codes = ends(producers)
    lines = reader.finish()
    assert codes == [0] * 2 * PAIRS
    trace = read(lines)
    report = check(trace)
    assert report.problems == []
    assert report.notes == []
    assert (report.other, report.repeats, report.late) == (0, 0, 0)
    assert report.records == PAIRS * (EXECUTIONS * 10 + 1)
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    assert _runs_overlap(trace)


def test_long_logs_go_to_private_files(tmp_path: Path) -> None:
    """A log that makes a line too long is kept whole in a file that the record names."""
    reader = PipeReader()
    endpoint = f"ipc://{tmp_path}/trace"
    with aggregator(endpoint, reader.write_end):
        assert ends(start_pair(endpoint, "r", 1, 50_000)) == [0, 0]
    (record,) = [
        line.record for line in read(reader.finish()).lines if hasattr(line.record, "log_path")
    ]
    path = Path(record.log_path)
    assert path.read_text() == "w" * 50_000
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert record.log.startswith("www")
    path.unlink()
    path.parent.rmdir()


def _runs_overlap(trace: Trace) -> bool:
    """Whether the runs were merged, not written one after the other."""
    runs = [line.record.run_id for line in trace.lines]
    changes = sum(a != b for a, b in itertools.pairwise(runs))
    return changes > len(set(runs))
