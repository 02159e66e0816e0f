"""Devices for the device tests, and `run`: build, load and launch once, results as arrays.

`device` stands for each OpenCL device that must work: Intel's CPU runtime and PoCL (skipped with
a sentence where one is absent), and every other one that this machine has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest

from hrxmp.kernels.build import Loaded, build, load
from hrxmp.kernels.device import Device, list_devices, open_device, prepare_loader
from hrxmp.kernels.keys import Variant
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.loader import opencl

Runner = Callable[[Launch, Mapping[str, np.ndarray]], dict[str, np.ndarray]]

_EXPECTED = {
    "intel-cpu": "Intel's CPU runtime is not installed (the extra `cpu` brings it)",
    "pocl-cpu": "PoCL is not installed (Debian's pocl-opencl-icd)",
}

prepare_loader()


@cache
def _devices() -> dict[str, Device]:
    """Open devices by form; the first usable one of each form."""
    found: dict[str, Device] = {}
    for info in list_devices():
        if info.usable:
            device = open_device(str(info.index), probed=False)
            found.setdefault(device.traits.form, device)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each device form that is expected everywhere or found here."""
    if "device" in metafunc.fixturenames:
        forms = sorted({*_EXPECTED, *_devices()})
        metafunc.parametrize("device", forms, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """The open device that the test is for."""
    found = _devices().get(request.param)
    if found is None:
        pytest.skip(_EXPECTED[request.param])
    return found


@cache
def _loaded(device: Device, variant: Variant, options: str = "") -> Loaded:
    return load(device, variant, build(device, variant, extra_options=options).binary)


@pytest.fixture
def run(device: Device) -> Runner:
    """`run(launch, operands)`: the operands that the launch writes, after it ran.

    Operands are contiguous arrays by name; each is copied to a buffer of exactly its bytes.
    """

    def run_on_device(launch: Launch, operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return launch_once(device, launch, operands)

    return run_on_device


def launch_once(
    device: Device, launch: Launch, operands: Mapping[str, np.ndarray], options: str = ""
) -> dict[str, np.ndarray]:
    """Build (once a session), load and launch; returns new arrays for `launch.writes`."""
    cl = opencl()
    kernel = _loaded(device, launch.variant, options).kernel
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = {
        name: cl.Buffer(device.context, flags, hostbuf=np.ascontiguousarray(array))
        for name, array in operands.items()
    }
    kernel.set_args(*(buffers[arg] if isinstance(arg, str) else arg for arg in launch.args))
    local = launch.variant.local_size
    cl.enqueue_nd_range_kernel(device.queue, kernel, launch.global_size, local)
    results = {name: np.empty_like(operands[name], order="C") for name in launch.writes}
    for name, result in results.items():
        cl.enqueue_copy(device.queue, result, buffers[name])
    device.queue.finish()
    return results
