"""Missing kernels: asked for at once, compiled elsewhere or here, waited for at first need.

Used by the executor's main thread. It knows no socket: a `Compiler` brings binaries, from the
pool (asynchronous) or from the compile function in this process (synchronous), for exactly the
same keys. Each key is asked for once a process; a later execution finds it in memory or joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any, Protocol

import msgspec

from hrxmp import records
from hrxmp.errors import CompileError, CompileForbiddenError, CompileRejectedError, HrxmpError
from hrxmp.executor.counts import GraphCounts
from hrxmp.executor.guard import Guard
from hrxmp.executor.kernel_table import KernelTable
from hrxmp.executor.reasons import Reason, Reasons
from hrxmp.kernels import catalog
from hrxmp.kernels.keys import KeyComponents, Variant
from hrxmp.trace import Tracer


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that a graph program needs."""

    key: str
    variant: Variant
    components: KeyComponents

    @property
    def kernel(self) -> str:
        """The kernel definition's name, as records show it."""
        return self.variant.definition


class Binary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished binary and what the compiler took for it (0: not known)."""

    payload: bytes
    compile_ns: int


class Compiler(Protocol):
    """Brings binaries that are not in the store. Exactly one outcome for each request."""

    synchronous: bool

    def submit(
        self, request: int, wanted: Wanted, exec_id: int | None, accepted: Callable[[str], None]
    ) -> None:
        """Start on a request. `accepted(via)` is called once, before any record of the compile."""

    def ready(self, request: int) -> bool:
        """Whether the outcome is there; returns as soon as the request is accepted."""

    def result(self, request: int) -> Binary:
        """Wait, bounded, for the outcome. Raises CompileError."""

    def urgent(self, requests: list[int]) -> None:
        """These are waited for now, in this order."""

    def settle(self, request: int) -> None:
        """Give a request up; returns once it is known how it was served."""


class Cause(msgspec.Struct, kw_only=True):
    """The graph execution on whose behalf kernels are asked for; `exec_id` None is a prefetch."""

    exec_id: int | None
    counts: GraphCounts


class Request(msgspec.Struct, kw_only=True):
    """A kernel that was asked for, and whether it is loaded, under way or failed."""

    request: int
    wanted: Wanted
    asked_by: int | None
    reason: Reason
    via: str = ""
    stored: Binary | None = None
    loaded: bool = False
    prefetched: bool = False
    """Only a prefetch asked so far; the first execution that needs it counts it as its own."""


class Jit:
    """The requests of this process by key."""

    def __init__(
        self,
        table: KernelTable,
        compiler: Compiler,
        reasons: Reasons,
        guard: Guard,
        tracer: Tracer | None,
    ) -> None:
        self._table = table
        self._compiler = compiler
        self._reasons = reasons
        self._guard = guard
        self._tracer = tracer
        self._requests: dict[str, Request] = {}
        self._issued = 0
        self._warned: set[int | None] = set()

    @property
    def asynchronous(self) -> bool:
        """Whether kernels are compiled elsewhere while the executor goes on."""
        return not self._compiler.synchronous

    @property
    def stores(self) -> bool:
        """Whether there is a store that keeps what is compiled."""
        return self._reasons.stores

    def ask(self, wanted: Iterable[Wanted], cause: Cause) -> None:
        """Ask for every kernel that is not in memory; returns without waiting.

        The synchronous compiler compiles here, in order. Raises CompileForbiddenError under the
        guard; nothing is asked for then that would have to be compiled.
        """
        for item in wanted:
            known = self._requests.get(item.key)
            if known is None:
                self._ask_anew(item, cause)
            elif known.prefetched and cause.exec_id is not None:
                self._adopt(known, cause)
            elif cause.exec_id is not None:
                cause.counts.memory_hits += 1

    def prefetch(self, wanted: Iterable[Wanted], *, longest_first: bool) -> None:
        """Ask on nobody's behalf, in order or the longest first."""
        ordered = sorted(wanted, key=_length, reverse=True) if longest_first else wanted
        self.ask(ordered, Cause(exec_id=None, counts=GraphCounts()))

    def need(self, key: str, cause: Cause) -> None:
        """Return once the kernel is loaded; waits for it when it is still being compiled.

        Raises the CompileError of the request. A failed key may be asked for again.
        """
        request = self._requests[key]
        if request.loaded:
            return
        try:
            binary = request.stored or self._wait(request, cause)
            self._load(request, binary, cause)
        except CompileError as error:
            del self._requests[key]
            cause.counts.failures += 1
            raise _named(error, request.wanted) from error

    def expect(self, keys: list[str]) -> None:
        """Tell the compiler in which order the kernels will be needed."""
        waiting = [self._requests[key] for key in keys]
        pending = [r.request for r in waiting if not r.loaded and r.stored is None]
        if pending:
            self._compiler.urgent(pending)

    def abandon(self, keys: Iterable[str]) -> None:
        """After a failed execution: give up what it asked for and did not get."""
        for key in keys:
            request = self._requests.get(key)
            if request and not request.loaded and request.stored is None:
                self._compiler.settle(request.request)
                del self._requests[key]

    def forget(self) -> None:
        """Forget every loaded kernel: the next execution takes it from the store, or compiles."""
        self._requests = {key: r for key, r in self._requests.items() if not r.loaded}
        self._table.clear()

    # -- asking ------------------------------------------------------------------------------

    def _ask_anew(self, wanted: Wanted, cause: Cause) -> None:
        entry, reason = self._reasons.look_up(wanted.key, wanted.components)
        stored = Binary(payload=entry.binary, compile_ns=entry.compile_ns) if entry else None
        if stored is None:
            self._check_guard(wanted, reason, cause, request=self._issued + 1)
        self._issued += 1
        request = Request(
            request=self._issued,
            wanted=wanted,
            asked_by=cause.exec_id,
            reason=reason,
            stored=stored,
            prefetched=cause.exec_id is None,
        )
        self._requests[wanted.key] = request
        cause.counts.requests += 1
        if stored is not None:
            request.via = "disk"
            cause.counts.disk_hits += 1
            self._say_requested(request, "disk", request.request, cause.exec_id)
            return
        self._submit(request, cause)

    def _submit(self, request: Request, cause: Cause) -> None:
        def accepted(via: str) -> None:
            request.via = via
            _count(cause.counts, via)
            self._say_requested(request, via, request.request, cause.exec_id)

        self._reasons.remember(request.wanted.key, request.wanted.components)
        try:
            self._compiler.submit(request.request, request.wanted, cause.exec_id, accepted)
        except CompileError as error:
            del self._requests[request.wanted.key]
            cause.counts.failures += 1
            raise _named(error, request.wanted) from error

    def _adopt(self, known: Request, cause: Cause) -> None:
        """An execution needs what a prefetch has asked for: a join, unless the store had it."""
        known.prefetched = False
        self._issued += 1
        via = "disk" if known.via == "disk" else "prefetch"
        cause.counts.requests += 1
        _count(cause.counts, via)
        self._say_requested(known, via, self._issued, cause.exec_id)

    def _check_guard(self, wanted: Wanted, reason: Reason, cause: Cause, request: int) -> None:
        action = self._guard.action
        if action == "off" or (action == "warn" and cause.exec_id in self._warned):
            return
        self._warned.add(cause.exec_id)
        text = f"{wanted.variant.label()} (key {wanted.key[:16]}) would compile: {reason.text()}"
        if self._tracer is not None:
            self._tracer.emit(
                records.Guard, exec_id=cause.exec_id, request=request, kernel=wanted.kernel,
                key=wanted.key, action=action, why=reason.why, near=reason.near,
                differs=list(reason.differs), count=1,
            )  # fmt: skip
        if action == "error":
            cause.counts.failures += 1
            raise CompileForbiddenError(f"after warm-up {text}")
        self._reasons.warn(f"hrxmp: after warm-up {text}")

    # -- getting -----------------------------------------------------------------------------

    def _wait(self, request: Request, cause: Cause) -> Binary:
        begin = monotonic_ns()
        if self._compiler.ready(request.request):
            return self._compiler.result(request.request)
        names = {"kernel": request.wanted.kernel, "asked_by": request.asked_by}
        self._emit(records.WaitBegin, request, cause, **names)
        outcome = "ok"
        try:
            return self._compiler.result(request.request)
        except HrxmpError as error:
            outcome = error.code
            raise
        finally:
            dur = monotonic_ns() - begin
            cause.counts.waits += 1
            cause.counts.wait_ns += dur
            self._emit(records.WaitEnd, request, cause, **names, dur_ns=dur, outcome=outcome)

    def _load(self, request: Request, binary: Binary, cause: Cause) -> None:
        wanted = request.wanted
        try:
            report = self._table.load(wanted.key, wanted.variant, binary.payload, binary.compile_ns)
        except CompileRejectedError as error:
            if request.stored is None:
                raise
            self._replace_refused(request, cause, error)
            return
        request.loaded, request.stored = True, None
        self._reasons.remember(wanted.key, wanted.components)
        cause.counts.driver_compiles += report.driver_compiled
        self._emit(
            records.KernelLoad, request, cause, kernel=wanted.kernel, key=wanted.key,
            load_ns=report.load_ns, launch_ns=report.launch_ns,
            driver_compiled=report.driver_compiled,
        )  # fmt: skip
        if report.driver_compiled:
            reason = Reason(why="driver-compiled")
            self._check_guard(wanted, reason, cause, request.request)

    def _replace_refused(self, request: Request, cause: Cause, error: CompileRejectedError) -> None:
        """The driver refuses what the store had: say why, and have it compiled anew."""
        self._reasons.refuse(request.wanted.key)
        del self._requests[request.wanted.key]
        self._ask_anew(request.wanted, cause)
        self.need(request.wanted.key, cause)

    # -- records -----------------------------------------------------------------------------

    def _say_requested(self, known: Request, via: str, request: int, exec_id: int | None) -> None:
        if self._tracer is None:
            return
        wanted, reason = known.wanted, known.reason
        self._tracer.emit(
            records.CompileRequested, exec_id=exec_id, request=request, kernel=wanted.kernel,
            key=wanted.key, params=dict(wanted.variant.params),
            local_size=list(wanted.variant.local_size), via=via,
            source_digest=wanted.components.source,
            why=reason.why, near=reason.near, differs=list(reason.differs),
            prefetch=exec_id is None,
        )  # fmt: skip

    def _emit(
        self, record: type[records.Record], request: Request, cause: Cause, **fields: Any
    ) -> None:
        if self._tracer is not None:
            self._tracer.emit(record, exec_id=cause.exec_id, request=request.request, **fields)


def _length(wanted: Wanted) -> int:
    """How long a kernel that was never compiled will take: its source tells to a factor of two."""
    return len(catalog.source_text(catalog.get(wanted.kernel))).bit_length()


def _count(counts: GraphCounts, via: str) -> None:
    if via == "compile":
        counts.compiles += 1
    elif via in ("in_flight", "prefetch"):
        counts.joins += 1
    elif via == "disk":
        counts.disk_hits += 1


def _named(error: CompileError, wanted: Wanted) -> CompileError:
    error.kernel = error.kernel or wanted.variant.label()
    error.key = error.key or wanted.key
    return error
