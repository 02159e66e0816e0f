"""Where a kernel's compile time goes, by device: in the worker, and what is left to the executor.

For each kernel of a small model: the compiler, and what the worker makes the driver finish (kernel
creation, first launch, reading the binary); then, in a process that has only the binary: load,
first launch, second launch. Nothing that takes a compile may be left there. Medians in ms.

Usage: driver.py [--device SPEC ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic_ns
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("compile", "create", "launch", "read", "load", "first", "second")


def main() -> None:
    """Print one row a device: the median kernel, and the slowest of each column."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", action="append", help="default: every usable device")
    parser.add_argument("--part", nargs=2, metavar=("PART", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part, folder = args.part
        {"build": build_all, "load": load_all}[part](args.device[0], Path(folder))
        return
    print("| device | kernels |", " | ".join(f"{name} ms" for name in COLUMNS), "|")
    print("| --- |" + " ---: |" * (len(COLUMNS) + 1))
    for spec, label in devices(args.device):
        with tempfile.TemporaryDirectory() as folder:
            parts = [child(spec, part, folder) for part in PARTS]
            times = [{**a, **b} for a, b in zip(*parts, strict=True)]
        cells = [f"{middle(times, name)} (≤ {most(times, name)})" for name in COLUMNS]
        print(f"| {label} | {len(times)} |", " | ".join(cells), "|", flush=True)


PARTS = ("build", "load")


def middle(times: list[dict[str, float]], name: str) -> str:
    return f"{statistics.median(row[name] for row in times):.2f}"


def most(times: list[dict[str, float]], name: str) -> str:
    return f"{max(row[name] for row in times):.1f}"


def devices(wanted: list[str] | None) -> list[tuple[str, str]]:
    """(SPEC, label) of the devices to measure."""
    from hrxmp.kernels.device import list_devices, prepare_loader, select

    prepare_loader()
    infos = list_devices()
    chosen = [select(spec, infos) for spec in wanted] if wanted else infos
    return [(str(info.index), info.label) for info in chosen if info.usable]


def child(spec: str, part: str, folder: str) -> list[dict[str, float]]:
    """One part in a process of its own, as worker and executor are."""
    command = [sys.executable, __file__, "--device", spec, "--part", part, folder]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, float]] = json.loads(done.stdout)
    return found


def build_all(spec: str, folder: Path) -> None:
    """The worker's part: build, and keep the binaries."""
    from hrxmp.kernels import build

    device, times = _open(spec), []
    for number, variant in enumerate(_variants(device)):
        built = build.build(device, variant)
        (folder / str(number)).write_bytes(built.binary)
        names = ("compile", "create", "launch", "read")
        times.append({name: getattr(built, f"{name}_ns") / 1e6 for name in names})
    print(json.dumps(times))


def load_all(spec: str, folder: Path) -> None:
    """The executor's part: load, launch, launch again."""
    from hrxmp.kernels import build

    device, times = _open(spec), []
    for number, variant in enumerate(_variants(device)):
        loaded = build.load(device, variant, (folder / str(number)).read_bytes())
        launches = []
        for _ in range(2):
            begin = monotonic_ns()
            build.dry_launch(device, variant, loaded.kernel)
            launches.append((monotonic_ns() - begin) / 1e6)
        times.append({"load": loaded.load_ns / 1e6, "first": launches[0], "second": launches[1]})
    print(json.dumps(times))


def _open(spec: str) -> Any:
    from hrxmp.kernels.device import open_device, prepare_loader

    prepare_loader()
    return open_device(spec, probed=False)


def _variants(device: Any) -> list[Any]:
    """The kernels of a prefill and a decode of a small model."""
    import hrxmp  # noqa: F401  # the package, wherever this script lies
    from hrxmp.kernels import dispatch
    from hrxmp.kernels.elementwise_ops import binary, scale
    from hrxmp.kernels.view import View

    view = View.dense((64, 64))
    norm = {"k": 576, "eps": 1e-5, "weighted": True}
    launches = [
        binary(device.traits, op="add", a=view, b=view),
        scale(device.traits, count=64, factor=2.0, bias=0.0),
        dispatch.rms_norm(device.traits, m=1, **norm),
        dispatch.soft_max(device.traits, k=256, m=4, scale=1.0),
    ]
    for m in (1, 64):
        launches.append(_product(device, m))
    return [launch.variant for launch in launches]


def _product(device: Any, m: int) -> Any:
    from hrxmp.dtypes import DType
    from hrxmp.kernels import dispatch

    n, k = 576, 576
    layout = dispatch.weight_layout(device.traits, DType.Q4_1, n, k)
    weight = dispatch.WeightSpec(dtype=DType.Q4_1, layout=layout, n=n)
    return dispatch.mul_mat(device.traits, weights=(weight,), k=k, m=m, norm=False, epilogue="none")


if __name__ == "__main__":
    main()
