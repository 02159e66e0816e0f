"""Opening real devices: by SPEC, by default, and past a broken one."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from hrxmp.errors import DeviceAmbiguousError, DeviceBrokenError, DeviceError, DeviceNotFoundError
from hrxmp.kernels import driver, probe
from hrxmp.kernels.device import Device, list_devices, open_device


def test_spec_opens_the_same_device(device: Device) -> None:
    again = open_device(device.spec, probed=False)
    assert again.info == device.info
    assert again.key_fields() == device.key_fields()


def test_index_and_label_open_it_too(device: Device) -> None:
    assert open_device(str(device.info.index), probed=False).info == device.info
    assert open_device(device.info.label, probed=False).info == device.info


def test_traits_are_the_devices(device: Device) -> None:
    traits = device.traits
    assert traits.is_cpu == (device.info.kind == "cpu")
    assert traits.simd_width >= 4
    assert traits.max_work_group >= 256
    assert traits.local_mem_bytes >= 32 << 10
    assert traits.base_align_bytes >= 16


def test_a_context_that_a_thread_made_is_the_devices(device: Device) -> None:
    again = open_device(device.spec, probed=False)
    driver.begin_context(device.handle.int_ptr)
    driver.begin_context(device.handle.int_ptr)  # it is under way
    assert again.context.devices == [device.handle]
    again.queue.finish()
    assert driver.take_context(device.handle.int_ptr) == 0


def test_contexts_are_made_in_turn(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = tmp_path / "turn"
    monkeypatch.setattr(driver, "_turn", str(turn))
    with turn.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        driver.begin_context(device.handle.int_ptr)
        thread = driver._contexts[device.handle.int_ptr]
        thread.join(0.1)
        assert thread.is_alive()
    again = open_device(device.spec, probed=False)
    assert again.context.devices == [device.handle] and not thread.is_alive()


def test_without_a_turn_the_context_is_made_at_first_use(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_turn", str(tmp_path / "gone" / "turn"))
    driver.begin_context(device.handle.int_ptr)
    assert open_device(device.spec, probed=False).context.devices == [device.handle]


_OPENED_EARLY = """
from hrxmp.kernels import device, driver, loader
driver._GPU = 1 << 1  # its processor shall count as one
loader._vendor_libraries = lambda *_: [{library!r}]
loader.prepare_loader(opens={spec!r}, turn={turn!r})
loader.opencl()
early = []
for context in driver._contexts.values():
    context.join()
    early.append(context.address)
opened = device.open_device({spec!r} or None, probed=False)
print(opened.context.int_ptr in early, opened.queue is not None, driver._contexts)
"""


@pytest.mark.parametrize(("spec", "early"), [("", True), ("0", True), ("Intel", False)])
def test_the_first_gpu_is_opened_while_a_process_imports(
    tmp_path: Path, spec: str, early: bool
) -> None:
    """Intel's runtime stands in for NVIDIA's: it is the name that tells a slow driver."""
    runtime = Path(sys.prefix) / "lib" / "libintelocl.so"
    if not runtime.exists():
        pytest.skip("no Intel runtime here")
    (tmp_path / "nvidia").mkdir()
    library = str(tmp_path / "nvidia" / ".." / Path("../" * 20, *runtime.resolve().parts[1:]))
    code = _OPENED_EARLY.format(library=library, spec=spec, turn=str(tmp_path / "turn"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout == f"{early} True {{}}\n", done.stderr


def test_what_is_no_driver_is_passed_over(device: Device) -> None:
    assert driver._gpus("libnowhere.so.1") == driver._gpus("libc.so.6") == []


def test_probe_finds_it_usable(device: Device) -> None:
    assert probe.broken_reason(device.info.index) == ""


def test_devices_are_in_order_of_preference() -> None:
    infos = list_devices(probed=False)
    assert [info.index for info in infos] == list(range(len(infos)))
    order = ["gpu", "other", "cpu"]
    kinds = [order.index(info.kind) for info in infos]
    assert kinds == sorted(kinds)


def test_no_such_device() -> None:
    with pytest.raises(DeviceNotFoundError):
        open_device("no such device")
    assert "DeviceNotFoundError" in probe.broken_reason(10_000)


def test_more_than_one_match() -> None:
    if len(list_devices(probed=False)) < 2:
        pytest.skip("only one device here: no SPEC can match two")
    with pytest.raises(DeviceAmbiguousError):
        open_device("e")  # in every platform's name that we know


def test_broken_devices_are_passed_over_or_named(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        probe, "broken_reason", lambda index: "" if index == device.info.index else "it is broken"
    )
    assert open_device().info == device.info
    monkeypatch.setattr(probe, "broken_reason", lambda index: "it is broken")
    with pytest.raises(DeviceBrokenError, match="it is broken"):
        open_device(device.spec)
    with pytest.raises(DeviceError, match="it is broken"):
        open_device()
