"""The trace under long abuse: kills of the aggregator, a stopped reader, many sources.

    python benchmarks/trace_faults.py [--kills 100] [--sources 40]

Prints what was lost (nothing may be), what came twice, how late a source was told, and how much
memory the aggregator took with its reader stopped and every source full.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hrxmp.aggregator.check import check
from hrxmp.aggregator.reader import read
from hrxmp.records import Annotation
from tests.process.aggregator_process import AggregatorProcess, tracer
from tests.process.test_trace_order import PipeReader
from tests.process.test_trace_restart import kill_under_load


def kills(count: int) -> None:
    """Kill the aggregator so often under load."""
    with tempfile.TemporaryDirectory(prefix="hrxmp-faults-") as folder:
        begin = time.monotonic()
        report, _trace = kill_under_load(Path(folder), count, 2000 * count, seed=1)
        problems = [one for one in report.problems if one.kind != "late"]
        print(
            f"{count} kills in {time.monotonic() - begin:.0f} s: {report.records} records, "
            f"{len(problems)} problems, {report.repeats} repeats removed, {report.late} late"
        )
        for problem in problems[:10]:
            print("   ", problem)


def peak_mb(pid: int) -> float:
    """The most memory a process ever had."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text).group(1)) / 1024  # type: ignore[union-attr]


def stopped_reader(sources: int) -> None:
    """Every source emits 4 MB and more while nobody reads; then somebody does."""
    reader_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="hrxmp-faults-") as folder:
        endpoint = f"ipc://{folder}/trace"
        running = AggregatorProcess(endpoint, write_end)
        os.close(write_end)
        idle = peak_mb(running.process.pid)
        emitting = [tracer(endpoint, f"source-{n}", run=f"run-{n % 10}") for n in range(sources)]
        worst = 0
        for number in range(15_000):
            for source in emitting:
                begin = time.perf_counter_ns()
                source.emit(Annotation, label=f"{number:08d}" + "m" * 250)
                worst = max(worst, time.perf_counter_ns() - begin)
        time.sleep(1)
        peak = peak_mb(running.process.pid)
        reader = PipeReader(reader_end)
        closed = [source.close(60) for source in emitting]
        running.finish()
        lines = reader.finish()
    report = check(read(lines))
    print(
        f"{sources} sources, reader stopped: aggregator {idle:.0f} MB idle, {peak:.0f} MB at most; "
        f"slowest emit {worst / 1e6:.1f} ms; afterwards {report.records} of {sources * 15_000} "
        f"records, {len(report.problems)} problems, {closed.count(False)} sources not finished"
    )


def main() -> int:
    """Run both."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("--kills", type=int, default=100)
    line.add_argument("--sources", type=int, default=40)
    options = line.parse_args()
    kills(options.kills)
    stopped_reader(options.sources)
    return 0


if __name__ == "__main__":
    sys.exit(main())
