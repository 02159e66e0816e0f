"""Kernel key -> loaded kernel of this process.

Only the executor's main thread uses it. A kernel is loaded once from its binary; commands get
kernel objects of their own, because arguments are state of the object. What the driver does at
load and at the first launch is timed here, so that a compile behind our back is seen.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec

from hrxmp.kernels import build
from hrxmp.kernels.device import Device
from hrxmp.kernels.keys import Variant

if TYPE_CHECKING:
    import pyopencl as cl

# A load this slow, and this near to what the compiler took, is a compile by the driver.
_SLOW_NS = 10_000_000
_SLOW_SHARE = 0.3


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How long a load and the first launch took, and whether the driver compiled in them."""

    load_ns: int
    launch_ns: int
    driver_compiled: bool


class KernelTable:
    """The kernels that are warm at L0."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._loaded: dict[str, build.Loaded] = {}
        self._spare: dict[str, cl.Kernel] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._loaded

    def load(self, key: str, variant: Variant, binary: bytes, compile_ns: int) -> LoadReport:
        """Make `binary` executable under `key`, and launch it once over nothing.

        CompileRejectedError when the driver refuses the binary. `compile_ns` is what the compiler
        took for it, 0 when that is not known.
        """
        loaded = build.load(self._device, variant, binary)
        begin = monotonic_ns()
        build.dry_launch(self._device, variant, loaded.kernel)
        launch_ns = monotonic_ns() - begin
        self._loaded[key] = loaded
        self._spare[key] = loaded.kernel
        slowest = max(loaded.load_ns, launch_ns)
        compiled = slowest > _SLOW_NS and slowest > _SLOW_SHARE * compile_ns
        return LoadReport(load_ns=loaded.load_ns, launch_ns=launch_ns, driver_compiled=compiled)

    def clear(self) -> None:
        """Forget all kernels; those that prepared programs hold live on."""
        self._loaded.clear()
        self._spare.clear()

    def new_kernel(self, key: str) -> cl.Kernel:
        """A kernel object whose arguments are nobody else's."""
        spare = self._spare.pop(key, None)
        return spare if spare is not None else self._loaded[key].new_kernel()
