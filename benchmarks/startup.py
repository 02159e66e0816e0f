"""From process start to the first token: cold with the pool, cold without it, warm; in turns.

Usage: startup.py [--model smollm2-135m] [--rounds 5] [--workers N]. Prints a table. The times
are seen from outside: from exec of hrxmp-run to the first byte on its standard output.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The capital of France is"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="0")
    args = parser.parse_args()
    store = Path(tempfile.mkdtemp()) / "store"
    options = {
        "cold, asynchronous": ["--workers", args.workers],
        "cold, synchronous": ["--sync-jit"],
        "warm, asynchronous": ["--workers", args.workers],
        "warm, synchronous": ["--sync-jit"],
    }
    times: dict[str, list[float]] = {name: [] for name in options}
    for _ in range(args.rounds):
        for name, extra in options.items():
            if name.startswith("cold"):
                shutil.rmtree(store, ignore_errors=True)
            times[name].append(first_byte([*extra, "--cache", str(store)], args.model))
    shutil.rmtree(store.parent)
    for name, seconds in times.items():
        low, high = min(seconds), max(seconds)
        print(f"{name:20} {statistics.median(seconds):6.2f} s  ({low:.2f} to {high:.2f})")
    pairs = zip(times["cold, asynchronous"], times["cold, synchronous"], strict=True)
    print(f"cold, asynchronous / synchronous: {statistics.median(a / b for a, b in pairs):.2f}")


def first_byte(options: list[str], model: str) -> float:
    """Seconds from start to the first byte of text."""
    command = [sys.executable, "-m", "hrxmp", "run", *options, "generate", "-m", model,
               "-p", PROMPT, "-n", "1", "--temp", "0"]  # fmt: skip
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.stdout.read()
    if process.wait() or not first:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds


if __name__ == "__main__":
    main()
