"""Host memory in large pages, for the buffers of CPU devices.

A weight matrix is read once a token, and with pages of 4 KiB the processor waits for their
translation: on two cores 23 GB/s became 31. Linux gives large pages to regions that ask for them.
The executor owns one `LargePages`; memory goes back when the last view of a region is gone.
"""

from __future__ import annotations

import ctypes
import mmap

_LARGE_PAGE = 2 << 20
_REGION_BYTES = 64 << 20
_ALIGNMENT = 4096


class LargePages:
    """Hands out pieces of large regions, one behind the other."""

    def __init__(self) -> None:
        self._rest = memoryview(bytearray())

    def take(self, nbytes: int) -> memoryview:
        """Writable zeros, aligned to 4096 bytes. MemoryError or OSError when there is no room."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._rest):
            self._rest = _region(max(size, _REGION_BYTES))
        piece, self._rest = self._rest[:nbytes], self._rest[size:]
        return piece

    @staticmethod
    def region(nbytes: int) -> memoryview:
        """As `take`, in large pages of its own: they go back as a whole, pinned by nothing else."""
        return _region(nbytes)[:nbytes]


def _region(nbytes: int) -> memoryview:
    """At least `nbytes` of new memory, from the beginning of a large page on."""
    whole = -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE
    # Private: shared anonymous memory is a file to Linux, and gets no large pages.
    mapped = mmap.mmap(-1, whole + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _LARGE_PAGE
    return memoryview(mapped)[start : start + whole]
