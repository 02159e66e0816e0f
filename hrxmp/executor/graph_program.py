"""Graph programs: a graph lowered to immutable commands; no device memory, no kernels.

Cached by the graph's uid together with its structural digest: the same uid with the same
structure reuses the program, also for another graph object; the same uid with another structure
is lowered anew and never runs the old commands. uid 0 keeps nothing.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

import msgspec

from hrxmp.graph import Graph
from hrxmp.kernels.launch import Launch

_KEPT = 64


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One launch and the memory slot of each operand. `node` is the graph node it completes.

    Slots number the graph's storages first, then the arena's, then the shared state, then memory
    of the program's own. Operands begin at their slot's first byte; offsets are arguments of the
    launch.
    """

    node: int
    launch: Launch
    slots: dict[str, int]
    nbytes: dict[str, int] = {}
    """Bytes of each operand; its slot may have more."""
    once: bool = False
    """It writes the program's own memory, and need not be repeated."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output: contiguous from byte `offset` of a slot; `dtype` is numpy's name."""

    slot: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class GraphProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What a graph does, on any memory of the right sizes."""

    program: int
    commands: tuple[Command, ...]
    arena_bytes: tuple[int, ...]
    own_bytes: tuple[int, ...] = ()
    """Memory that no other program shares."""
    inputs: dict[str, Port]
    outputs: dict[str, Port]


class GraphPrograms:
    """The programs of one executor, by uid and structure; the least used are forgotten."""

    def __init__(self) -> None:
        self._programs: OrderedDict[tuple[int, str], GraphProgram] = OrderedDict()
        self._numbers = itertools.count(1)

    def find(self, graph: Graph) -> GraphProgram | None:
        """The program of an equal graph with the same uid, if one is kept."""
        key = graph.uid, graph.digest()
        found = self._programs.get(key)
        if found is not None:
            self._programs.move_to_end(key)
        return found

    def keep(self, graph: Graph, program: GraphProgram) -> None:
        """Remember a program, unless the graph's uid is 0."""
        if graph.uid == 0:
            return
        self._programs[graph.uid, graph.digest()] = program
        while len(self._programs) > _KEPT:
            self._programs.popitem(last=False)

    def next_number(self) -> int:
        """The number of the next program of this process."""
        return next(self._numbers)
