"""Memory of the host that a driver has pinned: a GPU copies there and from there by itself."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from hrxmp.kernels.device import Device
from hrxmp.kernels.loader import opencl

if TYPE_CHECKING:
    import pyopencl as cl

Array = np.ndarray[Any, Any]


def pinned(device: Device, nbytes: int) -> Array:
    """So many bytes, for as long as the array or a view of it lives. Errors are the driver's."""
    cl = opencl()
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
    buffer = cl.Buffer(device.context, flags, nbytes)
    mapped: Array
    mapped, _event = cl.enqueue_map_buffer(
        device.queue, buffer, cl.map_flags.WRITE, 0, (nbytes,), np.uint8
    )
    weakref.finalize(mapped, _unmap, mapped.base, weakref.ref(mapped))
    return mapped


def _unmap(mapping: cl.MemoryMap, array: weakref.ref[Array]) -> None:
    """Give memory back, before pyopencl does: it ends the process where a lost device refuses.

    Such memory stays for the rest of the process, and so does what is in use when that ends.
    """
    with suppress(opencl().Error):
        if array() is None:
            mapping.release()
            return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
