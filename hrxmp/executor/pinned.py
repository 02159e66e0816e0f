"""Arrays in memory that a GPU's driver has pinned: it copies to them without a stop in between.

The executor's main thread uses them for outputs. What is handed out is the caller's: its memory is
used again only when nothing refers to it any more, views of it included.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.kernels.device import Device
from hrxmp.kernels.loader import opencl

if TYPE_CHECKING:
    import pyopencl as cl

Array = np.ndarray[Any, Any]

MOST = 8
"""Arrays of an output in pinned memory, which is scarce; one who keeps more gets other memory."""


class PinnedArrays:
    """Arrays of one shape and type."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: str) -> None:
        self._device = device
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._regions: list[_Region] = []

    def take(self) -> Array:
        """An array that nobody uses; its content is undefined. Raises pyopencl.Error."""
        region = next((one for one in self._regions if one.free), None)
        if region is None:
            if len(self._regions) == MOST:
                return np.empty(self._shape, self._dtype)
            nbytes = math.prod(self._shape) * self._dtype.itemsize
            region = _Region(self._device, max(nbytes, 1))
            self._regions.append(region)
        return region.lend(self._dtype, math.prod(self._shape)).reshape(self._shape)


class _Region:
    """Pinned memory, mapped for as long as it lives, and who has it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        module = opencl()
        flags = module.mem_flags.READ_WRITE | module.mem_flags.ALLOC_HOST_PTR
        self._buffer: cl.Buffer = module.Buffer(device.context, flags, nbytes)
        self._bytes: Array
        self._bytes, _ = module.enqueue_map_buffer(
            device.queue, self._buffer, module.map_flags.WRITE, 0, (nbytes,), np.uint8
        )
        self._lent: weakref.ref[Array] | None = None

    @property
    def free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, dtype: np.dtype[Any], count: int) -> Array:
        # Views refer to the array on this buffer, not to one behind it, and so keep it alive.
        array: Array = np.frombuffer(self._bytes.data, dtype, count)
        self._lent = weakref.ref(array)
        return array
