"""Device memory of the executor: a buffer for each storage, and the arena.

The executor process owns one `Memory`. It allocates when asked and frees when nothing refers to
an allocation any more; it plans nothing (`arena.plan` does). Out of memory is an error that names
what took it.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.dtypes import DType
from hrxmp.errors import DeviceError, DeviceFaultError, DeviceMemoryError, GraphError
from hrxmp.executor.staging import Staging, piece_bytes
from hrxmp.graph import Storage
from hrxmp.kernels.device import Device
from hrxmp.kernels.layer import STATE_BYTES
from hrxmp.kernels.layout import LANES, pack, packed_bytes
from hrxmp.kernels.loader import OUT_OF_RESOURCES, device_error, opencl
from hrxmp.kernels.pages import LargePages

if TYPE_CHECKING:
    import pyopencl as cl

Array = np.ndarray[Any, Any]
Read = Callable[[int], None]
"""Told how many more bytes of a weight have been read."""

_CHUNK_BYTES = 64 << 20
_LEAST_BYTES = 64
_ALIGNMENT = 128
_PIECE_BYTES = 1 << 20
"""About as much of a weight is packed at a time."""
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
        self._staging: Staging | None = None
        self._shared = device.traits.is_cpu and self._works_in_host_memory()

    def buffer(self, storage: Storage) -> cl.Buffer:
        """The storage's buffer, allocated at first need; DeviceMemoryError without room."""
        found = self._buffers.get(storage)
        if found is None:
            found = self._buffers[storage] = self._allocate(storage.nbytes, storage.name)
        return found

    def allocate(self, storages: Iterable[Storage], name: str) -> None:
        """Buffers for storages that come and go together; a CPU device's lie side by side.

        They fill their large pages then, whatever their sizes. DeviceMemoryError without room.
        """
        new = [one for one in dict.fromkeys(storages) if one not in self._buffers]
        if not self._device.traits.is_cpu:
            for storage in new:
                self._buffers[storage] = self._allocate(storage.nbytes, name or storage.name)
            return
        starts = list(itertools.accumulate((_rounded(s.nbytes) for s in new), initial=0))
        try:
            view = self._pages.region(max(starts[-1], _LEAST_BYTES))
            for storage, (start, end) in zip(new, itertools.pairwise(starts), strict=True):
                self._buffers[storage] = self._on_host(view[start:end])
        except (self._cl.Error, OverflowError, OSError, MemoryError) as error:
            raise self._refused(error, starts[-1], name) from error

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

    def upload(self, storage: Storage, data: Array, offset: int = 0) -> None:
        """Copy a contiguous host array into the storage, in pieces, straight from its pages."""
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        if offset + flat.nbytes > storage.nbytes:
            raise GraphError(f"{storage}: {flat.nbytes} bytes at {offset} do not fit")
        buffer = self.buffer(storage)
        shared = self.host_bytes(buffer)
        try:
            if shared is not None:
                self._device.queue.finish()
                shared[offset : offset + flat.nbytes] = flat
                return
            for begin in range(0, flat.nbytes, _CHUNK_BYTES):
                piece = flat[begin : begin + _CHUNK_BYTES]
                self._cl.enqueue_copy(
                    self._device.queue, buffer, piece, dst_offset=offset + begin, is_blocking=True
                )
        except self._cl.Error as error:
            doing = f"{storage} was uploaded, holding {self.described()}"
            raise device_error(error, doing) from error

    def upload_weight(
        self, storage: Storage, dtype: DType, shape: tuple[int, ...], raw: Array, read: Read
    ) -> None:
        """Bring ggml's bytes of a weight into its storage's layout, a piece at a time."""
        raw = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
        layout, n, k = storage.layout, math.prod(shape[:-1]), shape[-1]
        row = dtype.row_bytes(k)

        def packed(piece: Array) -> Array:
            return piece if layout == "ggml" else pack(layout, dtype, piece.nbytes // row, k, piece)

        staged = not self._device.traits.is_cpu and storage.nbytes > _PIECE_BYTES
        most = piece_bytes(storage.nbytes) if staged else _PIECE_BYTES
        step = max(1, most // packed_bytes(layout, dtype, LANES, k)) * LANES
        pieces = [
            (packed_bytes(layout, dtype, begin, k), raw[begin * row : (begin + step) * row])
            for begin in range(0, n, step)
        ]
        if staged:
            self._send(storage, pieces, packed, read)
            return
        for at, piece in pieces:
            self.upload(storage, packed(piece), at)
            read(piece.nbytes)

    def _send(
        self, storage: Storage, pieces: list[tuple[int, Array]],
        packed: Callable[[Array], Array], read: Read,
    ) -> None:  # fmt: skip
        try:
            if self._staging is None:
                self._staging = Staging(self._device)
            buffer = self.buffer(storage)
            self._device.queue.finish()  # it may still bring the buffer to the device, as undefined
            self._staging.send(buffer, pieces, packed, read)
        except self._cl.Error as error:
            doing = f"{storage} was uploaded, holding {self.described()}"
            raise device_error(error, doing) from error

    def host_bytes(self, buffer: cl.Buffer) -> Array | None:
        """A buffer of ours as bytes of the host, if the device works in the host's memory.

        What is stored there while the device is idle, later launches see, and the other way round.
        """
        return np.frombuffer(buffer.hostbuf, np.uint8) if self._shared else None

    def held(self) -> dict[str, int]:
        """Bytes by what holds them: `weight`, `cache_k`, `activations`, ..."""
        sizes: Counter[str] = Counter()
        for storage in self._buffers:
            sizes[_kind(storage.name)] += storage.nbytes
        sizes["activations"] += sum(buffer.size for buffer in self._arena)
        return dict(sizes)

    def described(self) -> str:
        """What holds most, for an error's text."""
        top = sorted(self.held().items(), key=lambda item: -item[1])[:5]
        return ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in top if size) or "nothing"

    @property
    def allocated_bytes(self) -> int:
        """Bytes that storages and arena hold."""
        return sum(self.held().values())

    def _allocate(self, nbytes: int, name: str) -> cl.Buffer:
        try:
            if not self._device.traits.is_cpu:
                return self._on_gpu(max(nbytes, _LEAST_BYTES), name)
            if nbytes < _LARGE_BYTES:
                return self._on_host(_aligned(max(nbytes, _LEAST_BYTES)))
            return self._on_host(self._pages.take(nbytes))
        except (self._cl.Error, OverflowError, OSError, MemoryError) as error:
            raise self._refused(error, nbytes, name) from error

    def _on_host(self, view: memoryview | Array) -> cl.Buffer:
        """A buffer on the host's memory, which it keeps alive."""
        flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.USE_HOST_PTR
        return self._cl.Buffer(self._device.context, flags, hostbuf=view)

    def _works_in_host_memory(self) -> bool:
        """Tried, because a driver may also keep a copy of its own: both ways, on one line."""
        cl, queue = self._cl, self._device.queue
        view, found = _aligned(_LEAST_BYTES), np.zeros(_LEAST_BYTES, np.uint8)
        device_to_host = False
        with suppress(cl.Error):
            buffer = self._on_host(view)
            cl.enqueue_fill_buffer(queue, buffer, np.uint8(1), 0, _LEAST_BYTES)
            queue.finish()
            device_to_host = bool(view.all())
            view[:] = 2
            cl.enqueue_copy(queue, found, buffer, is_blocking=True)
        return device_to_host and bool((found == 2).all())

    def _on_gpu(self, nbytes: int, name: str) -> cl.Buffer:
        """NVIDIA's driver promises any amount and fails at first use: have it keep its word now."""
        if nbytes > self._device.info.memory_bytes:
            raise self._out_of_memory(nbytes, name)
        cl = self._cl
        buffer = cl.Buffer(self._device.context, cl.mem_flags.READ_WRITE, nbytes)
        undefined = cl.mem_migration_flags.CONTENT_UNDEFINED
        cl.enqueue_migrate_mem_objects(self._device.queue, [buffer], undefined)
        return buffer

    def _refused(self, error: Exception, nbytes: int, name: str) -> DeviceError:
        """The error of an allocation: no room, if the device is not lost."""
        told = device_error(error, f"{name or 'a buffer'} was allocated")
        lost = isinstance(told, DeviceFaultError) and getattr(error, "code", 0) != OUT_OF_RESOURCES
        return told if lost else self._out_of_memory(nbytes, name)

    def _out_of_memory(self, nbytes: int, name: str) -> DeviceMemoryError:
        info = self._device.info
        return DeviceMemoryError(
            f"{name or 'a buffer'}: {nbytes / 1e6:.1f} MB could not be allocated on {info.label} "
            f"({info.memory_bytes / 1e6:.0f} MB); held so far: {self.described()}",
            remedy="a shorter context or another device needs less",
        )


def _rounded(nbytes: int) -> int:
    """`nbytes` up to where the next buffer may begin."""
    return -(-max(nbytes, _LEAST_BYTES) // _ALIGNMENT) * _ALIGNMENT


def _aligned(nbytes: int) -> Array:
    """New zeros from a multiple of `_ALIGNMENT` on, as every driver here wants a buffer to be."""
    whole = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + nbytes]


def _kind(name: str) -> str:
    """`weight` of `blk.0.attn_q.weight`, `cache_k` of `cache_k.0`."""
    words = [word for word in name.split(".") if not word.isdigit()]
    return words[-1] if words else "other"
