"""Where the time of executions goes: per kernel on the device, and per step on the host.

Used by the executor's main thread while a caller profiles; otherwise nothing of it exists. Device
times come from OpenCL's profiling events on a queue of its own, so they are the driver's word;
profiling itself makes launches slower, so rates are of kernels, not of executions.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hrxmp.kernels.device import Device
from hrxmp.kernels.loader import opencl

if TYPE_CHECKING:
    from hrxmp.executor.prepared_program import PreparedProgram

Array = np.ndarray[Any, Any]


class KernelTime(msgspec.Struct, kw_only=True):
    """Sums over the launches of one variant."""

    kernel: str
    calls: int = 0
    total_ns: int = 0
    gap_ns: int = 0
    """From the end of the launch before to this one's start."""
    flops: int = 0
    nbytes: int = 0


class HostTime(msgspec.Struct, kw_only=True):
    """Sums over executions, on the host."""

    executions: int = 0
    rebind_ns: int = 0
    """Writing the inputs."""
    enqueue_ns: int = 0
    wait_ns: int = 0
    """Until the outputs are there, their copy included."""


class Profile:
    """Collects while it is the executor's profile."""

    def __init__(self, device: Device) -> None:
        cl = opencl()
        self._properties = cl.command_queue_properties.PROFILING_ENABLE
        self._queue = cl.CommandQueue(device.context, device.handle, self._properties)
        self._device_queue = device.queue
        self._kernels: dict[str, KernelTime] = {}
        self.host = HostTime()

    @property
    def kernels(self) -> list[KernelTime]:
        """The variants, the one with the most time first."""
        return sorted(self._kernels.values(), key=lambda item: -item.total_ns)

    def replay(self, prepared: PreparedProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Replay a prepared program and note where the time went; its outputs."""
        begin = monotonic_ns()
        prepared.write_inputs(inputs)
        self._device_queue.finish()  # the launches come on another queue
        written = monotonic_ns()
        events = prepared.launch_with_events(self._queue)
        enqueued = monotonic_ns()
        self._queue.finish()
        outputs = prepared.read_outputs()
        done = monotonic_ns()
        self.host.executions += 1
        self.host.rebind_ns += written - begin
        self.host.enqueue_ns += enqueued - written
        self.host.wait_ns += done - enqueued
        self._note(prepared, [(event.profile.start, event.profile.end) for event in events])
        return outputs

    def _note(self, prepared: PreparedProgram, spans: list[tuple[int, int]]) -> None:
        last_end = spans[0][0] if spans else 0
        for command, (start, end) in zip(prepared.repeated, spans, strict=True):
            label = command.launch.variant.label()
            row = self._kernels.get(label)
            if row is None:
                row = self._kernels[label] = KernelTime(kernel=label)
            row.calls += 1
            row.total_ns += end - start
            row.gap_ns += max(0, start - last_end)
            row.flops += command.launch.flops
            row.nbytes += command.launch.nbytes
            last_end = end
