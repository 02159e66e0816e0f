"""What a worker does with one job: device, comparison of components, compiler, store.

Runs in a worker's main thread. Whatever happens becomes one answer; only the process's own death
leaves a job without one, and then the pool answers. pyopencl is loaded at the first real job.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrxmp.errors import (
    CompileError,
    CompileRejectedError,
    CompileSetupError,
    ErrorInfo,
    HrxmpError,
    StoreError,
    UsageError,
)
from hrxmp.identity import fingerprint
from hrxmp.kernels.keys import KeyComponents, Variant, differences
from hrxmp.kernels.store import Store, open_store
from hrxmp.messages import Body, CompileJob, JobDone, JobFailed
from hrxmp.settings import Settings

if TYPE_CHECKING:
    from hrxmp.kernels.build import Built
    from hrxmp.kernels.device import Device

Function = Callable[[str, Variant], Any]
"""A compiler for tests: (device SPEC, variant) -> something with the fields of `Built`."""

MAX_LOG = 1 << 20
_LINE = "kernel void answer(global uchar4 *out) { *out = (uchar4)('*', 0, 0, 0); }"


class Compiler:
    """One worker's compiler with its device and its store."""

    def __init__(
        self, store: Store, scratch: str, vendors: str, likely: str, function: Function | None
    ) -> None:
        self._store = store
        self._likely = likely
        self._scratch = scratch
        self._vendors = vendors
        self._function = function
        self._device: Device | None = None
        self._spec = ""
        self.tried = ""
        """Fingerprint of the device on which the compiler was tried; empty when it was not."""

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], scratch: str, function: Function | None
    ) -> Compiler:
        """The compiler that the pool's settings ask for."""
        settings = Settings.from_environment(environ)
        store = open_store(settings, warn=None)
        vendors = environ.get("OCL_ICD_VENDORS", "")
        return cls(store, scratch, vendors, settings.device, function)

    def run(
        self, job: CompileJob, set_phase: Callable[[str], None]
    ) -> tuple[Body, tuple[bytes, ...]]:
        """Build the job's kernel: the answer and its buffers. Never raises."""
        started = False

        def phase(name: str) -> None:
            nonlocal started
            started = started or name == "compiler"
            set_phase(name)

        try:
            built = self._build(job, phase)
            phase("store")
            return self._done(job, built), (built.binary,)
        except CompileRejectedError as error:
            return _failed(job, "rejected", True, error), ()
        except (CompileSetupError, UsageError) as error:
            return _failed(job, "setup", False, error), ()
        except StoreError as error:  # a strict store: no answer without a kept binary
            return _failed(job, "setup", True, error), ()
        except Exception as error:  # a driver may raise anything
            return _failed(job, "crash" if started else "setup", started, error), ()

    def _build(self, job: CompileJob, phase: Callable[[str], None]) -> Built:
        if self._function is not None:
            phase("compiler")
            return _checked(self._function(job.device, job.variant))
        from hrxmp.kernels import build

        phase("device")
        device = self._open(job.device)
        sanitizer = job.components.sanitizer
        extra = _extra_options(build.components(device, job.variant, sanitizer), job.components)
        build.check_sanitizer(sanitizer)
        _compare(build.components(device, job.variant, sanitizer, extra), job.components)
        phase("compiler")
        return build.build(device, job.variant, sanitizer, extra)

    def wake(self) -> None:
        """Let the drivers load while this process imports the rest. As in `prepare`, what fails
        here fails again at the first job."""
        if self._function is None:
            with contextlib.suppress(Exception):
                self._prepare_loader()

    def prepare(self, *, try_device: bool) -> None:
        """Load what the first job will need, while it is still on its way. What fails here fails
        again there, and is told then.

        `try_device`: a line is compiled and run too. That costs the first job of a compiler
        anyway, and tells an executor that the device works; a broken driver may end this process.
        """
        if self._function is None:
            with contextlib.suppress(Exception):
                likely = self._open_likely(any_kind=try_device)
                if likely is not None and try_device:
                    self.tried = _tried(likely)

    def _open_likely(self, *, any_kind: bool) -> Device | None:
        """Open the GPU that the first job will probably want: contexts of several processes are
        made one after the other, a tenth of a second each."""
        from hrxmp.kernels import build, device  # noqa: F401 - build only to have it loaded

        infos = device.list_devices(probed=False)
        info = device.select(self._likely, infos) if self._likely else infos[0]
        if info.kind == "gpu" or any_kind:
            self._spec = self._open(str(info.index)).spec
        return self._device

    def _prepare_loader(self) -> None:
        from hrxmp.kernels.loader import prepare_loader

        prepare_loader(
            vendors=self._vendors,
            scratch=self._scratch,
            cuda_cache=self._store.driver_cache(),
            opens=self._likely,
            turn=str(Path(self._scratch).parent / "turn"),  # the pool's workers have it in common
        )

    def _open(self, spec: str) -> Device:
        if self._device is None or self._spec != spec:
            from hrxmp.kernels import device

            self._prepare_loader()
            self._device = device.open_device(spec, probed=False)
            self._device.queue.finish()  # a GPU's context is there
            self._spec = spec
        return self._device

    def _done(self, job: CompileJob, built: Built) -> JobDone:
        return JobDone(
            job_id=job.job_id,
            compile_ns=built.compile_ns,
            create_ns=built.create_ns,
            launch_ns=built.launch_ns,
            read_ns=built.read_ns,
            binary_kind=built.kind,
            log=built.log[:MAX_LOG],
            not_stored=self._store.put(
                job.key, job.components, built.binary, built.kind, built.compile_ns
            ),
        )


