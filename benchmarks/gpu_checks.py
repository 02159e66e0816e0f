"""What a GPU must do besides being fast: `python -m benchmarks.gpu_checks STEP --device SPEC ...`.

The steps of `gpu.sh` that are right or wrong: each starts whole runs and prints a row a finding,
`ok` or `WRONG` first. What the runs said goes to stderr, in full. On a processor the steps work
too, and expect there what a processor does.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hrxmp.aggregator import reader
from hrxmp.aggregator.check import check
from hrxmp.errors import DeviceNotFoundError, HrxmpError
from hrxmp.kernels.device import DeviceInfo, list_devices, open_device, prepare_loader, select
from hrxmp.records import (
    CompileBegin,
    CompileRequested,
    GraphEnd,
    RunBegin,
    RunEnd,
    SanitizerFinding,
)
from tests.process.aggregator_process import aggregator
from tests.process.pool_fixture import running_pool
from tests.process.run_process import FORBIDDEN, PROGRAMS, ROOT, Finished, hrxmp_run

_RUN_S = 120.0
_MEMORY = Path(__file__).parent / "gpu_memory.py"
_SOUND = PROGRAMS / "three_kernels.py"
_FAULT = PROGRAMS / "kernel_fault.py"
_WRONG = {
    "a wrong index": "99",
    "a wrong PCI address": "ffff:1f:1f.0",
    "a wrong UUID": "GPU-00000000-0000-0000-0000-000000000000",
    "a wrong name": "no such device",
}
_WIDTH = 120
"""Of a row's text; the log has all of it."""


class Row(msgspec.Struct, frozen=True):
    """One line of the table."""

    label: str
    right: bool
    text: str

    def __str__(self) -> str:
        return f"{self.label:36} {'ok' if self.right else 'WRONG':5} {self.text[:_WIDTH]}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps work on."""

    device: str
    model: Path
    out: Path
    """Traces that are kept."""
    folder: Path
    """For what is not kept."""

    @property
    def store(self) -> Path:
        """A kernel store that all steps share."""
        return self.folder / "store"

    def bench(self, flags: str) -> tuple[str | Path, ...]:
        """A bench of the model in JSON lines."""
        return ("bench", "-m", self.model, "-o", "jsonl", *flags.split())

    def run(
        self, *args: str | Path, cache: Path | str = "", device: str = "", **environ: str
    ) -> Finished:
        """A traced run, told on stderr. subprocess.TimeoutExpired when it hangs."""
        packages = os.environ.get("PYTHONPATH", "")  # hrxmp_run leaves it out
        environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}".rstrip(os.pathsep), **environ}
        done = hrxmp_run(
            "--trace", *args, cache=cache or self.store, device=device or self.device,
            environ=environ, timeout_s=_RUN_S,
        )  # fmt: skip
        print(f"$ {' '.join(map(str, args))}: exit code {done.code}", file=sys.stderr)
        print(*done.said, done.stdout.strip(), sep="\n", file=sys.stderr, flush=True)
        return done


def _error(done: Finished) -> str:
    """The line that says why a run ended."""
    lines = [line for line in done.said if "error [" in line or "was ended by" in line]
    return lines[-1] if lines else "no error was told"


def _whole(done: Finished) -> str:
    """What is wrong with a run's trace; empty when it is whole."""
    problems = check(done.trace).problems
    return "" if not problems else f"trace: {problems[0].kind} {problems[0].text}"


def _failure(label: str, done: Finished, code: int, name: str, *more: str) -> Row:
    """A run that must end with this exit code, these texts on stderr and a whole trace."""
    said, torn = _error(done), _whole(done)
    told = all(text in said for text in (name, *more))
    text = f"exit code {done.code}, {torn or 'trace whole'}, {name if told else said}"
    return Row(label, done.code == code and told and not torn, text)


def _still_works(job: Job) -> Row:
    done = job.run(_SOUND)
    return Row("... and the next run on the device", done.stdout == "right\n", done.stdout.strip())


# -- steps ---------------------------------------------------------------------------------------


