"""From process start to the first token: how long, where it goes, how it grows, more cores.

Usage: startup.py [PART ...] [--model smollm2-135m] [--rounds 5] [--workers N]. The parts:

times     cold with the pool, cold without it, warm; in turns, medians
where     one cold and one warm start taken apart, from the run's trace and from outside
growth    a cold start against the number of kernels, through a script on the public interface
schedule  a SIMULATION: the compiles of a real trace, laid onto 1 to 16 workers

Times are seen from outside: from exec of hrxmp-run to the first byte on its standard output. The
package's byte code is kept, as an installed one's is, in a folder of this script's own.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The capital of France is"
MODES: dict[str, list[str]] = {"asynchronous": [], "synchronous": ["--sync-jit"]}
KERNELS = (1, 4, 16, 32)
WORKERS = (1, 2, 4, 8, 16)
MANY_KERNELS = """
import sys
import numpy as np
import hrxmp
from hrxmp import Graph
graph, widths = Graph(uid=1), [512 + 16 * i for i in range(int(sys.argv[1]))]
inputs = {f"x{k}": np.ones((1, k), np.float32) for k in widths}
for k in widths:
    graph.output(graph.rms_norm(graph.input(f"x{k}", (1, k)), 1e-5), f"y{k}")
hrxmp.connect().execute(graph, inputs)
print("done", flush=True)
"""

Event = dict[str, Any]
Row = tuple[str, float]


class Bench:
    """Starts runs on a store of its own; `close` removes what they left."""

    def __init__(self, model: str, workers: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="startup-"))
        self.store = self.folder / "cold"
        self.full = self.folder / "full"
        """The store of warm starts: the kernels of prompt and decode are in it."""
        self.generate = ["generate", "-m", model, "-p", PROMPT, "-n", "1", "--temp", "0"]
        self.workers = workers
        self.environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.environ["PYTHONPYCACHEPREFIX"] = str(self.folder / "bytecode")

    def close(self) -> None:
        """Remove the store and everything else."""
        shutil.rmtree(self.folder)

    def fill(self) -> None:
        """Byte code, the model's pages in memory, and the full store."""
        longer = [*self.generate[:-4], "-n", "3", "--temp", "0"]
        for options in MODES.values():
            self.start(options, longer, warm=True)

    def start(self, options: Sequence[str], command: Sequence[str], *, warm: bool = False) -> Start:
        """Run to the end; when it began, when its first byte came. Cold: with an empty store."""
        store = self.full if warm else self.store
        shutil.rmtree(self.store, ignore_errors=True)
        line = [sys.executable, "-m", "hrxmp", "run", "--workers", self.workers, *options]
        line += ["--cache", str(store), *command]
        begin = time.monotonic_ns()
        process = subprocess.Popen(
            line, cwd=ROOT, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            bufsize=0,
        )  # fmt: skip
        assert process.stdout is not None
        zero = _zero_of(process.pid) if "--trace-output" in options else 0
        first = process.stdout.read(1)
        byte = time.monotonic_ns()
        process.stdout.read()
        if process.wait() or not first:
            raise SystemExit(f"{' '.join(line)} failed")
        return Start(begin, zero, byte)

    def traced(self, options: Sequence[str], *, warm: bool = False) -> tuple[Start, list[Event]]:
        """A run of `generate` and its trace."""
        path = self.folder / "trace"
        path.unlink(missing_ok=True)
        start = self.start(["--trace-output", str(path), *options], self.generate, warm=warm)
        return start, [json.loads(line) for line in path.read_text().splitlines()]


class Start:
    """Moments of one start, monotonic ns: exec, the zero of the trace's times, first byte."""

    def __init__(self, begin: int, zero: int, byte: int) -> None:
        self.begin, self.zero, self.byte = begin, zero, byte

    @property
    def seconds(self) -> float:
        """From exec to the first byte."""
        return (self.byte - self.begin) / 1e9


def _zero_of(launcher: int) -> int:
    """The launcher's monotonic begin, as it tells its executor on the command line."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
                if found := re.search(r"\0executor\0.*--begin\0(\d+)\0", line):
                    return int(found[1])
        time.sleep(0.002)
    raise SystemExit("no executor was started")


# -- times ---------------------------------------------------------------------------------------


def times(bench: Bench, rounds: int) -> None:
    """Medians of cold and warm starts, in turns."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for state, (mode, options) in itertools.product(("cold", "warm"), MODES.items()):
            seconds = bench.start(options, bench.generate, warm=state == "warm").seconds
            found.setdefault(f"{state}, {mode}", []).append(seconds)
    rows = [(name, spread(seconds)) for name, seconds in found.items()]
    print(table(["", "seconds (lowest to highest)"], rows))
    pairs = zip(found["cold, asynchronous"], found["cold, synchronous"], strict=True)
    print(f"\ncold, asynchronous / synchronous: {statistics.median(a / b for a, b in pairs):.2f}\n")


