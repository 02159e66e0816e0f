"""Prepares the OpenCL loader of this process, and hands out pyopencl afterwards.

Owns the environment variables that the loader and the drivers read (they have no other
interface), so it must run before pyopencl is imported; executor and workers call it with values
from their settings. It reads no variable itself, and it writes nothing outside its own private
folder, which is removed at exit.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from hrxmp.errors import DeviceError, DeviceFaultError, DeviceMemoryError
from hrxmp.kernels import driver
from hrxmp.scratch import ScratchFolder

_SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
_INTEL_LIBRARY = "libintelocl.so"
_NVIDIA_LIBRARY = "libnvidia-opencl.so.1"

_NO_ROOM = (-4, -6)
"""MEM_OBJECT_ALLOCATION_FAILURE, OUT_OF_HOST_MEMORY."""
OUT_OF_RESOURCES = -5
_FAULTS = (-2, OUT_OF_RESOURCES, -14, -34, -36, -9999)
"""What drivers say of a kernel that left its memory, and then of every other call: a device that is
not available, OUT_OF_RESOURCES, an event that failed, an invalid context or queue, NVIDIA's own."""

_vendors = ""
"""What the prepared loader was told; empty while it is not prepared."""


def prepare_loader(
    *,
    vendors: str = "",
    prefix: str = sys.prefix,
    scratch: str | None = None,
    pocl_cache: str = "",
    cuda_cache: str = "",
    opens: str | None = None,
    turn: str = "",
) -> None:
    """Let the loader find every driver of this machine; the first call of a process counts.

    `vendors` is the user's OCL_ICD_VENDORS: given, it is left to rule alone. `scratch` is the
    folder for the private one (default: the system's temporary folder). `pocl_cache` and
    `cuda_cache` are folders for the drivers' own caches; PoCL's defaults to a private one, because
    processes that share it break each other's entries. The drivers begin to load. `opens` is
    the SPEC of the device that this process will open for certain: a GPU's context is begun where
    that is the first device. `turn` is a file that a pool's workers have in common (see `driver`).
    """
    global _vendors
    if _vendors:
        return
    folder = ScratchFolder(Path(scratch or tempfile.gettempdir()))
    atexit.register(folder.remove)
    private = folder.path
    libraries = [] if vendors else _vendor_libraries(_SYSTEM_VENDORS, Path(prefix))
    _vendors = vendors or str(_vendor_folder(private, libraries))
    os.environ["OCL_ICD_VENDORS"] = _vendors
    os.environ["PYOPENCL_NO_CACHE"] = "1"
    os.environ["POCL_CACHE_DIR"] = pocl_cache or str(_made(private / "pocl"))
    if cuda_cache:
        os.environ["CUDA_CACHE_PATH"] = cuda_cache
    if turn:  # a worker launches one kernel at a time, and a context for that takes half as long
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    driver.wake(libraries, first_gpu=opens in ("", "0"), turn=turn)


def prepared_vendors() -> str:
    """What the loader of this process was told to read, for a child that must see the same."""
    return _vendors


def opencl() -> ModuleType:
    """The pyopencl module. DeviceError when the loader was not prepared or pyopencl is broken."""
    if not _vendors:
        raise DeviceError("the OpenCL loader was not prepared: call prepare_loader() first")
    return _imported()


def device_error(error: Exception, doing: str) -> DeviceError:
    """An error of pyopencl's as one of ours: no room, a device that is lost, or something else.

    `doing` completes "the device failed while". Build errors have classes of their own.
    """
    status = getattr(error, "code", 0)
    kind = DeviceError
    if status in _NO_ROOM:
        kind = DeviceMemoryError
    elif status in _FAULTS:
        kind = DeviceFaultError
    return kind(f"the device failed while {doing}: {error}")


@cache
def _imported() -> ModuleType:
    try:
        module = import_module("pyopencl")
        _share_setters(import_module("pyopencl.invoker"))
    except ImportError as error:
        raise DeviceError(f"pyopencl cannot be imported: {error}") from error
    driver.wait_awake()
    return module


def _share_setters(invoker: Any) -> None:
    """Let kernel objects with equal arguments share their setter.

    pyopencl generates and executes Python text for every kernel object, 1.3 ms each; a program of
    240 commands would pay a third of a second at its first launch.
    """
    generate = invoker._generate_enqueue_and_set_args_module
    made: dict[tuple[object, ...], object] = {}

    def shared(*parts: object) -> object:
        key = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
        if key not in made:
            made[key] = generate(*parts)
        return made[key]

    invoker._generate_enqueue_and_set_args_module = shared


def _vendor_folder(private: Path, libraries: list[str]) -> Path:
    folder = _made(private / "vendors")
    for position, library in enumerate(libraries):
        (folder / f"{position:02}.icd").write_text(f"{library}\n", encoding="utf-8")
    return folder


def _vendor_libraries(system: Path, prefix: Path) -> list[str]:
    """Drivers by path or soname, each once: the system's, then those that have no .icd file."""
    libraries = [entry for entry in _system_libraries(system) if _may_load(entry)]
    known = {Path(entry).name for entry in libraries}
    # The package's own .icd file names a folder of its builder's machine.
    intel = prefix / "lib" / _INTEL_LIBRARY
    if intel.exists() and _INTEL_LIBRARY not in known:
        libraries.append(str(intel))
    # Drivers in containers come without an .icd file; the loader passes over a missing library.
    if _NVIDIA_LIBRARY not in known:
        libraries.append(_NVIDIA_LIBRARY)
    return libraries


def _system_libraries(system: Path) -> list[str]:
    try:
        files = sorted(system.glob("*.icd"))
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except OSError:
        return []
    lines = (text.strip().splitlines() for text in texts)
    return [first[0].strip() for first in lines if first]


def _may_load(library: str) -> bool:
    return not library.startswith("/") or Path(library).exists()


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder
