"""Real kernels through real processes: asked for here, compiled in a worker, loaded here."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from hrxmp.executor import compile_client
from hrxmp.identity import fingerprint
from hrxmp.kernels import build, dispatch
from hrxmp.kernels.device import Device, list_devices, open_device, prepare_loader
from hrxmp.kernels.entry import StoreEntry
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.loader import opencl
from hrxmp.kernels.store import Store
from hrxmp.messages import CompileRequest
from tests.process.pool_fixture import PATIENCE_S, outcome, running_pool

_ids = count(1_000_000)
prepare_loader()


@pytest.fixture(scope="module", params=["intel-cpu", "pocl-cpu"])
def device(request: pytest.FixtureRequest) -> Device:
    for info in list_devices():
        if info.usable:
            found = open_device(str(info.index), probed=False)
            if found.traits.form == request.param:
                return found
    pytest.skip(f"no {request.param} device")


def wish(device: Device, launch: Launch, sanitizer: str = "") -> CompileRequest:
    parts = build.components(device, launch.variant, sanitizer)
    return CompileRequest(
        request_id=next(_ids),
        key=parts.digest(),
        variant=launch.variant,
        components=parts,
        device=device.spec,
    )


def scale_by(device: Device, launch: Launch, binary: bytes, values: np.ndarray) -> np.ndarray:
    cl = opencl()
    flags = cl.mem_flags
    x = cl.Buffer(device.context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=values)
    y = cl.Buffer(device.context, flags.WRITE_ONLY, values.nbytes)
    kernel = build.load(device, launch.variant, binary).kernel
    buffers = {"x": x, "y": y}
    kernel.set_args(*(buffers[a] if isinstance(a, str) else a for a in launch.args))
    cl.enqueue_nd_range_kernel(device.queue, kernel, launch.global_size, launch.variant.local_size)
    result = np.empty_like(values)
    cl.enqueue_copy(device.queue, result, y)
    return result


def test_a_kernel_is_compiled_elsewhere_and_runs_here(device: Device) -> None:
    """X06: the client has an open context; the worker is a process of its own by exec."""
    launch = dispatch.scale(device.traits, count=1000, factor=3.0, bias=0.5)
    values = np.linspace(-2, 2, 1000, dtype=np.float32)
    with running_pool(compiler="") as pool:
        client = pool.client()
        request = wish(device, launch)
        first = outcome(client.request(request, 1))
        assert (first.error, first.via) == (None, "compile")
        assert first.compile_ns > 0
        result = scale_by(device, launch, first.binary, values)
        np.testing.assert_allclose(result, values * 3 + 0.5, rtol=1e-5, atol=1e-6)
        store = Store(Path(pool.settings.cache))
        kept = store.get(request.key, request.components)
        assert isinstance(kept, StoreEntry)
        assert kept.binary == first.binary
        again = outcome(client.request(wish(device, launch), 2))
        assert (again.via, again.binary) == ("disk", first.binary)
        assert again.compile_ns == first.compile_ns  # what a load of it is measured against
        client.close()


def test_a_worker_that_starts_unasked_tells_that_the_device_works(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device that it tries is the setting's, so no other kind is said to work."""
    monkeypatch.setattr(compile_client, "_HEARD_S", PATIENCE_S)
    with running_pool(
        compiler="", device=device.spec, workers=1, flags=("--expects-compiles",)
    ) as pool:
        client = pool.client()
        assert client.tried(fingerprint(*device.key_fields()), PATIENCE_S)
        assert not client.tried(fingerprint("another", *device.key_fields()[1:]), PATIENCE_S)
        client.close()


def test_an_invalid_sanitizer_is_a_setup_failure(device: Device) -> None:
    launch = dispatch.scale(device.traits, count=10, factor=1.0, bias=0.0)
    with running_pool(compiler="") as pool:
        client = pool.client()
        found = outcome(client.request(wish(device, launch, sanitizer="everything"), 1))
        assert (found.outcome, found.compiler_started) == ("setup", False)
        assert "everything" in str(found.error)
        client.close()


def test_another_version_of_a_kernel_fails_loudly(device: Device) -> None:
    """The executor's source digest and the worker's differ: nothing is compiled under the key."""
    import msgspec

    launch = dispatch.scale(device.traits, count=10, factor=1.0, bias=0.0)
    good = wish(device, launch)
    parts = msgspec.structs.replace(good.components, source="1" * 64)
    other = msgspec.structs.replace(good, components=parts, key=parts.digest())
    with running_pool(compiler="") as pool:
        client = pool.client()
        found = outcome(client.request(other, 1))
        assert (found.outcome, found.compiler_started) == ("setup", False)
        assert "source" in str(found.error)
        client.close()


def test_a_device_that_is_not_there_is_a_setup_failure(device: Device) -> None:
    import msgspec

    launch = dispatch.scale(device.traits, count=10, factor=1.0, bias=0.0)
    with running_pool(compiler="") as pool:
        client = pool.client()
        request = msgspec.structs.replace(wish(device, launch), device="no such device")
        found = outcome(client.request(request, 1))
        assert (found.outcome, found.compiler_started) == ("setup", False)
        assert found.error.code == "device-not-found"
        client.close()
