"""The real compiler, only slower: `hrxmp-workers --compiler ...slow_compiler:compile`.

For tests that look at a run while kernels are being compiled. Each compile takes a second more.
"""

from __future__ import annotations

import time

import msgspec

from hrxmp.kernels import build, device, loader
from hrxmp.kernels.keys import Variant

EXTRA_S = 1.0
_opened: dict[str, device.Device] = {}


def compile(spec: str, variant: Variant) -> build.Built:
    """Build as a worker does, after a pause."""
    loader.prepare_loader()
    if spec not in _opened:
        _opened[spec] = device.open_device(spec, probed=False)
    time.sleep(EXTRA_S)
    built = build.build(_opened[spec], variant)
    return msgspec.structs.replace(built, compile_ns=built.compile_ns + int(EXTRA_S * 1e9))
