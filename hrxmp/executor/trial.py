"""A graph's launches one by one, with other choices than the default: what tuning measures with.

Used by the executor's main thread, by `hrxmp-run tune` only. The graph runs once as a whole, so
every buffer holds what it holds in use; then single launches are repeated on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hrxmp.errors import GraphError
from hrxmp.executor.graph_program import Command
from hrxmp.executor.lowering import lower
from hrxmp.executor.memory import Memory
from hrxmp.executor.prepared_program import Bound, PreparedProgram
from hrxmp.graph import Graph
from hrxmp.kernels.choices import Choice, Choices
from hrxmp.kernels.device import Device
from hrxmp.kernels.keys import Variant
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.loader import device_error, opencl

if TYPE_CHECKING:
    from hrxmp.executor.jit import Wanted
    from hrxmp.executor.kernel_table import KernelTable
    from hrxmp.kernels.definition import DeviceTraits

Array = np.ndarray[Any, Any]


class Trial:
    """One graph on the device. Kernels must be compiled before they are launched."""

    def __init__(
        self,
        device: Device,
        traits: DeviceTraits,
        memory: Memory,
        table: KernelTable,
        want: Callable[[Variant], Wanted],
        graph: Graph,
    ) -> None:
        self._cl = opencl()
        self._queue = device.queue
        self._traits = msgspec.structs.replace(traits, tuned={})
        self._table = table
        self._want = want
        self._graph = graph
        self._program = lower(graph, self._traits, 0)
        self._prepared = PreparedProgram(self._program, graph.storages(), memory, device)
        self._default: dict[int, Bound] = {}

    @property
    def variants(self) -> list[Variant]:
        """The kernels of the graph with its default choices."""
        return list(dict.fromkeys(command.launch.variant for command in self._commands))

    def open(self) -> dict[str, tuple[Choices, list[int]]]:
        """What the graph leaves open, by subject, and which commands are concerned."""
        found: dict[str, tuple[Choices, list[int]]] = {}
        for at, command in enumerate(self._commands):
            choices = command.launch.choices
            if choices is not None and len(choices.options) > 1:
                found.setdefault(choices.subject, (choices, []))[1].append(at)
        return found

    def launches(self, subject: str, choice: Choice, places: Sequence[int]) -> list[Launch]:
        """The launches at some commands with another choice for `subject`."""
        traits = msgspec.structs.replace(self._traits, tuned={subject: choice})
        commands = lower(self._graph, traits, 0).commands
        if len(commands) != len(self._commands):
            raise GraphError(f"{subject}: another choice makes another program")
        return [commands[place].launch for place in places]

    def run(self, inputs: Mapping[str, Array]) -> None:
        """Run the whole graph, so that all its memory holds what it holds in use."""
        self._prepared.write_inputs(inputs)
        self._launch(self._bound(at) for at in range(len(self._commands)))

    def result(self, place: int, launch: Launch) -> list[Array]:
        """What `launch` writes as the command at `place`, after the commands before it."""
        command, buffers = self._commands[place], self._prepared.buffers
        self._launch(self._bound(at) for at in range(place))
        read = [
            command.slots[a] for a in launch.args if isinstance(a, str) and a not in launch.writes
        ]
        found = []
        for name in launch.writes:
            slot = command.slots[name]
            nbytes = command.nbytes.get(name, buffers[slot].size)
            found.append(np.full(nbytes // 4, np.nan, np.float32))
            if slot not in read:  # what an earlier launch left must not pass for this one's
                self._cl.enqueue_copy(self._queue, buffers[slot], found[-1])
        self._launch([self.bind(place, launch)])
        for name, result in zip(launch.writes, found, strict=True):
            self._cl.enqueue_copy(self._queue, result, buffers[command.slots[name]])
        return found

    def bind(self, place: int, launch: Launch) -> Bound:
        """A launch in the place of a command, on the memory of that command."""
        kernel = self._table.new_kernel(self._want(launch.variant).key)
        return self._prepared.bind(self._commands[place], launch, kernel)

    def time(self, bound: Sequence[Bound]) -> int:
        """Nanoseconds of these launches, one after the other, on an idle device."""
        self._queue.finish()
        begin = monotonic_ns()
        self._launch(bound)
        return monotonic_ns() - begin

    @property
    def _commands(self) -> tuple[Command, ...]:
        return self._program.commands

    def _bound(self, place: int) -> Bound:
        if place not in self._default:
            self._default[place] = self.bind(place, self._commands[place].launch)
        return self._default[place]

    def _launch(self, bound: Iterable[Bound]) -> None:
        try:
            for kernel, global_size, local_size in bound:
                self._cl.enqueue_nd_range_kernel(self._queue, kernel, global_size, local_size)
            self._queue.finish()
        except self._cl.Error as error:
            raise device_error(error, "launches were tried") from error
