"""The real compiler, only slower: `hrxmp-workers --compiler ...slow_compiler:compile`.

For tests that look at a run while kernels are being compiled. Each compile takes a second more,
and none ends before the file that HRXMP_TEST_GO names is there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

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
    begin, go = time.monotonic_ns(), Path(os.environ["HRXMP_TEST_GO"])
    time.sleep(EXTRA_S)
    while not go.exists():
        time.sleep(0.01)
    built = build.build(_opened[spec], variant)
    return msgspec.structs.replace(built, compile_ns=time.monotonic_ns() - begin)
