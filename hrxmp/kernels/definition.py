"""What a kernel definition and a device's traits are: the words that dispatch and catalog share.

Pure data: no device, no OpenCL, no I/O. A kernel family (one dispatch module) lists its
definitions in a tuple DEFINITIONS; `catalog` merges the families. Dispatch functions see of a
device only its DeviceTraits, so that every key can be enumerated where there is no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from hrxmp.kernels.choices import Choice

ArgumentKind = Literal["buffer", "int", "float"]
Form = Literal["intel-cpu", "pocl-cpu", "nvidia", "generic"]


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel argument: a global buffer, a 32-bit int or a 32-bit float."""

    name: str
    kind: ArgumentKind


class KernelDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel before specialisation: where its text is, and what it takes.

    `source` is a file in `kernels/cl/`; `params` are the names of the defines that a variant must
    give, in order; `args` are the kernel's arguments, in order.
    """

    name: str
    source: str
    entry_point: str
    params: tuple[str, ...]
    args: tuple[Argument, ...]


class DeviceTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What dispatch may know of a device when it chooses forms, tiles and local sizes."""

    form: Form
    is_cpu: bool
    compute_units: int
    simd_width: int
    """Float lanes that run in step: a vector register's on a CPU, a warp's on a GPU."""
    local_mem_bytes: int
    base_align_bytes: int
    fp16: bool
    subgroups: bool
    dot_product: bool
    """Whether integer dot products of bytes are one instruction."""
    max_work_group: int
    byte_tiles: bool = False
    """Whether kernels may use the processor's tile registers for bytes (AMX)."""
    tuned: Mapping[str, Choice] = {}
    """What was measured to be faster here than the default, by subject (`choices`)."""


def arguments(text: str) -> tuple[Argument, ...]:
    """Arguments from a line like `x:buffer k:int eps:float`; KeyError for another kind."""
    pairs = (word.split(":") for word in text.split())
    return tuple(Argument(name=name, kind=_KINDS[kind]) for name, kind in pairs)


_KINDS: dict[str, ArgumentKind] = {"buffer": "buffer", "int": "int", "float": "float"}
