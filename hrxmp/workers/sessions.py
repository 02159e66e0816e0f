"""One executor as the pool sees it: where to send, what is held back, its run's trace.

Runs in the pool process. A session is one life of one executor, whatever connection it comes
over. Messages that cannot be sent now are kept in order; records of a request are held back until
its executor has put the acceptance on record.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from hrxmp import lifecycle, records
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.identity import new_identity
from hrxmp.messages import Body, Hello
from hrxmp.settings import Settings
from hrxmp.workers.actions import Begin, Client, End, Failure, Progress, Result

if TYPE_CHECKING:
    from hrxmp.trace import Tracer
    from hrxmp.wire import Link

WELCOME_S = 0.05
CLOSE_S = 5.0
"""How long the end of a stream may take; where no aggregator ever answered it takes no time."""
HELD_NS = 30_000_000_000
"""How long an executor may take to note an acceptance. Only its own answers wait for it; one that
stood still for a while must not find effects before its causes."""
_LOCAL_SILENT_NS = 600_000_000_000
_REMOTE_SILENT_NS = 30_000_000_000


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A message on its way to an executor."""

    body: Body
    exec_id: int | None = None
    buffers: tuple[bytes, ...] = ()


class RunTrace:
    """The pool's record stream of one run; shared by the run's executors."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.sessions = 1
        self.told: set[str] = set()
        """The workers whose start this run's trace has."""

    def begin(self, action: Begin) -> None:
        """A compiler starts."""
        self.tracer.emit(
            records.CompileBegin,
            exec_id=action.request.exec_id,
            request=action.request.body.request_id,
            kernel=action.request.body.variant.definition,
            worker=action.worker,
            attempt=action.attempt,
            queue_ns=action.queue_ns,
        )

    def progress(self, action: Progress, pid: int, phase: str) -> None:
        """A compile is slow."""
        self.tracer.emit(
            records.CompileProgress,
            exec_id=action.request.exec_id,
            request=action.request.body.request_id,
            kernel=action.request.body.variant.definition,
            worker=action.worker,
            pid=pid,
            phase=phase,
            elapsed_ns=action.elapsed_ns,
        )

    def end(self, action: End) -> None:
        """A compiler is done."""
        outcome = action.outcome
        self.tracer.emit(
            records.CompileEnd,
            exec_id=action.request.exec_id,
            request=action.request.body.request_id,
            kernel=action.request.body.variant.definition,
            worker=action.worker,
            attempt=action.attempt,
            **_end_fields(outcome),
            log=outcome.log,
            log_path="",
            synthetic=False,
        )

    def worker_start(self, worker: str, pid: int, reason: str) -> None:
        """A worker that this run's jobs may use is up; said once a run."""
        if worker not in self.told:
            self.told.add(worker)
            self.tracer.emit(records.WorkerStart, worker=worker, pid=pid, reason=reason)

    def worker_exit(self, worker: str, pid: int, reason: str, signal: int, held: list[int]) -> None:
        """A worker is gone; said to the runs that know it, or that it held a request of."""
        if held:  # the run may have joined a job that was in hand
            self.worker_start(worker, pid, "shared")
        if worker in self.told:
            self.told.discard(worker)
            self.tracer.emit(
                records.WorkerExit, worker=worker, pid=pid, reason=reason, signal=signal, held=held
            )


