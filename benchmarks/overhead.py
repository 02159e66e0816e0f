"""What tracing costs: off, on, and in system calls. Prints a table; `--json` prints the numbers.

off    the checks that a warm execution makes although tracing is off, in nanoseconds
on     tg128 traced and untraced, in pairs of runs, the median of the pairs' differences; what the
       two records of a warm execution take; and in one process, where token after token is decoded
       with the tracer and without it in turns, which a busy machine disturbs less
calls  system calls of 200 warm executions (strace): the executor's own against the bare launches
       of the same prepared program

Usage: overhead.py [--rounds 5] [--model smollm2-135m] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RUN = [sys.executable, "-m", "hrxmp", "run"]
CHECKS = 2
"""Tests of the tracer in a warm execution: at its begin and at its end."""
EXECUTIONS = 200


def main() -> None:
    """Measure all three, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls-of", choices=("executor", "launches"), help=argparse.SUPPRESS)
    parser.add_argument("--paired", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.paired:
        print(json.dumps(decode_in_turns(args.paired, args.rounds)))
        return
    if args.calls_of:
        warm_executions(bare=args.calls_of == "launches")
        return
    found = {"off_ns": off(), **paired(args.model, args.rounds)}
    found |= {**on(args.model, args.rounds), **calls()}
    if args.json:
        print(json.dumps(found))
        return
    print("| what | measured |\n| --- | --- |")
    for name, value in found.items():
        print(f"| {name} | {value} |")


# -- off -------------------------------------------------------------------------------------


def off() -> float:
    """Nanoseconds of the disabled checks of one execution: attribute, comparison, no branch."""

    class Holder:
        tracer = None

    holder = Holder()
    holder.tracer = None
    number = 2_000_000
    names = {"holder": holder}
    check = "tracer = holder.tracer\nif tracer is not None: raise SystemExit"
    with_check = min(timeit.repeat(check, number=number, globals=names, repeat=7))
    without = min(timeit.repeat("pass", number=number, repeat=7))
    return round((with_check - without) / number * 1e9 * CHECKS, 1)


# -- on --------------------------------------------------------------------------------------


def on(model: str, rounds: int) -> dict[str, Any]:
    """tg128 without and with tracing, in pairs of runs: tokens a second, and the difference."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(rounds + 1):
            for traced in (False, True) if round_ % 2 else (True, False):
                rates = tg128(model, Path(folder), traced)
                if round_:  # the first fills the store
                    samples[traced].append(statistics.median(rates))
    plain, traced_rate = (statistics.median(samples[traced]) for traced in (False, True))
    costs = [(1 - on / off) * 100 for off, on in zip(samples[False], samples[True], strict=True)]
    return {
        "tg128_untraced": round(plain, 2),
        "tg128_traced": round(traced_rate, 2),
        "tg128_cost_percent": round(statistics.median(costs), 2),
        "tg128_cost_percent_by_round": sorted(round(cost, 2) for cost in costs),
    }


def tg128(model: str, folder: Path, traced: bool) -> list[float]:
    """Tokens a second of each sample of one bench."""
    trace = ["--trace", "--trace-output", str(folder / "trace")] if traced else []
    command = [*RUN, "--cache", str(folder / "store"), *trace, "bench", "-m", model]
    command += ["-p", "0", "-n", "128", "-r", "5", "-o", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)
    return list(row["samples_ts"])


def paired(model: str, rounds: int) -> dict[str, Any]:
    """The same process, tracer on and off in turns."""
    with tempfile.TemporaryDirectory() as folder:
        trace = ["--trace", "--trace-output", str(Path(folder) / "trace")]
        command = [*RUN, *trace, __file__, "--paired", model, "--rounds", str(rounds)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def decode_in_turns(model: str, rounds: int) -> dict[str, Any]:
    """Medians of a decode's time: without the tracer, again without (the noise), and with it.

    The three take turns token by token, each first, second and third equally often.
    """
    import hrxmp
    from hrxmp.models import files
    from hrxmp.models.generator import LlamaModel

    executor = hrxmp.connect()
    llama = LlamaModel.load(executor, files.resolve(model), context=256)
    tracer = executor.tracer
    modes = {"off": None, "off again": None, "on": tracer}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    llama.prefill(list(range(1, 17)))
    for token in range(rounds * 128):
        turn = token % len(modes)
        for mode in [*modes][turn:] + [*modes][:turn]:
            executor.tracer = modes[mode]
            llama.length = 16 + token % 128
            begin = time.perf_counter()
            llama.decode(token % 1000 + 1)
            times[mode].append(time.perf_counter() - begin)
    executor.tracer = tracer
    plain, again, traced = (statistics.median(found) for found in times.values())
    return {
        "paired_token_us": round(plain * 1e6, 1),
        "paired_cost_percent": round((traced / plain - 1) * 100, 2),
        "paired_noise_percent": round((again / plain - 1) * 100, 2),
        "paired_tokens": len(times["on"]),
        "records_us": round(records_us(tracer), 2),
    }


def records_us(tracer: Any) -> float:
    """Microseconds that the two records of a warm execution take the executor."""
    from hrxmp import records

    begin_fields = {"uid": 3, "nodes": 1000}
    flags = dict.fromkeys(("program_hit", "prepared_hit", "replayed"), True)
    names = ("requests", "compiles", "joins", "disk_hits", "memory_hits", "driver_compiles")
    counts = dict.fromkeys((*names, "failures", "waits", "wait_ns"), 0)
    end_fields = {"uid": 3, "outcome": "ok", "error": None, "program": 1, "dur_ns": 10**7}
    taken = []
    for exec_id in range(10**9, 10**9 + 2000):
        begin = time.perf_counter()
        tracer.emit(records.GraphBegin, exec_id=exec_id, **begin_fields)
        tracer.emit(records.GraphEnd, exec_id=exec_id, **end_fields, **flags, **counts)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


# -- system calls ----------------------------------------------------------------------------


def calls() -> dict[str, Any]:
    """System calls of warm executions with tracing off, by strace; nothing when it is missing."""
    if shutil.which("strace") is None:
        return {"system_calls": "strace is not installed"}
    return {f"calls_of_{kind}": counted(kind) for kind in ("launches", "executor")}


def counted(kind: str) -> dict[str, int]:
    """Calls by name between two marks in the main thread of a child."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = ["strace", "-o", str(log), sys.executable, __file__, "--calls-of", kind]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
        lines = log.read_text(errors="replace").splitlines()
    first, last = (n for n, line in enumerate(lines) if 'access("/hrxmp-mark"' in line)
    names = [line.split("(", 1)[0] for line in lines[first + 1 : last] if "(" in line]
    return {name: names.count(name) for name in sorted(set(names))}


def warm_executions(*, bare: bool) -> None:
    """Run a small graph many times between two marks that strace shows."""
    import hrxmp
    from hrxmp import Graph

    graph = Graph(uid=1)
    x = graph.input("x", (64,))
    graph.output(graph.scale(graph.scale(x, 2.0), 0.5), "y")
    inputs = {"x": np.ones(64, np.float32)}
    executor = hrxmp.connect()
    for _ in range(20):
        executor.execute(graph, inputs)
    (prepared,) = executor._prepared.values()
    os.access("/hrxmp-mark", os.F_OK)
    for _ in range(EXECUTIONS):
        if bare:
            prepared.write_inputs(inputs)
            prepared.launch_all()
            prepared.read_outputs()
        else:
            executor.execute(graph, inputs)
    os.access("/hrxmp-mark", os.F_OK)


if __name__ == "__main__":
    main()
