"""hrxmp beside llama.cpp on the same file, same threads, in turns; writes benchmarks/README.md.

The peer is set up once, in an environment of its own (it compiles llama.cpp for this processor):

    python3 -m venv .peer && .peer/bin/pip install llama-cpp-python==0.3.36

On a virtual machine that lists AMX without enabling it, llama.cpp's own AMX code crashes: build
it with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON ..." there.

Usage: compare.py [--rounds 5] [--model FILE-OR-NAME ...] [--peer .peer/bin/python] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- compare: written by compare.py -->\n", "<!-- end of compare -->"
TESTS = {
    "tg128": ["-p", "0", "-n", "128"],
    "pp512": ["-p", "512", "-n", "0"],
    "pp64+tg16": ["-p", "0", "-n", "0", "-pg", "64,16"],
    "tg128 @ d2048": ["-p", "0", "-n", "128", "-d", "2048"],
}
REPETITIONS = "3"


def main() -> None:
    """Compare every test of every model; print as it goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", help="default: smollm2-135m")
    parser.add_argument("--test", action="append", choices=TESTS, help="default: all")
    parser.add_argument("--peer", type=Path, default=ROOT / ".peer" / "bin" / "python")
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/README.md"
    )
    args = parser.parse_args()
    if not args.peer.exists():
        sys.exit(f"{args.peer} is missing; set up the peer:\n{__doc__}")
    rows = []
    with tempfile.TemporaryDirectory() as store:
        environ = {**os.environ, "HRXMP_CACHE": store}
        for model in args.model or ["smollm2-135m"]:
            for test in args.test or TESTS:
                row = compare(args, path_of(model), test, environ)
                rows.append({"model": Path(model).stem, **row})
                print(json.dumps(rows[-1]), flush=True)
    table = markdown(rows)
    print(table)
    if args.write:
        head, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{head}{BEGIN}{table}{END}{rest.partition(END)[2]}")


def compare(
    args: argparse.Namespace, model: Path, test: str, environ: dict[str, str]
) -> dict[str, Any]:
    """One test in turns; medians, and the median of the ratios round by round."""
    ours, theirs = [], []
    hrxmp(model, test, environ)  # fills the store; not counted
    for _ in range(args.rounds):
        theirs.append(llamacpp(args.peer, model, test))
        ours.append(hrxmp(model, test, environ))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "test": test, "rounds": args.rounds,
        "hrxmp": statistics.median(ours), "llama.cpp": statistics.median(theirs),
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
    }  # fmt: skip


def hrxmp(model: Path, test: str, environ: dict[str, str]) -> float:
    """Median tokens/s of one process."""
    command = [sys.executable, "-m", "hrxmp", "run", "bench", "-m", str(model), *TESTS[test]]
    done = run([*command, "-r", REPETITIONS, "-o", "jsonl"], environ)
    return statistics.median(json.loads(done.splitlines()[-1])["samples_ts"])


def llamacpp(python: Path, model: Path, test: str) -> float:
    """Median tokens/s of one process of the peer."""
    script = str(ROOT / "benchmarks" / "llamacpp_peer.py")
    command = [str(python), script, str(model), *TESTS[test], "-t", str(os.cpu_count())]
    done = run([*command, "-r", REPETITIONS], dict(os.environ))
    return float(json.loads(done.splitlines()[-1])["median"])


def run(command: list[str], environ: dict[str, str]) -> str:
    """Standard output of a command; its errors end the comparison."""
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout


def path_of(model: str) -> Path:
    """A model file; known names are fetched."""
    from hrxmp.models import files

    return files.resolve(model)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table with machine, date and command."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in facts if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {cpu}, {os.cpu_count()} threads each; tokens a second, "
        "medians; the ratio is the median of the rounds' ratios (lowest to highest).",
        "",
        "| model | test | hrxmp | llama.cpp | ratio | rounds |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        lines.append(
            f"| {row['model']} | {row['test']} | {row['hrxmp']:.1f} | {row['llama.cpp']:.1f} "
            f"| **{row['ratio']:.2f}** ({spread}) | {row['rounds']} |"
        )
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
