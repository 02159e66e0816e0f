"""How many compile workers this process may have: affinity, and the CPU quota of its cgroup.

Used by the pool process at its start. Device memory is not asked for here (the pool opens no
device); the broker learns from a worker that could not make its context.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

WORKERS_A_CORE = 8
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(root: Path = _CGROUP, cgroup_file: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may really use, at least one."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota(root, cgroup_file)
    return max(1, min(cores, int(quota + 0.5))) if quota else cores


def _quota(root: Path, cgroup_file: Path) -> float:
    """The smallest CPU quota of this cgroup and those above it, in cores; 0 when there is none."""
    try:
        lines = cgroup_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    inner = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")
    folder = root / inner.lstrip("/")
    found = []
    for level in (folder, *folder.parents):
        if (limit := _one_quota(level / "cpu.max")) > 0:
            found.append(limit)
        if level == root:
            break
    return min(found, default=0.0)


def _one_quota(file: Path) -> float:
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def bounded(asked: int, cores: int, say: Callable[[str], None]) -> int:
    """How many workers: one a core when not asked (0), and never so many that they only swap."""
    most = WORKERS_A_CORE * cores
    if asked > most:
        say(f"{asked} workers are asked for; {most} are the most for {cores} cores")
    return min(asked, most) if asked else cores
