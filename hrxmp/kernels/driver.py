"""Opens drivers while the interpreter is busy: loads them, and makes a GPU's context.

Executor and workers come here through `loader` and `device`. NVIDIA's driver takes 0.1 s to load
and as long for a context, and pyopencl keeps the interpreter from everything else meanwhile. So
threads ask the drivers themselves, and this process imports numpy and pyopencl. It raises nothing:
what fails here pyopencl does again, and says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import threading
from collections.abc import Iterator, Sequence
from typing import Any

GET_DEVICE_INFO = 3
"""A function's position in the table that every driver's objects point to (cl_khr_icd)."""
_GET_DEVICE_IDS = 2
_CREATE_CONTEXT = 4
_GPU = 1 << 2

_waking: threading.Thread | None = None
_contexts: dict[int, _Context] = {}
"""By the address of their device; taken out by who uses them."""
_turn = ""


def wake(libraries: Sequence[str], *, first_gpu: bool, turn: str) -> None:
    """Load drivers, if there is a slow one. `first_gpu`: its context will be wanted, and is begun.

    `turn` is a file, or empty. Processes that share it make their contexts one after the other:
    ten that did it at once had the first one after 1.1 s, and not after 0.12.
    """
    global _waking, _turn
    _turn = turn
    _waking = threading.Thread(target=_wake, args=(libraries, first_gpu), name="drivers")
    _waking.start()


def wait_awake() -> None:
    """Return when the drivers are loaded."""
    if _waking is not None:
        _waking.join()


def begin_context(device: int) -> None:
    """Have a context for the device at this address made, unless it is under way."""
    if device not in _contexts:
        _contexts[device] = _Context(device)
        _contexts[device].start()


def take_context(device: int) -> int:
    """The address of the context that was begun, for the caller to release; 0: there is none."""
    begun = _contexts.pop(device, None)
    if begun is None:
        return 0
    begun.join()
    return begun.address


def function(item: int, position: int, *types: Any) -> Any:
    """A function of the driver that this object belongs to; the first type is the result's."""
    table = ctypes.cast(item, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    return ctypes.CFUNCTYPE(*types)(table[position])


class _Context(threading.Thread):
    """A context in the making."""

    def __init__(self, device: int) -> None:
        super().__init__(name="context")
        self.address = 0
        self._device = device

    def run(self) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        create = function(
            self._device, _CREATE_CONTEXT,
            pointer, pointer, number, pointer, pointer, pointer, pointer,
        )  # fmt: skip
        devices, status = (pointer * 1)(self._device), ctypes.c_int32()
        with contextlib.suppress(OSError), _in_turn():  # no turn: its folder is gone, so is the run
            self.address = create(None, 1, devices, None, None, ctypes.byref(status)) or 0


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    """One process at a time. A lock that ends with its holder; the pool bounds a start."""
    if not _turn:
        yield
        return
    with open(_turn, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wake(libraries: Sequence[str], first_gpu: bool) -> None:
    if not any(_loaded(library) for library in libraries if "nvidia" in library):
        return  # a processor's driver loads in 15 ms, and this thread would take them from others
    gpus = [gpu for library in libraries for gpu in _gpus(library)]
    if first_gpu and gpus:
        begin_context(gpus[0])


def _loaded(library: str) -> ctypes.CDLL | None:
    """A driver's library, if there is one."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(library)
    return None


def _gpus(library: str) -> list[int]:
    """Load a driver; its GPUs, in its order."""
    find = getattr(_loaded(library), "clGetExtensionFunctionAddress", None)
    if find is None:
        return []
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = find(b"clIcdGetPlatformIDsKHR")
    if not address:
        return []
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    platforms = _listed(ctypes.CFUNCTYPE(ctypes.c_int32, number, pointer, pointer)(address))
    found = []
    for platform in platforms:
        types = (ctypes.c_int32, pointer, ctypes.c_uint64, number, pointer, pointer)
        found += _listed(function(platform, _GET_DEVICE_IDS, *types), platform, _GPU)
    return found


def _listed(ask: Any, *about: int) -> list[int]:
    """The objects that a function of OpenCL's lists: asked for their number first."""
    count = ctypes.c_uint32()
    if ask(*about, 0, None, ctypes.byref(count)) or not count.value:
        return []
    items = (ctypes.c_void_p * count.value)()
    if ask(*about, count.value, items, None):
        return []
    return [item for item in items if item]
