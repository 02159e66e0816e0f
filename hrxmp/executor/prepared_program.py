"""Prepared programs: commands with loaded kernels and bound buffers, ready to replay.

Used by the executor's main thread. Everything that a replay would otherwise compute is computed
here: kernel objects of their own for each command, arguments set once, sizes as the driver wants
them. A replay writes the inputs and enqueues; it allocates, formats and looks up nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.errors import DeviceError, GraphError
from hrxmp.executor.findings import Findings
from hrxmp.executor.graph_program import Command, GraphProgram
from hrxmp.executor.memory import Memory
from hrxmp.graph import Storage
from hrxmp.kernels.device import Device
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.loader import opencl

if TYPE_CHECKING:
    import pyopencl as cl

Array = np.ndarray[Any, Any]
Bound = tuple["cl.Kernel", tuple[int, ...], tuple[int, ...]]
"""A kernel with its arguments, and the sizes to launch it with."""


class PreparedProgram:
    """One graph program on one set of allocations.

    It holds its buffers: the driver does not keep a kernel's arguments alive.
    """

    def __init__(
        self,
        program: GraphProgram,
        storages: tuple[Storage, ...],
        memory: Memory,
        device: Device,
        *,
        sanitized: bool = False,
    ) -> None:
        self.program = program
        self.findings = Findings(device, program.commands) if sanitized else None
        self._cl = opencl()
        self._device = device
        self.buffers = [
            *(memory.buffer(storage) for storage in storages),
            *memory.arena(program.arena_bytes),
            memory.state(),
            *(memory.own(nbytes) for nbytes in program.own_bytes),
        ]
        """By slot."""
        self._bound = 0
        self._launches: list[Bound] = []
        self._held: dict[str, Array] = {}

    @property
    def bound(self) -> int:
        """How many commands have their kernel, from the first on."""
        return self._bound

    @property
    def repeated(self) -> list[Command]:
        """The commands of a replay."""
        return [command for command in self.program.commands if not command.once]

    @property
    def ready(self) -> bool:
        """Whether every command has its kernel."""
        return self._bound == len(self.program.commands)

    def add(self, command: Command, kernel: cl.Kernel) -> None:
        """Bind the next command to a kernel object of its own, and enqueue it a first time."""
        more = self.findings.arguments(command, self.bound) if self.findings is not None else []
        ready = self.bind(command, command.launch, kernel, *more)
        self._cl.enqueue_nd_range_kernel(self._device.queue, *ready)
        self._bound += 1
        if not command.once:
            self._launches.append(ready)

    def bind(self, command: Command, launch: Launch, kernel: cl.Kernel, *more: Any) -> Bound:
        """A launch in the place of a command, on its memory; `more` are arguments at the end."""
        buffers, slots = self.buffers, command.slots
        args = (buffers[slots[a]] if isinstance(a, str) else a for a in launch.args)
        kernel.set_args(*args, *more)
        return kernel, launch.global_size, launch.variant.local_size

    def launch_all(self) -> None:
        """Enqueue all commands bound so far, in order."""
        enqueue, queue = self._cl.enqueue_nd_range_kernel, self._device.queue
        for kernel, global_size, local_size in self._launches:
            enqueue(queue, kernel, global_size, local_size)

    def launch_with_events(self, queue: cl.CommandQueue) -> list[cl.Event]:
        """Enqueue all commands on a profiling queue; one event each, in order."""
        enqueue = self._cl.enqueue_nd_range_kernel
        return [enqueue(queue, *launch) for launch in self._launches]

    def write_inputs(self, values: Mapping[str, Array]) -> None:
        """Enqueue the copies of this execution's inputs. GraphError when they do not fit."""
        ports = self.program.inputs
        if values.keys() != ports.keys():
            raise GraphError(f"inputs {sorted(values)} given, {sorted(ports)} expected")
        for name, value in values.items():
            port = ports[name]
            data = np.ascontiguousarray(value, port.dtype)
            if data.shape != port.shape:
                raise GraphError(f"input {name!r}: shape {data.shape} given, {port.shape} expected")
            self._held[name] = data  # the copy may be under way until the outputs are read
            self._cl.enqueue_copy(
                self._device.queue, self.buffers[port.slot], data,
                dst_offset=port.offset, is_blocking=False,
            )  # fmt: skip

    def read_outputs(self) -> dict[str, Array]:
        """Wait for the execution and fetch its outputs. DeviceError when a kernel failed."""
        found = {}
        try:
            for name, port in self.program.outputs.items():
                found[name] = np.empty(port.shape, port.dtype)
                self._cl.enqueue_copy(
                    self._device.queue, found[name], self.buffers[port.slot],
                    src_offset=port.offset, is_blocking=True,
                )  # fmt: skip
            if not found:
                self._device.queue.finish()
        except self._cl.Error as error:
            raise DeviceError(
                f"the device failed while it ran graph program {self.program.program}: {error}"
            ) from error
        return found
