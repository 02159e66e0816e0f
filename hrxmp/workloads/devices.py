"""`hrxmp-run devices`: the OpenCL devices of this machine, and whether they work."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec
from rich import box
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
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("index", "device", "state"):
        table.add_column(name, overflow="fold")
    for info in devices:
        facts = [
            info.name,
            f"{info.platform}, driver {info.driver}",
            f"{info.compute_units} compute units, {info.memory_bytes / 1e9:.1f} GB",
            *(f"{kind} {pin}" for kind, pin in (("PCI", info.pci), ("UUID", info.uuid)) if pin),
        ]
        state = "works" if info.usable else f"passed over: {info.reason}"
        table.add_row(str(info.index), "\n".join(facts), state)
    return table