def pinning(job: Job) -> Iterator[Row]:
    """`--device` by each name that the device has, and by some that nobody has."""
    devices = list_devices(probed=False)
    info = select(job.device, devices)
    for kind, spec in _names(info):
        done = job.run(_SOUND, device=spec)
        begun = done.records(RunBegin)
        same = [(run.device, run.device_uuid) for run in begun] == [(info.name, info.uuid)]
        shared = sum(spec.lower() in other.label.lower() for other in devices) > 1
        if kind in ("name", "label") and shared:  # a machine with equal devices
            yield _failure(f"--device by {kind}", done, 1, "[device-ambiguous]")
        else:
            right = done.stdout == "right\n" and same
            yield Row(f"--device by {kind}", right, f"{spec}{'' if right else '; ' + _error(done)}")
    for kind, spec in _WRONG.items():
        done = job.run(_SOUND, device=spec)
        yield _failure(f"--device by {kind}", done, 1, "[device-not-found]")


def _names(info: DeviceInfo) -> list[tuple[str, str]]:
    names = [("index", str(info.index)), ("name", info.name), ("label", info.label)]
    if info.pci:
        names.append(("PCI address", info.pci))
    if info.pci.startswith("0000:"):
        names.append(("short PCI address", info.pci.removeprefix("0000:")))
    if info.uuid:
        names.append(("UUID", info.uuid))
    return names + _names_of_nvidia_smi(info)


