"""Fusion over commands: the launches of a whole transformer layer become one where it pays.

Pure. It runs after the rules, on what they emitted, and before memory is planned; what a device
fuses is the kernel library's word (`kernels.layer`), that nobody else reads the values in between
is checked here.
"""

from __future__ import annotations

import msgspec

from hrxmp.executor.arena import Value
from hrxmp.executor.graph_program import Command
from hrxmp.graph import Storage
from hrxmp.kernels import layer, nvidia_program
from hrxmp.kernels.addresses import FusedProgram
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.layer import STATE_BYTES

Memory = Storage | int
"""The caller's storage, or the number of a planned value."""

STATE = -1
"""Memory of counters that are zero before and after each launch; all programs share it."""


class Emitted(msgspec.Struct, frozen=True, kw_only=True):
    """A command before memory is planned."""

    node: int
    launch: Launch
    memories: dict[str, Memory]


def fuse_layers(
    traits: DeviceTraits, commands: list[Emitted], values: list[Value], kept: set[Memory]
) -> list[Emitted]:
    """The commands with each layer that can be one launch as one. May append to `values`.

    `kept` is memory that the caller reads afterwards.
    """
    numbers = _numbers(commands)
    last_use = {m: i for i, item in enumerate(commands) for m in item.memories.values()}
    fused: list[Emitted] = []
    at = 0
    while at < len(commands):
        window = commands[at : at + layer.PHASES]
        found = layer.fuse_layer(
            traits,
            [item.launch for item in window],
            [{name: numbers[m] for name, m in item.memories.items()} for item in window],
        )
        if found is None or not _private(window, at, last_use, kept):
            fused.append(commands[at])
            at += 1
            continue
        fused.append(_replaced(window, found, numbers, values))
        at += layer.PHASES
    return fused


def fuse_program(
    traits: DeviceTraits, commands: tuple[Command, ...], state: int
) -> tuple[tuple[Command, ...], tuple[int, ...]]:
    """The commands with those that can be one launch as one, and the program's own memory, bytes.

    Slots are planned for the commands one after the other, and so a launch for many does them.
    `state` is the slot of STATE; the program's own memory has the slots that follow.
    """
    launches, slots = [item.launch for item in commands], [item.slots for item in commands]
    nbytes = {item.slots[name]: size for item in commands for name, size in item.nbytes.items()}
    final: list[Command] = []
    own: list[int] = []
    at = 0
    for run, fused in _fusible(traits, launches, slots):
        final += commands[at : run.start]
        own.append(fused.table_bytes)
        table = state + len(own)
        sizes = {**nbytes, state: STATE_BYTES, table: fused.table_bytes}
        final += _as_commands(fused, commands[run.stop - 1].node, state, table, sizes)
        at = run.stop
    return (*final, *commands[at:]), tuple(own)


def _fusible(
    traits: DeviceTraits, launches: list[Launch], slots: list[dict[str, int]]
) -> list[tuple[range, FusedProgram]]:
    """The whole program where the device can, else each stack of layers."""
    whole = nvidia_program.fuse(traits, launches, slots)
    if whole is not None:
        return [(range(len(launches)), whole)]
    runs = layer.stacks(launches, slots)
    return [
        (run, layer.stack(launches[run.start : run.stop], slots[run.start : run.stop]))
        for run in runs
    ]


def _as_commands(
    fused: FusedProgram, node: int, state: int, table: int, nbytes: dict[int, int]
) -> list[Command]:
    launches = [(launch, {**slots, "table": table}, True) for launch, slots in fused.first]
    launches.append((fused.launch, {"addresses": table, "state": state}, False))
    return [
        Command(
            node=node,
            launch=launch,
            slots=slots,
            nbytes={name: nbytes[slot] for name, slot in slots.items()},
            once=once,
        )
        for launch, slots, once in launches
    ]


def _numbers(commands: list[Emitted]) -> dict[Memory, int]:
    """A number for each memory, as `fuse_layer` compares slots."""
    memories = dict.fromkeys(m for item in commands for m in item.memories.values())
    return {memory: number for number, memory in enumerate(memories)}


def _private(
    window: list[Emitted], at: int, last_use: dict[Memory, int], kept: set[Memory]
) -> bool:
    """Whether what all but the last command write is read by these commands only."""
    written = {
        item.memories[name]
        for item in window[:-1]
        for name in item.launch.writes
        if isinstance(item.memories[name], int)
    }
    return all(last_use[m] < at + layer.PHASES and m not in kept for m in written)


def _replaced(
    window: list[Emitted], found: layer.FusedLayer, numbers: dict[Memory, int], values: list[Value]
) -> Emitted:
    memory_of = {number: memory for memory, number in numbers.items()}
    memories = {name: memory_of[slot] for name, slot in found.slots.items()}
    values.append(Value(nbytes=found.scratch_bytes))
    memories |= {"scratch": len(values) - 1, "state": STATE}
    return Emitted(node=window[-1].node, launch=found.launch, memories=memories)
