"""Launches that take their buffers from a table: fewer arguments than hundreds, and any number.

A launch for many commands reads where its buffers lie from memory of its program's own;
`cl/addresses.cl` puts the addresses there, once. Pure functions of slots, run by the executor's
lowering; no device. The buffers must stay where they are, which OpenCL does not promise but drivers
for processors and NVIDIA's do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hrxmp.kernels.definition import Argument, KernelDefinition
from hrxmp.kernels.keys import Variant
from hrxmp.kernels.launch import Launch

AT_ONCE = 60
"""Buffers of one launch."""

_NAMES = [f"b{n:02}" for n in range(AT_ONCE)]

DEFINITIONS = (
    KernelDefinition(
        name="addresses",
        source="addresses.cl",
        entry_point="addresses",
        params=(),
        args=(
            *(Argument(name=name, kind="int") for name in ("count", "first")),
            *(Argument(name=name, kind="buffer") for name in _NAMES),
            Argument(name="table", kind="buffer"),
        ),
    ),
)


class FusedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """One launch for many: operands `addresses` and `state` (zero before and after).

    `first` are launches that come before it once, with their operands' slots; they also take
    `table`: memory of `table_bytes` that is the program's own, which is `addresses` then.
    """

    launch: Launch
    first: tuple[tuple[Launch, dict[str, int]], ...]
    table_bytes: int


def fused(launch: Launch, slots: Sequence[int], more_bytes: int = 0) -> FusedProgram:
    """The launch with a table of where the buffers of these slots lie, in this order.

    `more_bytes` of memory lie behind the table.
    """
    return FusedProgram(
        launch=launch,
        first=tuple(_put(slots[at : at + AT_ONCE], at) for at in range(0, len(slots), AT_ONCE)),
        table_bytes=8 * len(slots) + more_bytes,
    )


def _put(slots: Sequence[int], first: int) -> tuple[Launch, dict[str, int]]:
    """Writes the addresses of these slots' buffers into the table, from entry `first` on."""
    names = _NAMES[: len(slots)]
    launch = Launch(
        variant=Variant(definition="addresses", params=(), local_size=(1,)),
        args=(len(slots), first, *names, *[names[0]] * (AT_ONCE - len(names)), "table"),
        global_size=(1,),
        writes=("table",),
    )
    return launch, dict(zip(names, slots, strict=True))
