"""Opening real devices: by SPEC, by default, and past a broken one."""

from __future__ import annotations

import pytest

from hrxmp.errors import DeviceAmbiguousError, DeviceBrokenError, DeviceError, DeviceNotFoundError
from hrxmp.kernels import probe
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
