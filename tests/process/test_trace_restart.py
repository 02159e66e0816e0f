"""The aggregator dies, a source dies, a reader stops: what the trace holds then (X36 and kin)."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

from hrxmp import records
from hrxmp.aggregator.check import Report, check
from hrxmp.aggregator.reader import Trace, read, read_file
from tests.process.aggregator_process import PATIENCE_S, AggregatorProcess, aggregator, tracer
from tests.process.test_trace_order import PipeReader, ends, start, start_pair

KILLS = 6
COUNT = 20_000
EXECUTIONS = 300


def output(path: Path) -> int:
    """A file that several lives of an aggregator share as their stderr."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def kill_under_load(folder: Path, kills: int, count: int, seed: int) -> tuple[Report, Trace]:
    """Kill the aggregator at random moments while five sources emit; what is in the file then."""
    endpoint, path = f"ipc://{folder}/trace", folder / "stderr"
    descriptor = output(path)
    running = AggregatorProcess(endpoint, descriptor)
    sources = [start("stream", endpoint, "run-s", f"source-{n}", str(count)) for n in range(3)]
    sources += start_pair(endpoint, "run-p", EXECUTIONS, 2500)
    chance = random.Random(seed)
    most = count * 3 * 300 * 2 // kills  # so that the kills spread over the whole run
    for _ in range(kills):
        _until_grown(path, path.stat().st_size + chance.randrange(1, most), sources)
        running.kill()
        running = AggregatorProcess(endpoint, descriptor)
    assert ends(sources) == [0] * 5
    assert running.finish() == 0
    os.close(descriptor)
    trace = read_file(path)
    counts = Counter(line.record.source for line in trace.lines)
    assert [counts[f"source-{n}"] for n in range(3)] == [count] * 3
    return check(trace), trace


def _until_grown(path: Path, size: int, sources: list) -> None:
    """Return when the file is that large, or when no source is left to make it grow."""
    event = threading.Event()
    while path.stat().st_size < size and any(one.poll() is None for one in sources):
        event.wait(0.005)


def test_killed_and_restarted_loses_nothing(tmp_path: Path) -> None:
    """Kills at random moments under load: all records are there, repeats are byte-identical."""
    report, _trace = kill_under_load(tmp_path, KILLS, COUNT, seed=36)
    assert report.problems == []
    assert report.executions == EXECUTIONS


def test_killed_source_gets_its_ends(tmp_path: Path) -> None:
    """A source that dies inside an execution: the aggregator closes it and says so."""
    endpoint = f"ipc://{tmp_path}/trace"
    reader = PipeReader()
    with aggregator(endpoint, reader.write_end, "--exit-when-idle") as running:
        assert ends([start("die", endpoint)]) == [-signal.SIGKILL]
        assert running.process.wait(PATIENCE_S) == 0
    trace = read(reader.finish())
    made_up = [line.record for line in trace.lines if line.record.source == "aggregator"]
    assert [type(one) for one in made_up] == [
        records.Lost,
        records.CompileEnd,
        records.WaitEnd,
        records.GraphEnd,
    ]
    assert [one.exec_id for one in made_up] == [None, 7, 7, 7]
    assert all(one.synthetic and one.outcome == "lost" for one in made_up[1:])
    assert check(trace).problems == []


def test_stopped_reader_does_not_stop_the_source(tmp_path: Path) -> None:
    """Nobody reads the pipe: emitting goes on, and all is written once somebody reads."""
    endpoint = f"ipc://{tmp_path}/trace"
    read_end, write_end = os.pipe()
    with aggregator(endpoint, write_end):
        os.close(write_end)
        source = tracer(endpoint, "executor")
        for index in range(COUNT):
            source.emit(records.Annotation, label=f"{index}" + "z" * 200)
        lines: list[bytes] = []
        pipe = os.fdopen(read_end, "rb")
        thread = threading.Thread(target=lambda: lines.extend(pipe))
        thread.start()
        assert source.close(PATIENCE_S)
    thread.join(PATIENCE_S)
    pipe.close()
    report = check(read(lines))
    assert report.problems == []
    assert report.records == COUNT


def test_reader_gone_for_good(tmp_path: Path) -> None:
    """The pipe is closed: the aggregator lives and lets its sources end."""
    endpoint = f"ipc://{tmp_path}/trace"
    read_end, write_end = os.pipe()
    with aggregator(endpoint, write_end) as running:
        os.close(write_end)
        os.close(read_end)
        source = tracer(endpoint, "executor")
        source.emit(records.Annotation, label="nobody will see this")
        assert source.close(PATIENCE_S)
        assert running.finish() == 0


def test_a_flood_does_not_starve_the_others(tmp_path: Path) -> None:
    """While one source sends as fast as it can, another one's records are through in time."""
    endpoint = f"ipc://{tmp_path}/trace"
    with aggregator(endpoint, os.open(os.devnull, os.O_WRONLY)):
        flood = start("stream", endpoint, "run-f", "flood", "300000")
        quiet = tracer(endpoint, "quiet")
        rounds = 0
        while flood.poll() is None:
            quiet.emit(records.Annotation, label="still here")
            assert quiet.flush(PATIENCE_S)
            rounds += 1
        assert quiet.close(PATIENCE_S)
        assert flood.returncode == 0
    assert rounds > 3