class Session:
    """One executor."""

    def __init__(self, client: Client, hello: Hello, peer: bytes, trace: RunTrace | None) -> None:
        self.client = client
        self.peer = peer
        self.trace = trace
        self.heard_ns = mono_ns()
        self.pid = hello.pid
        self.fd = _watch(hello)
        self.open: set[int] = set()
        """Requests that were accepted and not answered."""
        self._held: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        self._unsent: collections.deque[Outgoing] = collections.deque()

    @property
    def run_id(self) -> str:
        """The run that it belongs to."""
        return self.client[0]

    def silent(self, now: int) -> bool:
        """Whether nothing was heard for so long that it must be gone. A process of this machine
        is watched by handle; silence alone ends only a very long one."""
        limit = _LOCAL_SILENT_NS if self.fd >= 0 else _REMOTE_SILENT_NS
        return now - self.heard_ns > limit

    def send(self, link: Link[Any], outgoing: Outgoing) -> None:
        """Send, or keep until it can be sent; order is kept."""
        self._unsent.append(outgoing)
        self.flush(link)

    def flush(self, link: Link[Any]) -> None:
        """Send what was kept."""
        while self._unsent and self._send_one(link, self._unsent[0]):
            self._unsent.popleft()

    def hold(self, request_id: int) -> None:
        """From here on nothing of this request goes out until the executor noted it."""
        if self.trace is not None:
            self._held.setdefault(request_id, (mono_ns(), []))

    def perform(self, request_id: int, act: Callable[[], None]) -> None:
        """Do it now, or when the request is noted."""
        if request_id in self._held:
            self._held[request_id][1].append(act)
        else:
            act()

    def noted(self, request_id: int) -> None:
        """The executor noted the request: do all that was held back, in order."""
        _, acts = self._held.pop(request_id, (0, []))
        for act in acts:
            act()

    def release_late(self, now: int) -> None:
        """Do not hold back for ever for an executor that does not note."""
        for request_id in [r for r, (since, _) in self._held.items() if now - since > HELD_NS]:
            self.noted(request_id)

    def close(self) -> None:
        """Give back its handle; what is held back goes on record."""
        for request_id in list(self._held):
            self.noted(request_id)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _send_one(self, link: Link[Any], outgoing: Outgoing) -> bool:
        return link.send(
            outgoing.body,
            to=self.peer,
            run_id=self.run_id,
            exec_id=outgoing.exec_id,
            buffers=outgoing.buffers,
        )


class Traces:
    """The record streams of all runs that are traced."""

    def __init__(self, settings: Settings, clock: HybridLogicalClock) -> None:
        self._settings = settings
        self._clock = clock
        self._runs: dict[str, RunTrace] = {}
        self._closing: list[threading.Thread] = []

    def open(self, run_id: str, hello: Hello) -> RunTrace | None:
        """The stream of a run, made at its first executor; None when it is not traced."""
        if not hello.trace_endpoint:
            return None
        if run_id in self._runs:
            self._runs[run_id].sessions += 1
            return self._runs[run_id]
        from hrxmp.trace import Tracer

        same_boot = hello.boot_id == lifecycle.boot_id()
        begin_ns = hello.run_begin_ns if same_boot and hello.run_begin_ns else mono_ns()
        tracer = Tracer(
            new_identity(run_id, "pool"),
            self._clock,
            hello.trace_endpoint,
            self._settings,
            begin_ns,
        )
        tracer.start(WELCOME_S)
        self._runs[run_id] = RunTrace(tracer)
        return self._runs[run_id]

    def all(self) -> list[RunTrace]:
        """Every open stream."""
        return list(self._runs.values())

    def leave(self, run_id: str) -> None:
        """An executor of the run is gone; its last one closes the stream, in a thread, because the
        goodbye is waited for."""
        run = self._runs.get(run_id)
        if run is None:
            return
        run.sessions -= 1
        if run.sessions <= 0:
            del self._runs[run_id]
            closer = threading.Thread(target=run.tracer.close, args=(CLOSE_S,), daemon=True)
            closer.start()
            self._closing = [*(t for t in self._closing if t.is_alive()), closer]

    def close(self) -> None:
        """Close every stream, bounded."""
        for run_id in list(self._runs):
            self._runs[run_id].sessions = 1
            self.leave(run_id)
        for closer in self._closing:
            closer.join(CLOSE_S + 1)


def _end_fields(outcome: Result | Failure) -> dict[str, Any]:
    if isinstance(outcome, Result):
        return {
            "compiler_started": True,
            "outcome": "ok",
            "compile_ns": outcome.compile_ns,
            "finish_ns": outcome.finish_ns,
            "binary_bytes": len(outcome.binary),
            "error": None,
        }
    return {
        "compiler_started": outcome.compiler_started,
        "outcome": outcome.outcome,
        "compile_ns": 0,
        "finish_ns": 0,
        "binary_bytes": 0,
        "error": outcome.error,
    }


def _watch(hello: Hello) -> int:
    """A handle of the executor's process, when it runs on this machine and can be seen."""
    if hello.boot_id and hello.boot_id == lifecycle.boot_id():
        with contextlib.suppress(OSError, ValueError, OverflowError):
            return os.pidfd_open(hello.pid)
    return -1