def load_function(text: str) -> Function:
    """The function of `module:function`."""
    module, _, name = text.partition(":")
    function: Function = getattr(importlib.import_module(module), name)
    return function


def _tried(device: Device) -> str:
    """Compile and run one line; the device's fingerprint when its answer is right."""
    from hrxmp.kernels.loader import opencl

    cl = opencl()
    program = cl._cl._Program(device.context, _LINE)
    program._build(b"", [device.handle])
    kernel, answer = cl.Kernel(program, "answer"), bytearray(4)
    buffer = cl.Buffer(device.context, cl.mem_flags.WRITE_ONLY, len(answer))
    kernel.set_args(buffer)
    cl.enqueue_nd_range_kernel(device.queue, kernel, (1,), (1,))
    cl.enqueue_copy(device.queue, answer, buffer)
    return fingerprint(*device.key_fields()) if answer == b"*\0\0\0" else ""


def _checked(built: Any) -> Built:
    """A compiler of another kind may answer anything; only bytes and numbers go on the wire."""
    numbers = (built.compile_ns, built.create_ns, built.launch_ns, built.read_ns)
    if not isinstance(built.binary, bytes) or not all(isinstance(n, int) for n in numbers):
        raise TypeError(f"the compiler answered rubbish: {type(built.binary).__name__}")
    found: Built = built
    return found


def _extra_options(plain: KeyComponents, wanted: KeyComponents) -> str:
    """The options that the executor adds to the usual ones."""
    usual = plain.build_options + " "
    return (
        wanted.build_options.removeprefix(usual) if wanted.build_options.startswith(usual) else ""
    )


def _compare(found: KeyComponents, wanted: KeyComponents) -> None:
    """Two versions of the package, or two devices, fail loudly instead of sharing a key."""
    if found != wanted:
        items = differences(wanted, found)
        text = "; ".join(f"{d.component}: {d.before!r} there, {d.after!r} here" for d in items)
        raise CompileSetupError(
            f"executor and worker do not mean the same kernel: {text}",
            remedy="executor and pool must run the same version on the same device",
        )


def _failed(job: CompileJob, outcome: str, started: bool, error: Exception) -> JobFailed:
    if isinstance(error, HrxmpError):
        info = error.info()
    else:
        text = "".join(traceback.format_exception(error))[-4000:]
        info = ErrorInfo(code="compile", message=f"{type(error).__name__}: {error}", traceback=text)
    log = error.log if isinstance(error, CompileError) else ""
    return JobFailed(
        job_id=job.job_id,
        compiler_started=started,
        outcome=outcome,
        error=info,
        log=log[:MAX_LOG],
    )
