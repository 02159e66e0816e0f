"""Synchronous JIT: the compile function in the executor's own process, in order, no waits.

It asks for the same keys as the pool and calls the same function; what it compiles goes into the
same store.
"""

from __future__ import annotations

from collections.abc import Callable

from hrxmp import records
from hrxmp.errors import CompileError, CompileRejectedError, ErrorInfo
from hrxmp.executor.jit import Binary, Wanted
from hrxmp.kernels import build
from hrxmp.kernels.device import Device
from hrxmp.kernels.store import Store
from hrxmp.trace import Tracer

_WORKER = "executor"


class LocalCompiler:
    """Compiles when asked; the outcome is there when `submit` returns."""

    synchronous = True

    def __init__(self, device: Device, store: Store, tracer: Tracer | None) -> None:
        self._device = device
        self._store = store
        self._tracer = tracer
        self._results: dict[int, Binary] = {}

    def submit(
        self, request: int, wanted: Wanted, exec_id: int | None, accepted: Callable[[str], None]
    ) -> None:
        """Compile now. Raises CompileError."""
        accepted("compile")
        self._say_begin(request, wanted, exec_id)
        try:
            built = build.build(self._device, wanted.variant, wanted.components.sanitizer)
        except CompileError as error:
            self._say_failed(request, wanted, exec_id, error)
            raise
        self._say_built(request, wanted, exec_id, built)
        self._store.put(wanted.key, wanted.components, built.binary, built.kind, built.compile_ns)
        self._results[request] = Binary(payload=built.binary, compile_ns=built.compile_ns)

    def ready(self, request: int) -> bool:
        """Always: `submit` compiled."""
        return request in self._results

    def result(self, request: int) -> Binary:
        """The outcome of `submit`."""
        return self._results.pop(request)

    def urgent(self, requests: list[int]) -> None:
        """Nothing to hurry: everything is compiled when asked for."""

    def settle(self, request: int) -> None:
        """Forget an outcome that nobody fetched."""
        self._results.pop(request, None)

    def close(self) -> None:
        """Nothing is open."""

    def _say_begin(self, request: int, wanted: Wanted, exec_id: int | None) -> None:
        if self._tracer is not None:
            self._tracer.emit(
                records.CompileBegin, exec_id=exec_id, request=request, kernel=wanted.kernel,
                worker=_WORKER, attempt=1, queue_ns=0,
            )  # fmt: skip

    def _say_built(
        self, request: int, wanted: Wanted, exec_id: int | None, built: build.Built
    ) -> None:
        self._say_end(
            request, wanted, exec_id, started=True, outcome="ok", compile_ns=built.compile_ns,
            finish_ns=built.finish_ns, size=len(built.binary), log=built.log, error=None,
        )  # fmt: skip

    def _say_failed(
        self, request: int, wanted: Wanted, exec_id: int | None, error: CompileError
    ) -> None:
        rejected = isinstance(error, CompileRejectedError)
        self._say_end(
            request, wanted, exec_id, started=rejected, outcome="rejected" if rejected else "setup",
            compile_ns=0, finish_ns=0, size=0, log=error.log, error=error.info(),
        )  # fmt: skip

    def _say_end(
        self,
        request: int,
        wanted: Wanted,
        exec_id: int | None,
        *,
        started: bool,
        outcome: str,
        compile_ns: int,
        finish_ns: int,
        size: int,
        log: str,
        error: ErrorInfo | None,
    ) -> None:
        if self._tracer is not None:
            self._tracer.emit(
                records.CompileEnd, exec_id=exec_id, request=request, kernel=wanted.kernel,
                worker=_WORKER, attempt=1, compiler_started=started, outcome=outcome,
                compile_ns=compile_ns, finish_ns=finish_ns, binary_bytes=size, log=log,
                log_path="", error=error, synthetic=False,
            )  # fmt: skip
