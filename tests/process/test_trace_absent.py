"""No aggregator at the endpoint (scenario X39), and limits that are hit: told once, counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from hrxmp import records
from hrxmp.aggregator.reader import read_file
from tests.process.aggregator_process import PATIENCE_S, ROOT, aggregator, tracer
from tests.process.pool_fixture import allowed

PROGRAM = """
import sys, time
from hrxmp.records import Annotation
from tests.process.aggregator_process import tracer
source = tracer(sys.argv[1], "executor", welcome_s=1.0)
for index in range(1000):
    source.emit(Annotation, label="kept")
begin = time.monotonic()
finished = source.close(2.0)
print(finished, time.monotonic() - begin)
"""


def test_no_aggregator(tmp_path: Path) -> None:
    """The client works, says so once, and is gone within two seconds of its end."""
    endpoint = f"ipc://{tmp_path}/nobody"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, endpoint], cwd=ROOT, capture_output=True, text=True
    )
    finished, seconds = done.stdout.split()
    assert done.returncode == 0
    assert finished == "False"
    assert float(seconds) < allowed(2.0)
    assert done.stderr.count("\n") == 1
    assert endpoint in done.stderr


def test_limits_are_counted_exactly(tmp_path: Path) -> None:
    """More records than memory and spool hold: each missing one is inside a `lost` record."""
    endpoint, path = f"ipc://{tmp_path}/trace", tmp_path / "out"
    source = tracer(endpoint, "executor", welcome_s=0.05, spool_mb=1, pending_records=1 << 11)
    count = 60_000
    for index in range(count):
        source.emit(records.Annotation, label="x" * 500)
        if index % 2000 == 0:
            time.sleep(0)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with aggregator(endpoint, descriptor):
        assert source.flush(PATIENCE_S)
        assert source.close(PATIENCE_S)
    os.close(descriptor)
    trace = read_file(path)
    lost = [line.record for line in trace.lines if isinstance(line.record, records.Lost)]
    missing = sum(one.last - one.first + 1 for one in lost)
    assert missing > 0
    assert missing + len(trace.lines) - len(lost) == count
    there = {line.record.seq for line in trace.lines}
    assert not any(seq in there for one in lost for seq in range(one.first, one.last + 1))