def spread(seconds: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


# -- where a start goes --------------------------------------------------------------------------


def where(bench: Bench, rounds: int) -> None:
    """A table of phases, one after the other, and what ran beside them; medians in ms."""
    columns: dict[str, list[list[Row]]] = {}
    for _ in range(rounds):
        for state, (mode, options) in itertools.product(("cold", "warm"), MODES.items()):
            phases, beside = taken_apart(*bench.traced(options, warm=state == "warm"))
            columns.setdefault(f"{state}, {mode}", []).append([*phases, *beside])
    names = [name for name, _ in next(iter(columns.values()))[0]]
    cells = {
        column: [statistics.median(run[i][1] for run in runs) for i in range(len(names))]
        for column, runs in columns.items()
    }
    rows = [(n, *(f"{cells[c][i]:.0f}" for c in cells)) for i, n in enumerate(names)]
    print(table(["traced starts, ms", *cells], rows))
    print("\nAlone, each in a process of its own that is otherwise warm, ms:\n")
    print(table(["what", "ms"], [(name, f"{ms:.0f}") for name, ms in alone(bench)]), "\n")


def taken_apart(start: Start, trace: Sequence[Event]) -> tuple[list[Row], list[Row]]:
    """Phases of a start that follow each other, and figures beside them, in ms."""
    at = first_times(trace)
    session = next(e["incarnation"] for e in trace if e["event"] == "run-begin")
    marks = [
        ("launcher, until it starts the others", start.begin, start.zero),
        ("executor: interpreter, imports", start.zero, session),
        ("executor: file, tokenizer; device", session, start.zero + at["run-begin"]),
        ("graph, memory, requests; weights", at["run-begin"], at["graph-begin"]),
        ("first execution: waits, loads, runs", at["graph-begin"], at["graph-end"]),
        ("sampling, text, first byte", start.zero + at["graph-end"], start.byte),
    ]
    phases = [(name, (end - begin) / 1e6) for name, begin, end in marks]
    needed = compiles(trace)
    ends = [e["t_ns"] for e in trace if e["event"] == "compile-end" and e["request"] in needed]

    def total(event: str, column: str) -> float:
        found = (e[column] for e in trace if e["event"] == event and e["exec"] == 1)
        return float(sum(found)) / 1e6

    beside = [
        ("whole", (start.byte - start.begin) / 1e6),
        ("first compile begins at", _since(start, at.get("compile-begin"))),
        ("last compile that is needed ends at", _since(start, max(ends, default=None))),
        ("kernels compiled for it", len(needed)),
        ("their compiles, added up", sum(needed.values())),
        ("waits for them, added up", total("wait-end", "dur_ns")),
        ("loads of their binaries, added up", total("kernel-load", "load_ns")),
    ]
    return phases, [(name, float(value)) for name, value in beside]


def first_times(trace: Iterable[Event]) -> dict[str, int]:
    """When each event came first, ns from the trace's zero."""
    found: dict[str, int] = {}
    for event in trace:
        found.setdefault(event["event"], event["t_ns"])
    return found


def _since(start: Start, t_ns: int | None) -> float:
    """A moment of the trace in ms from exec; 0 when there is none."""
    return 0.0 if t_ns is None else (start.zero + t_ns - start.begin) / 1e6


def compiles(trace: Sequence[Event]) -> dict[int, float]:
    """Milliseconds from begin to end of each compile that the first execution needs, in the order
    of asking, by request."""
    keys = {e["key"] for e in trace if e["event"] == "compile-request" and e["exec"] == 1}
    asked = [
        e["request"]
        for e in trace
        if e["event"] == "compile-request" and e["via"] == "compile" and e["key"] in keys
    ]
    begun = {e["request"]: e["t_ns"] for e in trace if e["event"] == "compile-begin"}
    ended = {e["request"]: e["t_ns"] for e in trace if e["event"] == "compile-end"}
    return {request: (ended[request] - begun[request]) / 1e6 for request in asked}


ALONE: Mapping[str, str] = {
    "interpreter and the launcher's imports": "import hrxmp.launcher",
    "the same, pool process": "import hrxmp.workers.main",
    "the same, executor": "import hrxmp.executor.session, hrxmp.workloads.generate",
    "the same, worker, with pyopencl": "import hrxmp.workers.compiling, pyopencl",
    "device found and opened": "from hrxmp.kernels.device import open_device, prepare_loader\n"
    "from hrxmp.kernels.loader import opencl\nprepare_loader(); opencl()\nlap()\n"
    "open_device(None, probed=False)",
    "model file opened": "from hrxmp.models import files\n"
    "from hrxmp.models.gguf_file import GgufFile\npath = files.resolve(sys.argv[1])\nlap()\n"
    "GgufFile.open(path)",
    "tokenizer made": "import tokenizers\nfrom hrxmp.models import files\n"
    "from hrxmp.models.gguf_file import GgufFile\nfrom hrxmp.models.tokenizer import Tokenizer\n"
    "file = GgufFile.open(files.resolve(sys.argv[1]))\nlap()\nTokenizer.from_gguf(file)",
}
"""What is measured outside of a run: from `lap()` on, or from the start of the process."""


def alone(bench: Bench) -> list[Row]:
    """Each step's milliseconds in a process of its own, the best of five."""
    model = bench.generate[2]
    environ = {**bench.environ, "OPENBLAS_NUM_THREADS": "1"}
    rows = []
    for name, code in ALONE.items():
        program = (
            "import sys, time\nfrom time import monotonic_ns\nbegin = int(sys.argv[2])\n"
            "def lap():\n    global begin\n    begin = monotonic_ns()\n"
            f"{code}\nprint(monotonic_ns() - begin)"
        )
        best = min(_child(program, model, environ) for _ in range(5))
        rows.append((name, best / 1e6))
    return rows


def _child(program: str, model: str, environ: Mapping[str, str]) -> int:
    line = [sys.executable, "-c", program, model, str(time.monotonic_ns())]
    return int(subprocess.check_output(line, cwd=ROOT, env=environ))


# -- growth --------------------------------------------------------------------------------------


def growth(bench: Bench, rounds: int) -> None:
    """Cold starts of a script whose graph has k distinct kernels; medians."""
    script = bench.folder / "many_kernels.py"
    script.write_text(MANY_KERNELS)
    rows = []
    for kernels in KERNELS:
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _, (mode, options) in itertools.product(range(rounds), MODES.items()):
            found[mode].append(bench.start(options, [str(script), str(kernels)]).seconds)
        middle = {mode: statistics.median(seconds) for mode, seconds in found.items()}
        ratio = middle["asynchronous"] / middle["synchronous"]
        rows.append((str(kernels), *(f"{middle[mode]:.2f}" for mode in MODES), f"{ratio:.2f}"))
    print(table(["kernels, cold, s", *MODES, "ratio"], rows), "\n")


# -- schedule ------------------------------------------------------------------------------------


def schedule(bench: Bench, rounds: int) -> None:
    """SIMULATED makespans of a real trace's compiles; the trace with the median sum counts."""
    traces = []
    for _ in range(rounds):
        _, trace = bench.traced(["--workers", "1"])
        traces.append([*compiles(trace).values()])
    lengths = sorted(traces, key=sum)[rounds // 2]
    print(
        f"Simulated, not measured: the {len(lengths)} compiles of a real cold start with one "
        f"worker ({sum(lengths):.0f} ms), laid onto more workers of one speed, all ready at once:\n"
    )
    orders = {"as asked for": lengths, "longest first": sorted(lengths, reverse=True)}
    rows = [
        (name, *(f"{makespan(order, workers):.0f}" for workers in WORKERS))
        for name, order in orders.items()
    ]
    print(table(["ms until the last is done, workers:", *map(str, WORKERS)], rows), "\n")


def makespan(lengths: Iterable[float], workers: int) -> float:
    """When the last job ends, when each goes in order to the worker that is free first."""
    if workers < 1:
        raise ValueError(f"{workers} workers")
    free = [0.0] * workers
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


PARTS = {"times": times, "where": where, "growth": growth, "schedule": schedule}


def main() -> None:
    """Measure and print the parts that are asked for, all by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="0")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    bench = Bench(args.model, args.workers)
    try:
        bench.fill()
        for part in args.parts or PARTS:
            PARTS[part](bench, args.rounds)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