def _names_of_nvidia_smi(info: DeviceInfo) -> list[tuple[str, str]]:
    command = ["nvidia-smi", "--query-gpu=pci.bus_id,uuid", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = [line.split(", ") for line in lines.stdout.splitlines() if info.uuid in line]
    kinds = ("nvidia-smi's bus id", "nvidia-smi's UUID")
    return [(kind, name) for pair in pairs for kind, name in zip(kinds, pair, strict=True)]


def two_runs(job: Job) -> Iterator[Row]:
    """Two runs at once that share the device, a pool daemon, a store and an aggregator."""
    bench = job.bench("-p 64 -n 256 -r 16 -ctk f16 -ctv f16")
    path = job.out / "two-runs.jsonl"
    path.unlink(missing_ok=True)  # the aggregator appends
    workers = min(16, os.cpu_count() or 1)
    with running_pool(compiler="", workers=workers, trace_compile=True) as pool:
        store = pool.settings.cache
        endpoint = f"ipc://{job.folder}/trace"
        with aggregator(endpoint, sys.stderr.fileno(), "--output", str(path)):
            shared = ("--pool", pool.endpoint, "--aggregator", endpoint, *bench)
            with ThreadPoolExecutor(2) as threads:
                both = list(threads.map(lambda _: job.run(*shared, cache=store), range(2)))
    alone = job.run(*bench, cache=job.store)
    speeds = " and ".join(f"{_decode_speed(done):.1f}" for done in both)
    yield Row(
        "two runs at once, tg256",
        [done.code for done in both] == [0, 0],
        f"{speeds} t/s (alone {_decode_speed(alone):.1f})",
    )
    trace = reader.read_file(path)
    report = check(trace)
    ends = [line.record.status for line in trace.lines if isinstance(line.record, RunEnd)]
    via = Counter(r.record.via for r in trace.lines if isinstance(r.record, CompileRequested))
    yield Row(
        "... their trace, of one aggregator",
        report.ok and report.runs == 2 and ends == ["ok", "ok"],
        f"{report.runs} runs, {report.records} records, {len(report.problems)} problems; "
        f"kernels {', '.join(f'{name} {count}' for name, count in sorted(via.items()))}",
    )


def _decode_speed(done: Finished) -> float:
    rows = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    return next((float(row["avg_ts"]) for row in rows if row["n_gen"]), 0.0)


def memory(job: Job) -> Iterator[Row]:
    """More memory than there is."""
    done = job.run(_MEMORY)
    row = _failure("out of device memory", done, 1, "[device-memory]", "held so far: weight")
    yield Row(row.label, row.right, f"{row.text}, {_error(done).partition('; ')[2]}")
    yield _still_works(job)


def fault(job: Job) -> Iterator[Row]:
    """A kernel that reads far outside, at its first launch and in a replay."""
    on_cpu = select(job.device, list_devices(probed=False)).kind == "cpu"
    code, name = (139, "(SIGSEGV)") if on_cpu else (1, "[device-fault]")
    for when in ("first", "replay"):
        label = f"kernel fault, {when} launch"
        with tempfile.TemporaryDirectory(dir=job.folder) as copy:
            try:
                done = job.run("--sync-jit", _FAULT, when, copy)
            except subprocess.TimeoutExpired:
                yield Row(label, False, f"hung: {_RUN_S:.0f} s")
                continue
        row = _failure(label, done, code, name)
        ends = ", ".join(end.outcome for end in done.records(GraphEnd))
        yield Row(row.label, row.right, f"{row.text}, executions {ends or 'none'}")
    yield _still_works(job)


def sanitizer(job: Job) -> Iterator[Row]:
    """Every kernel of the model is clean, and a planted fault is found."""
    done = job.run(*job.bench("-p 64 -n 4 -r 1 --no-warmup"), HRXMP_SANITIZER="all")
    found = done.records(SanitizerFinding)
    right = done.code == 0 and not found and bool(done.records(GraphEnd))
    text = f"{len(done.records(GraphEnd))} executions, {len(found)} findings"
    yield Row("sanitizer, the model", right, text if not done.code else f"{text}; {_error(done)}")
    with tempfile.TemporaryDirectory(dir=job.folder) as copy:
        done = job.run("--sync-jit", _FAULT, "replay", copy, HRXMP_SANITIZER="access")
    yield _failure("sanitizer, the planted fault", done, 1, "[sanitizer]")


def guard(job: Job) -> Iterator[Row]:
    """After `warm`, `--on-compile error` has nothing to refuse; with an empty store it refuses."""
    store = job.folder / "warmed"
    warmed = job.run("warm", "-m", job.model, "-ub", "64", "-ctk", "f16", cache=store)
    yield Row("warm", warmed.code == 0, (warmed.stdout.splitlines() or [_error(warmed)])[-1])
    flags = "-p 1,9,64 -n 3 -ub 64 -ctk f16 -ctv f16 -r 1 --no-warmup"
    bench = ("--on-compile", "error", *job.bench(flags))
    done = job.run(*bench, cache=store)
    ends, begun = done.records(GraphEnd), done.records(CompileBegin)
    behind = sum(end.driver_compiles for end in ends)
    yield Row(
        "--on-compile error, warm",
        done.code == 0 and bool(ends) and not begun and not behind and not _whole(done),
        f"{len(ends)} executions, {len(begun)} compiles, {behind} by the driver"
        + (f"; {_error(done)}" if done.code else ""),
    )
    refused = job.run(*bench, cache=job.folder / "empty")
    yield _failure("--on-compile error, cold", refused, FORBIDDEN, "[compile-forbidden]")


STEPS = {
    step.__name__.replace("_", "-"): step
    for step in (pinning, two_runs, memory, fault, sanitizer, guard)
}


def _about(what: str, device: str) -> str:
    """What the script asks before its steps."""
    devices = list_devices(probed=False)
    if what == "first-gpu":
        gpus = [str(info.index) for info in devices if info.kind == "gpu"]
        if not gpus:
            raise DeviceNotFoundError("there is no GPU here", remedy="DEVICE=... takes another")
        return gpus[0]
    info = select(device, devices)
    if what == "form":
        return open_device(str(info.index), probed=False).traits.form
    memory = f"{info.memory_bytes / 1e9:.1f} GB"
    return f"{info.label}, {info.version}, driver {info.driver}, {memory}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_checks")
    parser.add_argument("step", choices=[*STEPS, "first-gpu", "device", "form"])
    parser.add_argument("--device", default="", help="as of hrxmp-run")
    parser.add_argument("--model", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=Path(), help="folder for traces")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # clean up
    prepare_loader()
    if args.step not in STEPS:
        print(_about(args.step, args.device))
        return 0
    with tempfile.TemporaryDirectory(prefix="hrxmp-gpu-") as folder:
        job = Job(device=args.device, model=args.model, out=args.out, folder=Path(folder))
        for row in STEPS[args.step](job):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HrxmpError as error:
        sys.exit(f"{error.code}: {error}")
