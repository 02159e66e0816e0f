"""The exception tree and the stable codes that cross the wire.

Every process imports this. Codes travel in messages, classes do not: `from_code` rebuilds the
nearest class on the other side. Texts say what went wrong and what to do about it; no text ever
tells a user to delete a folder.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data: what travels in messages and stands in records."""

    code: str
    message: str
    remedy: str = ""
    traceback: str = ""


class HrxmpError(Exception):
    """Root of all errors that hrxmp raises on purpose."""

    code: ClassVar[str] = "error"
    remedy: str = ""

    def __init__(self, message: str, *, remedy: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy or type(self).remedy
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def info(self) -> ErrorInfo:
        """The error as data, for a message or a record."""
        return ErrorInfo(
            code=self.code, message=self.message, remedy=self.remedy, traceback=self.traceback
        )


class UsageError(HrxmpError):
    """A command line, a setting or a call that cannot be meant."""

    code = "usage"


class SettingError(UsageError):
    """An HRXMP_* variable or a flag whose value has the wrong form."""

    code = "setting"


class ChildError(HrxmpError):
    """A process of the run could not be started or died for good."""

    code = "child"


class DeviceError(HrxmpError):
    """No usable OpenCL device, or the device failed."""

    code = "device"


class DeviceNotFoundError(DeviceError):
    """The device SPEC matches nothing."""

    code = "device-not-found"
    remedy = "`hrxmp-run devices` lists what there is"


class DeviceAmbiguousError(DeviceError):
    """The device SPEC matches more than one device."""

    code = "device-ambiguous"
    remedy = "pin one by its index, PCI address or UUID; `hrxmp-run devices` lists them"


class DeviceBrokenError(DeviceError):
    """The device is there but cannot compile or run a one-line kernel."""

    code = "device-broken"


class DeviceMemoryError(DeviceError):
    """The device has not enough memory; the message says what took it."""

    code = "device-memory"


class DeviceFaultError(DeviceError):
    """A kernel faulted or the device was lost: this process cannot use it any more."""

    code = "device-fault"
    remedy = "a new run can use it; `--sanitizer access` names a kernel that leaves its buffers"


class GraphError(HrxmpError):
    """A graph that cannot be run as built."""

    code = "graph"


class UnsupportedError(GraphError):
    """An op, dtype or shape that hrxmp does not support; names the node and what is supported."""

    code = "unsupported"


class ModelError(HrxmpError):
    """A model file that is truncated, foreign, inconsistent or not supported."""

    code = "model"


class StoreError(HrxmpError):
    """The kernel store could not be used (strict mode only; otherwise it is a miss)."""

    code = "store"


class SanitizerError(HrxmpError):
    """The sanitizer found a bad access or a bad value and was told to trap."""

    code = "sanitizer"


class CompileForbiddenError(HrxmpError):
    """A compile after warm-up under `--on-compile error`; names kernel, key and reason."""

    code = "compile-forbidden"
    remedy = "warm the store first with `hrxmp-run warm`"


class CompileError(HrxmpError):
    """A kernel that could not be had. `kernel`, `key` and `log` say which and why."""

    code = "compile"

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        key: str = "",
        log: str = "",
        remedy: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy, traceback=traceback)
        self.kernel = kernel
        self.key = key
        self.log = log


class CompileRejectedError(CompileError):
    """The compiler ran and refused the source."""

    code = "compile-rejected"


class CompileCrashError(CompileError):
    """The compiler's process died; tried again once, then the key is quarantined for the run."""

    code = "compile-crash"


class CompileTimeoutError(CompileError):
    """The job's deadline passed."""

    code = "compile-timeout"


class CompileMemoryError(CompileError):
    """The compiler went past the job's memory limit."""

    code = "compile-memory"


class CompileSetupError(CompileError):
    """The compiler could not be set up, so it never started."""

    code = "compile-setup"


class CompileCancelledError(CompileError):
    """Nobody waits for the job any more."""

    code = "compile-cancelled"


class PoolLostError(CompileError):
    """The compile pool went away and did not come back in time."""

    code = "pool-lost"
    remedy = "`--sync-jit` compiles in the executor, without the pool"


def _tree(root: type[HrxmpError]) -> dict[str, type[HrxmpError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_info(info: ErrorInfo, *, kernel: str = "", key: str = "", log: str = "") -> HrxmpError:
    """Rebuild a received error. An unknown code becomes the root class, the code in its text."""
    cls = _tree(HrxmpError).get(info.code)
    if cls is None:
        return HrxmpError(f"[{info.code}] {info.message}", remedy=info.remedy)
    if issubclass(cls, CompileError):
        return cls(
            info.message,
            kernel=kernel,
            key=key,
            log=log,
            remedy=info.remedy,
            traceback=info.traceback,
        )
    return cls(info.message, remedy=info.remedy, traceback=info.traceback)
