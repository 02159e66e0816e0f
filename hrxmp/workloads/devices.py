"""`hrxmp-run devices`: the OpenCL devices of this machine, and whether they work."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from hrxmp.kernels.device import DeviceInfo, list_devices
from hrxmp.kernels.loader import prepare_loader
from hrxmp.settings import Settings


def main(argv: list[str], settings: Settings) -> int:
    """List devices; exit code 1 when none works."""
    parser = argparse.ArgumentParser(prog="hrxmp-run devices", description="List OpenCL devices.")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args(argv)
    prepare_loader(vendors=settings.vendors, scratch=settings.runtime_dir or None)
    devices = list_devices()
    if args.output == "json":
        sys.stdout.write(json.dumps([msgspec.to_builtins(info) for info in devices]) + "\n")
    else:
        Console().print(_table(devices))
    return 0 if any(info.usable for info in devices) else 1


def _table(devices: list[DeviceInfo]) -> Table:
    table = Table("index", "name", "platform", "driver", "units", "memory", "pins", "state")
    for info in devices:
        pins = "\n".join(pin for pin in (info.pci, info.uuid) if pin)
        state = "works" if info.usable else f"passed over: {info.reason}"
        table.add_row(
            str(info.index), info.name, info.platform, info.driver, str(info.compute_units),
            f"{info.memory_bytes / 1e9:.1f} GB", pins, state,
        )  # fmt: skip
    return table
