"""Where the tensors of a graph lie while it is lowered, and the commands emitted so far.

Pure. A tensor lies in a storage of the caller or in a planned value; a fused command may put
several tensors side by side into one value, so that they are rows with a wider stride than their
shape says. Views follow what they view; what cannot be read in place is copied.
"""

from __future__ import annotations

import itertools
import math

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import GraphError, UnsupportedError
from hrxmp.executor import arena
from hrxmp.executor.fusion import STATE, Emitted, Memory, fuse_layers, fuse_program
from hrxmp.executor.graph_program import Command, GraphProgram, Port
from hrxmp.graph import Graph, Tensor, contiguous_strides
from hrxmp.kernels import dispatch
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.layer import STATE_BYTES

_PORTS = {DType.F32: "float32", DType.F16: "float16", DType.I32: "int32"}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, with a tensor's strides and offset in it (bytes)."""

    memory: Memory
    strides: tuple[int, ...]
    offset: int = 0


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as evenly spaced rows of its last axis; stride and offset in elements."""

    place: Place
    stride: int
    offset: int


class Builder:
    """The state of one lowering."""

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self.graph = graph
        self.traits = traits
        self._values: list[arena.Value] = []
        self._commands: list[Emitted] = []
        self._places: dict[int, Place] = {}

    # -- places ------------------------------------------------------------------------------

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor's elements are; views follow what they view."""
        found = self._places.get(tensor.index)
        if found is not None:
            return found
        if tensor.storage is not None:
            return Place(memory=tensor.storage, strides=tensor.strides, offset=tensor.offset)
        if tensor.base is None:
            raise GraphError(f"{tensor.describe()} is read before it is computed")
        return self._view_place(tensor, tensor.base)

    def put(self, tensor: Tensor, place: Place) -> None:
        """Say where a computed tensor lies."""
        self._places[tensor.index] = place

    def new(self, tensor: Tensor) -> Place:
        """Memory of its own for a computed tensor, contiguous; it lies there from now on."""
        place = self.fresh(tensor.nbytes, contiguous_strides(tensor.shape, tensor.dtype))
        self.put(tensor, place)
        return place

    def fresh(self, nbytes: int, strides: tuple[int, ...]) -> Place:
        """A new planned value."""
        self._values.append(arena.Value(nbytes=nbytes))
        return Place(memory=len(self._values) - 1, strides=strides)

    def dense(self, tensor: Tensor) -> Place:
        """The place of a tensor's elements, contiguous; copied there when they are not."""
        place = self.place(tensor)
        strides = contiguous_strides(tensor.shape, tensor.dtype)
        if place.strides == strides:
            return place
        target = self.fresh(tensor.nbytes, strides)
        self.copy(tensor, place, target)
        return target

    def rows(self, tensor: Tensor, dtype: DType = DType.F32, axes: int | None = None) -> Rows:
        """A tensor as rows, read in place where it can be, else copied.

        The first `axes` axes count rows (default: all but the last), the others are a row.
        """
        self.want(tensor, dtype)
        place, size = self.place(tensor), dtype.nbytes
        lead = len(tensor.shape) - 1 if axes is None else axes
        stride = _row_stride(tensor.shape, place.strides, lead, size)
        if stride is None:
            place, stride = self.dense(tensor), math.prod(tensor.shape[lead:]) * size
        return Rows(place=place, stride=stride // size, offset=place.offset // size)

    def view(self, tensor: Tensor, place: Place | None = None) -> dispatch.View:
        """A tensor's elements for kernels that take any strides; in elements."""
        place = place or self.place(tensor)
        size = tensor.dtype.nbytes
        strides = tuple(stride // size for stride in place.strides)
        return dispatch.View(shape=tensor.shape, strides=strides, offset=place.offset // size)

    def copy(self, tensor: Tensor, source: Place, target: Place) -> None:
        """Copy a tensor's elements between places."""
        x, y = self.view(tensor, source), self.view(tensor, target)
        launch = dispatch.cpy(self.traits, src=tensor.dtype, dst=tensor.dtype, x=x, y=y)
        self.emit(tensor, launch, x=source, y=target)

    def want(self, tensor: Tensor, *dtypes: DType) -> None:
        """Refuse a tensor of another dtype."""
        if tensor.dtype not in dtypes:
            names = " or ".join(dtype.label for dtype in dtypes)
            raise UnsupportedError(f"its source {tensor.describe()} must be {names}")

    def _view_place(self, tensor: Tensor, base: Tensor) -> Place:
        place = self.place(base)
        if place.strides == base.strides:
            offset = place.offset + tensor.offset - base.offset
            return Place(memory=place.memory, strides=tensor.strides, offset=offset)
        # The base's rows stand in a wider value: only a split of its columns can follow it.
        same_rows = tensor.shape[0] == base.shape[0] and tensor.offset == base.offset
        if same_rows and tensor.contiguous and base.contiguous:
            strides = (place.strides[0], *tensor.strides[1:])
            return Place(memory=place.memory, strides=strides, offset=place.offset)
        self.put(base, self.dense(base))
        return self._view_place(tensor, base)

    # -- commands ----------------------------------------------------------------------------

    def emit(self, node: Tensor, launch: Launch, **operands: Place) -> None:
        """Append a command that completes `node`."""
        memories = {name: place.memory for name, place in operands.items()}
        self._commands.append(Emitted(node=node.index, launch=launch, memories=memories))

    def program(self, number: int) -> GraphProgram:
        """The program of all that was emitted."""
        outputs = {name: self._port(tensor) for name, tensor in self.graph.outputs.items()}
        inputs = {name: self._port(tensor) for name, tensor in self.graph.inputs.items()}
        kept = {memory for memory, _port in outputs.values()}
        commands = fuse_layers(self.traits, self._commands, self._values, kept)
        slots, arena_bytes = self._slots(commands, kept)
        placed = tuple(
            Command(
                node=item.node,
                launch=item.launch,
                slots={name: slots[memory] for name, memory in item.memories.items()},
                nbytes={name: self._nbytes(m) for name, m in item.memories.items()},
            )
            for item in commands
        )
        final, own_bytes = fuse_program(self.traits, placed, slots[STATE])
        return GraphProgram(
            program=number,
            commands=final,
            own_bytes=own_bytes,
            arena_bytes=arena_bytes,
            inputs={name: port(slots[memory]) for name, (memory, port) in inputs.items()},
            outputs={name: port(slots[memory]) for name, (memory, port) in outputs.items()},
        )

    def _nbytes(self, memory: Memory) -> int:
        if isinstance(memory, int):
            return STATE_BYTES if memory == STATE else self._values[memory].nbytes
        return memory.nbytes

    def _slots(
        self, commands: list[Emitted], kept: set[Memory]
    ) -> tuple[dict[Memory, int], tuple[int, ...]]:
        """The slot of each memory (storages, arena, state), and the bytes of the arena's."""
        for now, item in enumerate(commands):
            for memory in item.memories.values():
                if isinstance(memory, int) and memory != STATE:
                    value = self._values[memory]
                    value.first = now if value.first < 0 else value.first
                    value.last = len(commands) if memory in kept else now
        plan = arena.plan(self._values)
        slots: dict[Memory, int] = {s: slot for slot, s in enumerate(self.graph.storages())}
        first = len(slots)
        slots |= {value: first + slot for value, slot in enumerate(plan.slot_of)}
        slots[STATE] = first + len(plan.slot_bytes)
        return slots, plan.slot_bytes

    def _port(self, tensor: Tensor) -> tuple[Memory, _PortMaker]:
        if tensor.dtype not in _PORTS:
            raise UnsupportedError(f"{tensor.describe()} cannot be an input or output")
        place = self.dense(tensor)
        return place.memory, _PortMaker(tensor, place.offset)


class _PortMaker:
    """A port whose slot is known only after the arena is planned."""

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self._dtype = _PORTS[tensor.dtype]
        self._shape = tensor.shape
        self._offset = offset

    def __call__(self, slot: int) -> Port:
        return Port(slot=slot, offset=self._offset, dtype=self._dtype, shape=self._shape)


def _row_stride(
    shape: tuple[int, ...], strides: tuple[int, ...], lead: int, size: int
) -> int | None:
    """Bytes from row to row; None when rows are not dense or not evenly spaced."""
    step = size
    for length, stride in zip(reversed(shape[lead:]), reversed(strides[lead:]), strict=True):
        if length > 1 and stride != step:
            return None
        step *= length
    counted = [(n, s) for n, s in zip(shape[:lead], strides[:lead], strict=True) if n > 1]
    for (_, outer), (length, inner) in itertools.pairwise(counted):
        if outer != length * inner:
            return None
    return counted[-1][1] if counted else step
