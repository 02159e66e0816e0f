"""Gives back memory of shared libraries that was read once, while they were loaded.

The executor calls it when its device, a processor, is open. A driver brings a compiler of some
hundred megabytes (two with a second driver), and the dynamic linker reads relocation and symbol
tables of them all: more than 100 MB, for a process that loads finished binaries. The pages stay in
the system's page cache, and what is used again comes back from there at once.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from contextlib import suppress
from pathlib import Path

_LEAST_KB = 128
"""Mappings with less in memory are not worth a system call."""

# A page that was written, as the linker writes addresses, is anonymous or in swap, and would come
# back from the file without that: such a mapping does not match.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) r-.[ps] \S+ \S+ \d+ +/.*\.so[.\d]*\n"
    rb"(?:\w+:.*\n)*?Rss: +(\d+) kB\n"
    rb"(?:\w+:.*\n)*?Anonymous: +0 kB\n(?:\w+:.*\n)*?Swap: +0 kB\n",
    re.MULTILINE,
)


def give_back() -> int:
    """Give back the unwritten pages of read-only mappings of libraries; how many bytes those were.

    No thread may load or unload libraries meanwhile. Where the system does not tell what was
    written (no Linux), nothing is done.
    """
    given = 0
    with suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        for begin, end, resident_kb in _MAPPING.findall(Path("/proc/self/smaps").read_bytes()):
            if int(resident_kb) < _LEAST_KB:
                continue
            start = int(begin, 16)
            size = ctypes.c_size_t(int(end, 16) - start)
            if advise(ctypes.c_void_p(start), size, mmap.MADV_DONTNEED) == 0:
                given += int(resident_kb) << 10
    return given
