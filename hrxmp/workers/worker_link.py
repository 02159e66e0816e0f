"""A worker's thread for its socket: hello, jobs in, results out, heartbeats with the phase.

The socket belongs to this thread alone; the compiler's thread reaches it through queues, so a
build that holds the interpreter only makes heartbeats late, which kills nobody.
"""

from __future__ import annotations

import collections
import os
import queue
import threading

from hrxmp import lifecycle, wire
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.identity import new_identity
from hrxmp.messages import (
    Body,
    CompileJob,
    Goodbye,
    Heartbeat,
    Hello,
    JobStarted,
    Shutdown,
    ToWorker,
    Welcome,
)

_HELLO_AGAIN_NS = 2_000_000_000
_FINISH_S = 2.0


class WorkerLink:
    """The worker's end of the work link."""

    def __init__(self, endpoint: str, run_id: str, name: str, tried: str = "") -> None:
        self.inbox: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self._endpoint = endpoint
        self._tried = tried
        self._identity = new_identity(run_id, name)
        self._outbox: collections.deque[tuple[Body, tuple[bytes, ...]]] = collections.deque()
        self._wake = lifecycle.WakeUp()
        self._thread = threading.Thread(target=self._run, name="work-link", daemon=True)
        self._phase = ("idle", mono_ns())
        self._job_id: int | None = None
        self._heartbeat_ms = 500
        self._welcome = False
        self._finishing = False

    def start(self) -> None:
        """Connect and say hello."""
        self._thread.start()

    def set_phase(self, phase: str) -> None:
        """Say in the next heartbeats what the compiler is doing."""
        self._phase = (phase, mono_ns())

    def post(self, body: Body, buffers: tuple[bytes, ...] = ()) -> None:
        """Send a result."""
        self._outbox.append((body, buffers))
        self._wake.set()

    def finish(self) -> None:
        """Send what is left and say goodbye."""
        self._finishing = True
        self._wake.set()
        self._thread.join(_FINISH_S)

    def _run(self) -> None:
        context = wire.context()
        link: wire.Link[ToWorker] = wire.Link(
            wire.dealer(context, self._endpoint), ToWorker, self._identity, HybridLogicalClock()
        )
        try:
            self._loop(link)
            link.send(Goodbye(reason="told to end"))
        finally:
            link.close(linger_ms=int(_FINISH_S * 500))
            context.term()

    def _loop(self, link: wire.Link[ToWorker]) -> None:
        next_ns = said_hello_ns = 0
        while not (self._finishing and not self._outbox):
            now = mono_ns()
            if not self._welcome and now - said_hello_ns > _HELLO_AGAIN_NS:
                link.send(self._hello())
                said_hello_ns = now
            elif self._welcome and now >= next_ns:
                link.send(self._heartbeat(now))
                next_ns = now + self._heartbeat_ms * 1_000_000
            while self._outbox and link.send(self._outbox[0][0], buffers=self._outbox[0][1]):
                self._outbox.popleft()
                self._job_id = None
            lifecycle.wait([link], [self._wake.fd], self._heartbeat_ms)
            self._wake.clear()
            self._receive(link)

    def _receive(self, link: wire.Link[ToWorker]) -> None:
        while (message := link.receive()) is not None:
            match message.body:
                case Welcome(heartbeat_ms=heartbeat_ms):
                    self._welcome, self._heartbeat_ms = True, max(50, heartbeat_ms)
                case CompileJob() as job:
                    self._job_id = job.job_id
                    link.send(JobStarted(job_id=job.job_id), cause=message.envelope)
                    self.inbox.put(job)
                case Shutdown():
                    self.inbox.put(None)
                case _:
                    pass

    def _hello(self) -> Hello:
        return Hello(
            role="worker",
            pid=os.getpid(),
            boot_id=lifecycle.boot_id(),
            package_version="",
            device_fingerprint=self._tried,
        )

    def _heartbeat(self, now: int) -> Heartbeat:
        phase, since = self._phase
        return Heartbeat(
            state="idle" if self._job_id is None else "busy",
            phase=phase,
            phase_ns=now - since,
            job_id=self._job_id,
        )
