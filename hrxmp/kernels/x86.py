"""What this x86-64 processor offers beyond what OpenCL says: byte dot products, tile registers.

Executor and workers ask it when they open a CPU device. Tile registers must be asked for: Linux
lets a process use them after one system call, which holds for all its threads.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


@cache
def has_byte_dot() -> bool:
    """Whether 512-bit vectors multiply and add bytes (AVX512-VNNI)."""
    return {"avx512_vnni", "avx512bw"} <= _flags()


@cache
def has_byte_tiles() -> bool:
    """Whether this process may multiply tiles of bytes (AMX); it asks Linux for them."""
    if not {"amx_tile", "amx_int8", "avx512bw"} <= _flags():
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _flags() -> set[str]:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())
