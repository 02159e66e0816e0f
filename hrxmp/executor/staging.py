"""Weights on their way to a GPU: pieces are packed by several threads, each in pinned memory.

`Memory` owns it, the executor's main thread calls it. The driver copies from ordinary memory with
one core, however many ask it (7 GB/s); from pinned memory the device fetches by itself, and four
threads that fill it reach 17 to 22.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.executor.pinned import pinned
from hrxmp.kernels.device import Device
from hrxmp.kernels.loader import opencl

if TYPE_CHECKING:
    import pyopencl as cl

Array = np.ndarray[Any, Any]

_THREADS = 4
_SHARES = 8
"""Into how many pieces a weight is cut, so that all threads have something to do,"""
_LEAST_BYTES, _MOST_BYTES = 512 << 10, 4 << 20
"""unless they were too small or too large."""


def piece_bytes(nbytes: int) -> int:
    """How large the pieces of so large a weight should be when they are packed."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, nbytes // _SHARES))


class Staging:
    """A few threads and their pinned memory, for as long as the executor lives."""

    def __init__(self, device: Device) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "upload")
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        for _ in range(_THREADS):
            self._lanes.put(_Lane(device))

    def send(
        self, buffer: cl.Buffer, pieces: Iterable[tuple[int, Array]],
        packed: Callable[[Array], Array], read: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Pack pieces and copy each to its offset in `buffer`; all are there on return.

        `read` is told the bytes of each. Errors are the driver's.
        """
        sent = [
            (self._threads.submit(self._one, buffer, *piece, packed), piece) for piece in pieces
        ]
        for future, (_at, piece) in sent:
            future.result()
            read(piece.nbytes)

    def _one(
        self, buffer: cl.Buffer, at: int, piece: Array, packed: Callable[[Array], Array]
    ) -> None:
        lane = self._lanes.get()  # there is one for each thread
        try:
            lane.copy(packed(piece), buffer, at)
        finally:
            self._lanes.put(lane)


class _Lane:
    """A queue and pinned memory, of one thread at a time."""

    def __init__(self, device: Device) -> None:
        self._cl = cl = opencl()
        self._queue = cl.CommandQueue(device.context, device.handle)
        self._view = pinned(device, _MOST_BYTES)

    def copy(self, data: Array, buffer: cl.Buffer, at: int) -> None:
        """Copy bytes to an offset of a buffer, in parts if there are rows larger than a piece."""
        for begin in range(0, data.nbytes, _MOST_BYTES):
            part = data[begin : begin + _MOST_BYTES]
            view = self._view[: part.nbytes]
            np.copyto(view, part)
            self._cl.enqueue_copy(
                self._queue, buffer, view, dst_offset=at + begin, is_blocking=True
            )
