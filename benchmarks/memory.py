"""Peak memory of a run, by process, and what the executor's is made of.

Usage: memory.py [--model smollm2-135m] [--rest ARG ...]. Runs `hrxmp-run bench` and reads /proc 50
times a second. Peaks are VmHWM; the parts are the executor's /proc/PID/smaps when it held most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
_LARGE = 4 * MIB


class Watch:
    """What was seen of the run's processes."""

    def __init__(self) -> None:
        self.peaks: dict[int, tuple[str, int]] = {}
        self.most = 0
        self.parts: Counter[str] = Counter()

    def look(self, pid: int) -> None:
        """Read one process; the parts of the executor when it holds more than before."""
        folder = Path(f"/proc/{pid}")
        words = (folder / "cmdline").read_bytes().decode().split("\0")
        role = words[words.index("hrxmp") + 1] if "hrxmp" in words else words[0]
        status = dict(re.findall(r"(Vm\w+):\s+(\d+) kB", (folder / "status").read_text()))
        peak = max(int(status["VmHWM"]) << 10, self.peaks.get(pid, ("", 0))[1])
        self.peaks[pid] = (role, peak)
        if role == "executor" and int(status["VmRSS"]) << 10 > self.most:
            self.most = int(status["VmRSS"]) << 10
            self.parts = _parts((folder / "smaps").read_text())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    args, rest = parser.parse_known_args()
    command = [sys.executable, "-m", "hrxmp", "run", "bench", "-m", args.model,
               *(rest or ["-p", "64", "-n", "64", "-r", "2"])]  # fmt: skip
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    watch = Watch()
    while run.poll() is None:
        for pid in _descendants(run.pid):
            with contextlib.suppress(OSError, KeyError):  # it ends while we look
                watch.look(pid)
        time.sleep(0.02)
    _print(watch)
    raise SystemExit(run.returncode)


def _print(watch: Watch) -> None:
    for role, peak in sorted(watch.peaks.values(), key=lambda item: -item[1]):
        print(f"{peak / 1e6:8.1f} MB  {role}")
    print(f"{sum(peak for _, peak in watch.peaks.values()) / 1e6:8.1f} MB  sum of peaks")
    print(f"the executor at {watch.most / 1e6:.1f} MB:")
    for part, nbytes in watch.parts.most_common(12):
        print(f"{nbytes / 1e6:8.1f} MB  {part}")


def _descendants(root: int) -> list[int]:
    """`root` and all processes below it."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{name}/stat").read_text()
                parents[int(name)] = int(text.rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _parts(smaps: str) -> Counter[str]:
    """Resident bytes by what is mapped: large anonymous regions, the heap, each library."""
    sizes: Counter[str] = Counter()
    name = ""
    for line in smaps.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            large = "large regions (weights, cache)" if end - begin >= _LARGE else "other anonymous"
            name = Path(words[5]).name if len(words) > 5 else large
        elif words[0] == "Rss:":
            sizes[name] += int(words[1]) << 10
    return sizes


if __name__ == "__main__":
    main()
