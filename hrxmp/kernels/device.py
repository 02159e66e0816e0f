"""Finds and opens the OpenCL device: its SPEC, its traits, its part of a kernel key.

Executor and workers run it (the launcher only to list devices). Devices are numbered in order of
preference: GPUs, accelerators, Intel's CPU runtime, PoCL, other CPUs. It compiles nothing itself:
whether a device works is asked in a child process (`probe`), and nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from hrxmp.errors import DeviceAmbiguousError, DeviceBrokenError, DeviceError, DeviceNotFoundError
from hrxmp.kernels import driver, probe, x86
from hrxmp.kernels.definition import DeviceTraits, Form
from hrxmp.kernels.loader import device_error, opencl, prepare_loader

if TYPE_CHECKING:
    import pyopencl as cl

KeyFields = tuple[str, str, int, str]
"""Platform, device, compute units, driver version."""

__all__ = [
    "Device",
    "DeviceInfo",
    "DeviceTraits",
    "list_devices",
    "open_device",
    "open_indexed",
    "prepare_loader",
    "select",
]


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A device as people see it. `pci` and `uuid` are empty where the driver has none."""

    index: int
    platform: str
    name: str
    vendor: str
    driver: str
    version: str
    kind: str
    """"gpu", "cpu" or "other"."""
    pci: str = ""
    """Domain, bus, device and function, e.g. `0000:65:00.0`."""
    uuid: str = ""
    compute_units: int
    memory_bytes: int
    usable: bool = True
    """False when it could not compile and run one line; `reason` says why."""
    reason: str = ""

    @property
    def label(self) -> str:
        """Platform and name in one text; a SPEC that is exactly this means this device."""
        return f"{self.platform} / {self.name}"


class Device:
    """An open device: one context and one in-order queue, for the process that opened it.

    A GPU's context is made by a thread, and who needs it first waits: what names a kernel and
    lowers a graph is known before.
    """

    def __init__(self, info: DeviceInfo, handle: cl.Device, spec: str) -> None:
        self.info = info
        self.spec = spec
        """A SPEC that opens exactly this device in another process of this machine."""
        self.handle = handle
        self.traits = _traits(info, handle)
        if info.kind == "gpu":
            driver.begin_context(handle.int_ptr)

    @cached_property
    def context(self) -> cl.Context:
        """The context. DeviceError when the driver refuses it."""
        module = opencl()
        address = driver.take_context(self.handle.int_ptr)
        try:
            if address:
                return module.Context.from_int_ptr(address, retain=False)
            return module.Context([self.handle])
        except module.Error as error:
            raise device_error(error, "its context was made") from error

    @cached_property
    def queue(self) -> cl.CommandQueue:
        """The queue of all launches but first ones. DeviceError without a context."""
        return opencl().CommandQueue(self.context, self.handle)

    @cached_property
    def side_queue(self) -> cl.CommandQueue:
        """A second queue, for launches that must not wait for what the first one holds."""
        return opencl().CommandQueue(self.context, self.handle)

    def key_fields(self) -> KeyFields:
        """Platform, device, compute units and driver version, as a kernel key names them."""
        return _key_fields(self.info, self.handle)


def list_devices(*, probed: bool = True) -> list[DeviceInfo]:
    """All devices in order of preference; `probed` asks each whether it works (a child each)."""
    infos = [info for info, _ in _enumerate()]
    if not probed or not infos:
        return infos
    with ThreadPoolExecutor(len(infos)) as pool:
        reasons = list(pool.map(probe.broken_reason, range(len(infos))))
    return [_judged(info, reason) for info, reason in zip(infos, reasons, strict=True)]


def open_device(
    spec: str | None = None,
    *,
    probed: bool = True,
    proven: Callable[[KeyFields], bool] | None = None,
    passed_over: Callable[[str], None] | None = None,
) -> Device:
    """Open the device that SPEC means, or the first usable one.

    SPEC is an index, a PCI address, a UUID, a label, or a part of a name. `probed=False` trusts
    the device, for a process that is handed the `Device.spec` of another one's open device; one
    that is `proven`, because a kernel was compiled for it before, is trusted too. `passed_over` is
    told of each device that does not work when a later one is taken instead.
    Raises DeviceNotFoundError, DeviceAmbiguousError, DeviceBrokenError, DeviceError (none usable).
    """
    found = _enumerate()
    infos = [info for info, _ in found]
    candidates = [select(spec, infos)] if spec else infos
    refused: list[str] = []
    for info in candidates:
        handle = found[info.index][1]
        trusted = not probed or (proven is not None and proven(_key_fields(info, handle)))
        reason = "" if trusted else probe.broken_reason(info.index)
        if not reason:
            if passed_over is not None:
                for text in refused:
                    passed_over(f"device {text}: passed over")
            return Device(info, handle, _exact_spec(info, infos))
        refused.append(f"{info.index} {info.label}: {reason}")
    if spec:
        raise DeviceBrokenError(f"device {spec!r} does not work: {refused[0]}")
    raise _none_usable(refused)


def open_indexed(index: int) -> Device:
    """Open device `index` without asking whether it works."""
    return open_device(str(index), probed=False)


def select(spec: str, infos: list[DeviceInfo]) -> DeviceInfo:
    """The one device that SPEC means. DeviceNotFoundError or DeviceAmbiguousError otherwise."""
    text = spec.strip().lower()
    exact = [info for info in infos if text in _exact_names(info)]
    matches = exact or [info for info in infos if text and text in info.label.lower()]
    if not matches:
        raise DeviceNotFoundError(f"no device matches {spec!r}")
    if len(matches) > 1:
        listed = "; ".join(f"{info.index} {info.label}" for info in matches)
        raise DeviceAmbiguousError(f"{len(matches)} devices match {spec!r}: {listed}")
    return matches[0]


