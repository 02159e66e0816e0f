"""Device memory of the executor: a buffer for each storage, and the arena.

The executor process owns one `Memory`. It allocates when asked and frees when nothing refers to
an allocation any more; it plans nothing (`arena.plan` does). Out of memory is an error that names
what took it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.errors import DeviceMemoryError, GraphError
from hrxmp.graph import Storage
from hrxmp.kernels.device import Device
from hrxmp.kernels.layer import STATE_BYTES
from hrxmp.kernels.loader import opencl
from hrxmp.kernels.pages import LargePages

if TYPE_CHECKING:
    import pyopencl as cl

_CHUNK_BYTES = 64 << 20
_LEAST_BYTES = 64
_LARGE_BYTES = 256 << 10
"""From here on a CPU device's buffers lie in large pages."""


class Memory:
    """Maps storages to OpenCL buffers."""

    def __init__(self, device: Device) -> None:
        self._cl = opencl()
        self._device = device
        self._buffers: weakref.WeakKeyDictionary[Storage, cl.Buffer] = weakref.WeakKeyDictionary()
        self._pages = LargePages()
        self._arena: list[cl.Buffer] = []
        self._state: cl.Buffer | None = None

    def buffer(self, storage: Storage) -> cl.Buffer:
        """The storage's buffer, allocated at first need; DeviceMemoryError without room."""
        found = self._buffers.get(storage)
        if found is None:
            found = self._buffers[storage] = self._allocate(storage.nbytes, storage.name)
        return found

    def arena(self, sizes: Sequence[int]) -> list[cl.Buffer]:
        """A buffer of at least each size, shared by all programs: one runs at a time, in order."""
        found: dict[int, cl.Buffer] = {}
        largest_first = sorted(range(len(sizes)), key=lambda slot: -sizes[slot])
        for rank, slot in enumerate(largest_first):
            if rank == len(self._arena):
                self._arena.append(self._allocate(sizes[slot], "activations"))
            elif self._arena[rank].size < sizes[slot]:
                self._arena[rank] = self._allocate(sizes[slot], "activations")
            found[slot] = self._arena[rank]
        return [found[slot] for slot in range(len(sizes))]

    def own(self, nbytes: int) -> cl.Buffer:
        """A buffer that only the caller uses."""
        return self._allocate(nbytes, "programs")

    def state(self) -> cl.Buffer:
        """Counters of launches that run in phases: zero before and after each of them."""
        if self._state is None:
            self._state = self._allocate(STATE_BYTES, "state")
            zero = np.zeros(STATE_BYTES, np.uint8)
            self._cl.enqueue_copy(self._device.queue, self._state, zero, is_blocking=True)
        return self._state

    def upload(self, storage: Storage, data: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Copy a contiguous host array into the storage, in pieces, straight from its pages."""
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        if offset + flat.nbytes > storage.nbytes:
            raise GraphError(f"{storage}: {flat.nbytes} bytes at {offset} do not fit")
        buffer = self.buffer(storage)
        for begin in range(0, flat.nbytes, _CHUNK_BYTES):
            piece = flat[begin : begin + _CHUNK_BYTES]
            self._cl.enqueue_copy(
                self._device.queue, buffer, piece, dst_offset=offset + begin, is_blocking=True
            )

    def held(self) -> dict[str, int]:
        """Bytes by what holds them: `weight`, `cache_k`, `activations`, ..."""
        sizes: Counter[str] = Counter()
        for storage in self._buffers:
            sizes[_kind(storage.name)] += storage.nbytes
        sizes["activations"] += sum(buffer.size for buffer in self._arena)
        return dict(sizes)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that storages and arena hold."""
        return sum(self.held().values())

    def _allocate(self, nbytes: int, name: str) -> cl.Buffer:
        context, flags = self._device.context, self._cl.mem_flags
        try:
            if not self._device.traits.is_cpu:
                return self._on_gpu(max(nbytes, _LEAST_BYTES), name)
            if nbytes < _LARGE_BYTES:
                kind = flags.READ_WRITE | flags.ALLOC_HOST_PTR
                return self._cl.Buffer(context, kind, max(nbytes, _LEAST_BYTES))
            view = self._pages.take(nbytes)  # the buffer keeps it
            return self._cl.Buffer(context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=view)
        except (self._cl.Error, OverflowError, OSError, MemoryError) as error:
            raise self._out_of_memory(nbytes, name) from error

    def _on_gpu(self, nbytes: int, name: str) -> cl.Buffer:
        """NVIDIA's driver promises any amount and fails at first use: have it keep its word now."""
        if nbytes > self._device.info.memory_bytes:
            raise self._out_of_memory(nbytes, name)
        cl = self._cl
        buffer = cl.Buffer(self._device.context, cl.mem_flags.READ_WRITE, nbytes)
        undefined = cl.mem_migration_flags.CONTENT_UNDEFINED
        cl.enqueue_migrate_mem_objects(self._device.queue, [buffer], undefined)
        return buffer

    def _out_of_memory(self, nbytes: int, name: str) -> DeviceMemoryError:
        top = sorted(self.held().items(), key=lambda item: -item[1])[:5]
        holders = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in top if size)
        info = self._device.info
        return DeviceMemoryError(
            f"{name or 'a buffer'}: {nbytes / 1e6:.1f} MB could not be allocated on {info.label} "
            f"({info.memory_bytes / 1e6:.0f} MB); held so far: {holders or 'nothing'}",
            remedy="a shorter context or another device needs less",
        )


def _kind(name: str) -> str:
    """`weight` of `blk.0.attn_q.weight`, `cache_k` of `cache_k.0`."""
    words = [word for word in name.split(".") if not word.isdigit()]
    return words[-1] if words else "other"
