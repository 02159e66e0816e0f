"""Arrays for a program's outputs that are lent to the caller, and lent again when they come back.

The executor's main thread uses them. An array is the caller's until nothing refers to it any more,
views of it included; new memory for each execution would cost the system's page faults each time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MOST = 8
"""Arrays of an output that are kept; one who holds more of them gets memory of his own."""


class LentArrays:
    """Arrays of one shape and type. `memory` gives so many bytes, which live as long as it says."""

    def __init__(
        self, memory: Callable[[int], Array], shape: tuple[int, ...], dtype: np.dtype[Any] | str
    ) -> None:
        self._memory = memory
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._regions: list[Array] = []
        self._lent: list[weakref.ref[Array]] = []
        """Who has each region."""

    def take(self) -> Array:
        """An array that nobody uses; its content is undefined. Errors are those of the memory."""
        free = next((at for at, lent in enumerate(self._lent) if lent() is None), len(self._lent))
        if free == MOST:
            return np.empty(self._shape, self._dtype)
        count = math.prod(self._shape)
        if free == len(self._regions):
            self._regions.append(self._memory(max(1, count * self._dtype.itemsize)))
            self._lent.append(weakref.ref(self._regions[free]))
        # Views refer to the array on this buffer, not to one behind it, and so keep it alive.
        array: Array = np.frombuffer(self._regions[free].data, self._dtype, count)
        self._lent[free] = weakref.ref(array)
        return array.reshape(self._shape)


def host_memory(nbytes: int) -> Array:
    """Ordinary memory."""
    return np.zeros(nbytes, np.uint8)
