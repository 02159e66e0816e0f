"""Device memory of the executor: storages, arenas, uploads and downloads.

The executor process owns one `Memory`. It allocates when asked and frees when nothing refers to
an allocation any more; it plans nothing (`arena` does). Out of memory is an error that names what
took it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.errors import DeviceMemoryError, GraphError
from hrxmp.graph import Storage
from hrxmp.kernels.device import Device

if TYPE_CHECKING:
    import pyopencl as cl

_CHUNK_BYTES = 64 << 20


class Memory:
    """Maps storages to OpenCL buffers."""

    def __init__(self, device: Device) -> None:
        import pyopencl as cl

        self._cl = cl
        self._device = device
        self._buffers: weakref.WeakKeyDictionary[Storage, cl.Buffer] = weakref.WeakKeyDictionary()
        self._named: dict[str, int] = {}

    def buffer(self, storage: Storage) -> cl.Buffer:
        """The storage's buffer, allocated at first need."""
        found = self._buffers.get(storage)
        if found is None:
            found = self._buffers[storage] = self.allocate(storage.nbytes, storage.name)
        return found

    def allocate(self, nbytes: int, name: str) -> cl.Buffer:
        """A fresh buffer of at least `nbytes`; DeviceMemoryError when there is no room."""
        cl = self._cl
        flags = cl.mem_flags.READ_WRITE
        if self._device.traits.is_cpu:
            flags |= cl.mem_flags.ALLOC_HOST_PTR
        try:
            buffer = cl.Buffer(self._device.context, flags, max(nbytes, 64))
        except (cl.MemoryError, cl.RuntimeError, cl.LogicError) as error:
            raise self._out_of_memory(nbytes, name) from error
        kind = name.rsplit(".", 1)[-1] or "other"
        self._named[kind] = self._named.get(kind, 0) + nbytes
        return buffer

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

    @property
    def allocated_bytes(self) -> int:
        """Bytes asked of the device so far."""
        return sum(self._named.values())

    def _out_of_memory(self, nbytes: int, name: str) -> DeviceMemoryError:
        top = sorted(self._named.items(), key=lambda item: -item[1])[:5]
        holders = ", ".join(f"{kind} {size / 1e6:.0f} MB" for kind, size in top) or "nothing"
        info = self._device.info
        return DeviceMemoryError(
            f"{name or 'a buffer'}: {nbytes / 1e6:.1f} MB could not be allocated on {info.label} "
            f"({info.memory_bytes / 1e6:.0f} MB); allocated so far: {holders}",
            remedy="a shorter context or another device needs less",
        )
