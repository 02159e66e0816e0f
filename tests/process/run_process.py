"""Whole runs for the tests: `hrxmp-run` as users start it, with its output and its trace.

The trace is read from the mixed standard error, as the reader tools do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from hrxmp import records
from hrxmp.aggregator import reader

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
DEVICES = {"intel-cpu": "Intel(R) OpenCL", "pocl-cpu": "Portable Computing Language"}
"""SPECs of the two devices that every machine can have, by form."""
FORBIDDEN = 3
"""Exit code of a run that was not allowed to compile."""

R = TypeVar("R", bound=records.Record)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over."""

    code: int
    stdout: str
    stderr: str
    trace: reader.Trace

    def records(self, kind: type[R]) -> list[R]:
        """The records of one kind, in the order of the trace."""
        return [line.record for line in self.trace.lines if isinstance(line.record, kind)]

    @property
    def said(self) -> list[str]:
        """The lines of standard error that are no records."""
        return [line for line in self.stderr.splitlines() if '{"hrxmp":' not in line]


def hrxmp_run(
    *args: str | Path,
    cache: Path | str = "off",
    device: str = "",
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> Finished:
    """Start `hrxmp-run` with these arguments and wait for its end.

    No HRXMP_* variable of this process reaches it; `environ` adds some.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HRXMP_", "GGML_HRX_"))}
    options = ["--cache", str(cache), *(["--device", device] if device else [])]
    done = subprocess.run(
        [sys.executable, "-m", "hrxmp", "run", *options, *map(str, args)],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT), **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    return Finished(
        code=done.returncode,
        stdout=done.stdout.decode(errors="replace"),
        stderr=done.stderr.decode(errors="replace"),
        trace=reader.read(done.stderr.splitlines(keepends=True)),
    )


@cache
def usable_forms() -> frozenset[str]:
    """Forms of the devices that work on this machine."""
    found = hrxmp_run("devices", "-o", "json")
    forms = set()
    for info in msgspec.json.decode(found.stdout.encode() or b"[]"):
        forms |= {
            form for form, spec in DEVICES.items() if info["usable"] and info["platform"] == spec
        }
    return frozenset(forms)
