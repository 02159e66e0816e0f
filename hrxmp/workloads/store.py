"""`hrxmp-run store ls|verify|prune|export|import`: looks after the kernel store.

Runs in the launcher's process, with no device, no pool and no executor. It reads and writes
entries only; no text of it tells anybody to delete a folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from hrxmp.errors import StoreError
from hrxmp.kernels.bundle import export_bundle, import_bundle
from hrxmp.kernels.store import Listed, Store, open_store
from hrxmp.settings import Settings


def main(argv: list[str], settings: Settings) -> int:
    """Run one store command; the exit code (1: something was bad)."""
    args = _parser().parse_args(argv)
    store = open_store(settings, _say)
    if store.folder is None:
        raise StoreError("there is no kernel store: HRXMP_CACHE or --cache is `off`")
    code: int = args.run(store, args)
    return code


def _say(text: str) -> None:
    sys.stderr.write(f"hrxmp: {text}\n")


def _ls(store: Store, args: argparse.Namespace) -> int:
    return _show(list(store.entries()), args.output)


def _verify(store: Store, args: argparse.Namespace) -> int:
    listed = list(store.entries(verify=True))
    bad = [entry for entry in listed if entry.problem]
    _show(bad, args.output)
    for entry in bad:
        if args.remove:
            store.remove(entry.key)
    _say(f"{len(listed)} entries, {len(bad)} bad")
    return 1 if bad and not args.remove else 0


def _prune(store: Store, args: argparse.Namespace) -> int:
    gone = store.prune(args.max_mb << 20, args.max_entries)
    _say(f"{gone} entries removed, {store.entry_count()} left")
    return 0


def _export(store: Store, args: argparse.Namespace) -> int:
    count = export_bundle(store, args.bundle)
    _say(f"{count} entries in {args.bundle}")
    return 0


def _import(store: Store, args: argparse.Namespace) -> int:
    found = import_bundle(store, args.bundle)
    for name, reason in found.refused:
        _say(f"{name!r} refused: {reason}")
    _say(f"{found.taken} entries taken, {len(found.refused)} refused")
    return 1 if found.refused else 0


def _show(listed: list[Listed], output: str) -> int:
    """A table for people, or one JSON object a line."""
    if output == "jsonl":
        for entry in listed:
            sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
        return 0
    table = Table("key", "kernel", "device", "kB", "unused", "problem", box=None)
    for entry in listed:
        parts = entry.header.components if entry.header else None
        table.add_row(
            entry.key[:16],
            parts.entry_point if parts else "?",
            parts.device if parts else "?",
            f"{entry.size / 1000:.1f}",
            _age(time.time() - entry.used_s),
            entry.problem,
        )
    Console(file=sys.stdout).print(table)
    return 0


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hrxmp-run store", description="The kernel store.")
    commands = parser.add_subparsers(required=True, metavar="ls|verify|prune|export|import")
    for name, run, text in (
        ("ls", _ls, "list the entries"),
        ("verify", _verify, "read every entry whole; exit code 1 when one is bad"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument("-o", "--output", choices=("table", "jsonl"), default="table")
        if name == "verify":
            command.add_argument("--remove", action="store_true", help="take bad entries out")
    prune = commands.add_parser("prune", help="remove the longest unused entries")
    prune.set_defaults(run=_prune)
    prune.add_argument("--max-mb", type=int, default=1 << 20, help="keep at most so many MB")
    prune.add_argument("--max-entries", type=int, default=1 << 40, help="keep at most so many")
    for name, run, text in (
        ("export", _export, "write all entries into one new file"),
        ("import", _import, "take the entries of such a file, each verified"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument("bundle", type=Path)
    return parser