def _key_fields(info: DeviceInfo, handle: cl.Device) -> KeyFields:
    # A CPU runtime names the product line only; its vector width is what its code depends on.
    width = handle.native_vector_width_float
    name = f"{info.name} float{width}"
    return f"{info.platform} {info.version}", name, info.compute_units, info.driver


def _exact_names(info: DeviceInfo) -> set[str]:
    names = {str(info.index), info.label}
    if info.pci:  # also as nvidia-smi writes it, with a domain of eight digits
        names |= {info.pci, info.pci.removeprefix("0000:"), f"0000{info.pci}"}
    if info.uuid:
        names |= {info.uuid, f"GPU-{info.uuid}"}
    return {name.lower() for name in names}


def _exact_spec(info: DeviceInfo, infos: list[DeviceInfo]) -> str:
    """The most durable name that only this device has; its index when it has no other."""
    for name in (info.uuid, info.pci, info.label):
        if name and sum(name.lower() in _exact_names(other) for other in infos) == 1:
            return name
    return str(info.index)


def _none_usable(refused: list[str]) -> DeviceError:
    remedy = "pip install 'hrxmp[cpu]' brings Intel's CPU runtime; Debian has pocl-opencl-icd"
    if not refused:
        return DeviceError("there is no OpenCL device", remedy=remedy)
    return DeviceError(f"no OpenCL device works: {'; '.join(refused)}", remedy=remedy)


def _judged(info: DeviceInfo, reason: str) -> DeviceInfo:
    return msgspec.structs.replace(info, usable=not reason, reason=reason)


def _enumerate() -> list[tuple[DeviceInfo, cl.Device]]:
    module = opencl()
    try:
        platforms = module.get_platforms()
    except module.Error:  # the loader's way to say that there is no platform
        return []
    handles = [handle for platform in platforms for handle in _devices_of(platform)]
    handles.sort(key=_preference)  # stable: the loader's order within a kind
    return [(_info(index, handle), handle) for index, handle in enumerate(handles)]


def _devices_of(platform: cl.Platform) -> list[cl.Device]:
    try:
        return list(platform.get_devices())
    except opencl().Error:  # a platform without a device
        return []


def _preference(handle: cl.Device) -> int:
    order = ("gpu", "other", "intel-cpu", "pocl-cpu", "cpu")
    kind, form = _kind(handle), _form(handle)
    return order.index(form if kind == "cpu" and form in order else kind)


def _kind(handle: cl.Device) -> str:
    kinds = opencl().device_type
    if handle.type & kinds.GPU:
        return "gpu"
    return "cpu" if handle.type & kinds.CPU else "other"


def _form(handle: cl.Device) -> Form:
    platform = handle.platform
    is_cpu = _kind(handle) == "cpu"
    if is_cpu and platform.name.startswith("Intel"):
        return "intel-cpu"
    if is_cpu and platform.name == "Portable Computing Language":
        return "pocl-cpu"
    return "nvidia" if platform.name.startswith("NVIDIA") else "generic"


def _info(index: int, handle: cl.Device) -> DeviceInfo:
    return DeviceInfo(
        index=index,
        platform=handle.platform.name.strip(),
        name=handle.name.strip(),
        vendor=handle.vendor.strip(),
        driver=handle.driver_version.strip(),
        version=handle.version.strip(),
        kind=_kind(handle),
        pci=_pci(handle),
        uuid=_uuid(handle),
        compute_units=handle.max_compute_units,
        memory_bytes=handle.global_mem_size,
    )


def _traits(info: DeviceInfo, handle: cl.Device) -> DeviceTraits:
    extensions = set(handle.extensions.split())
    form = _form(handle)
    return DeviceTraits(
        form=form,
        is_cpu=info.kind == "cpu",
        compute_units=info.compute_units,
        simd_width=handle.warp_size_nv if form == "nvidia" else handle.native_vector_width_float,
        local_mem_bytes=handle.local_mem_size,
        base_align_bytes=handle.mem_base_addr_align // 8,
        fp16="cl_khr_fp16" in extensions,
        subgroups=bool(extensions & {"cl_khr_subgroups", "cl_intel_subgroups"}),
        # Intel's CPU runtime lists the extension on any processor, and then takes it apart.
        dot_product=(
            x86.has_byte_dot()
            if form == "intel-cpu"
            else "cl_khr_integer_dot_product" in extensions
        ),
        byte_tiles=form == "intel-cpu" and x86.has_byte_tiles(),
        max_work_group=handle.max_work_group_size,
    )


def _pci(handle: cl.Device) -> str:
    if "cl_nv_device_attribute_query" not in handle.extensions:
        return ""
    # NVIDIA's slot is the device's number alone, without the function: 6 for 00:06.0.
    domain = getattr(handle, "pci_domain_id_nv", 0)
    return f"{domain:04x}:{handle.pci_bus_id_nv:02x}:{handle.pci_slot_id_nv:02x}.0"


_UUID_KHR = 0x106A  # CL_DEVICE_UUID_KHR, which pyopencl neither names nor decodes
_UUID_BYTES = 16


def _uuid(handle: cl.Device) -> str:
    if "cl_khr_device_uuid" not in handle.extensions:
        return ""
    types = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t)
    get_info = driver.function(
        handle.int_ptr, driver.GET_DEVICE_INFO, *types, ctypes.c_void_p, ctypes.c_void_p
    )
    result = ctypes.create_string_buffer(_UUID_BYTES)
    if get_info(handle.int_ptr, _UUID_KHR, _UUID_BYTES, result, None) != 0:
        return ""
    return str(uuid.UUID(bytes=result.raw))
