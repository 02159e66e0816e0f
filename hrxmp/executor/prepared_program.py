"""Prepared programs: commands with loaded kernels and bound buffers, ready to replay.

Used by the executor's main thread. Everything that a replay would otherwise compute is computed
here: kernel objects of their own for each command, arguments set once, sizes as the driver wants
them. A replay writes the inputs and enqueues; it allocates, formats and looks up nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.errors import GraphError
from hrxmp.executor.findings import Findings
from hrxmp.executor.graph_program import Command, GraphProgram, Port
from hrxmp.executor.lending import LentArrays, host_memory
from hrxmp.executor.memory import Memory
from hrxmp.executor.pinned import pinned
from hrxmp.graph import Storage
from hrxmp.kernels.device import Device
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.loader import opencl

if TYPE_CHECKING:
    import pyopencl as cl

Array = np.ndarray[Any, Any]
Bound = tuple["cl.Kernel", tuple[int, ...], tuple[int, ...]]
"""A kernel with its arguments, and the sizes to launch it with."""
Copy = tuple["cl.Buffer", int, Array]
"""Bytes of a buffer from an offset on, and the host's array that they are copied from or to."""


class PreparedProgram:
    """One graph program on one set of allocations.

    It holds its buffers: the driver does not keep a kernel's arguments alive. Errors of the driver
    are the caller's: any call may tell of a kernel that ran before.
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
        self._inputs, self._to_device = self._host_sides(program.inputs, memory)
        self._outputs, self._to_host = self._host_sides(program.outputs, memory)
        take = host_memory if device.traits.is_cpu else partial(pinned, device)
        self._lent = {
            name: LentArrays(take, side.shape, side.dtype) for name, side in self._outputs.items()
        }
        self._writes: list[cl.Event] = []
        """Kept while they are under way: pyopencl waits for a copy whose event is dropped."""

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
        """Put this execution's inputs in their place. GraphError when they do not fit.

        The device must be idle: it may work in the very memory that is written here.
        """
        inputs = self._inputs
        if values.keys() != inputs.keys():
            raise GraphError(f"inputs {sorted(values)} given, {sorted(inputs)} expected")
        for name, side in inputs.items():
            value = np.asarray(values[name])
            if value.shape != side.shape:
                raise GraphError(
                    f"input {name!r}: shape {value.shape} given, {side.shape} expected"
                )
            try:
                np.copyto(side, value, casting="same_kind")
            except TypeError as error:
                raise GraphError(f"input {name!r}: {error}") from error
        copy, queue = self._cl.enqueue_copy, self._device.queue
        self._writes = [
            copy(queue, buffer, side, dst_offset=offset, is_blocking=False)
            for buffer, offset, side in self._to_device
        ]

    def read_outputs(self) -> dict[str, Array]:
        """Wait for the execution and fetch its outputs."""
        copy, queue = self._cl.enqueue_copy, self._device.queue
        outputs = {name: lent.take() for name, lent in self._lent.items()}
        if self._to_host:
            for (buffer, offset, _), array in zip(self._to_host, outputs.values(), strict=True):
                copy(queue, array, buffer, src_offset=offset, is_blocking=True)
            return outputs
        queue.finish()
        for name, array in outputs.items():
            np.copyto(array, self._outputs[name])
        return outputs

    def _host_sides(
        self, ports: Mapping[str, Port], memory: Memory
    ) -> tuple[dict[str, Array], list[Copy]]:
        """Arrays of the host through which the ports are written or read, and the copies it takes.

        On a device that works in the host's memory the array is the port, and there is no copy.
        """
        sides: dict[str, Array] = {}
        copies: list[Copy] = []
        for name, port in ports.items():
            buffer = self.buffers[port.slot]
            shared = memory.host_bytes(buffer)
            if shared is None:
                sides[name] = np.zeros(port.shape, port.dtype)
                copies.append((buffer, port.offset, sides[name]))
            else:
                end = port.offset + math.prod(port.shape) * np.dtype(port.dtype).itemsize
                sides[name] = shared[port.offset : end].view(port.dtype).reshape(port.shape)
        return sides, copies
