"""Kernel key -> loaded kernel of this process.

Only the executor's main thread uses it. A kernel is loaded once from its binary; commands get
kernel objects of their own, because arguments are state of the object. What the driver does at
load and at the first launch is timed here, so that a compile behind our back is seen.
"""

from __future__ import annotations

import resource
from time import monotonic_ns, process_time_ns
from typing import TYPE_CHECKING

import msgspec

from hrxmp.kernels import build
from hrxmp.kernels.device import Device
from hrxmp.kernels.keys import Variant

if TYPE_CHECKING:
    import pyopencl as cl

# A load that works this long, and this near to what the compiler took, is a compile by the driver:
# NVIDIA's takes a third to a half of a source build for its PTX, PoCL's first launch more than one.
# A finished binary takes Intel's driver 5 to 9 ms, and on a machine that is ten times slower ten
# times that: what the compiler took there says what is long.
_SLOW_NS, _SLOWEST_NS = 10_000_000, 250_000_000
_SLOW_SHARE = 0.2
_USUAL_COMPILE_NS = 250_000_000
"""Of a kernel whose compile time is not known."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How long a load and the first launch took, and whether the driver compiled in them."""

    load_ns: int
    launch_ns: int
    driver_compiled: bool


class KernelTable:
    """The kernels that are warm at L0."""

    def __init__(self, device: Device, sanitizer: str = "") -> None:
        self._device = device
        self._sanitizer = sanitizer
        self._loaded: dict[str, build.Loaded] = {}
        self._spare: dict[str, cl.Kernel] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._loaded

    def load(self, key: str, variant: Variant, binary: bytes, compile_ns: int) -> LoadReport:
        """Make `binary` executable under `key`, and launch it once over nothing.

        CompileRejectedError when the driver refuses the binary. `compile_ns` is what the compiler
        took for it, 0 when that is not known.
        """
        begin = _spent()
        loaded = build.load(self._device, variant, binary, self._sanitizer)
        middle = _spent()
        build.dry_launch(self._device, variant, loaded.kernel, self._sanitizer)
        load, launch = (_between(begin, middle), _between(middle, _spent()))
        self._loaded[key] = loaded
        self._spare[key] = loaded.kernel
        # The lesser of wall and processor time: waiting for a busy machine is no compile.
        slowest = max(min(load), min(launch))
        share = int(_SLOW_SHARE * (compile_ns or _USUAL_COMPILE_NS))
        return LoadReport(
            load_ns=load[0],
            launch_ns=launch[0],
            driver_compiled=slowest > max(_SLOW_NS, min(share, _SLOWEST_NS)),
        )

    def clear(self) -> None:
        """Forget all kernels; those that prepared programs hold live on."""
        self._loaded.clear()
        self._spare.clear()

    def new_kernel(self, key: str) -> cl.Kernel:
        """A kernel object whose arguments are nobody else's."""
        spare = self._spare.pop(key, None)
        return spare if spare is not None else self._loaded[key].new_kernel()


def _spent() -> tuple[int, int]:
    """Wall time, and processor time of all threads and of child processes that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return monotonic_ns(), process_time_ns() + int((ended.ru_utime + ended.ru_stime) * 1e9)


def _between(begin: tuple[int, int], end: tuple[int, int]) -> tuple[int, int]:
    return end[0] - begin[0], end[1] - begin[1]
