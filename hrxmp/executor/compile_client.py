"""The executor's end of the request link: sends requests, resolves results, survives the pool.

A thread of the executor owns the DEALER; the main thread never touches the socket, and every wait
here is bounded. When the pool is lost (restarted, killed, stopped) all open requests are sent
again to the next one; when none comes in time every waiter gets a PoolLostError. It knows no
device and compiles nothing.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from hrxmp import lifecycle, wire
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.errors import CompileError, HrxmpError, PoolLostError, from_info
from hrxmp.identity import Identity
from hrxmp.messages import (
    Body,
    CompileAccepted,
    CompileCancel,
    CompileDone,
    CompileFailed,
    CompileNoted,
    CompileRequest,
    CompileStarted,
    CompileUrgent,
    DevicesTried,
    FromPool,
    Goodbye,
    Heartbeat,
    Hello,
    Welcome,
)
from hrxmp.settings import Settings

Accepted = Callable[[str], None]
"""Called once with `via`, in the client's thread, before anything else of the request happens."""

_HELLO_AGAIN_NS = 300_000_000
_IDLE_MS = 250
_STOOD_STILL_NS = 1_000_000_000
"""The thread looks every quarter of a second; a longer gap means that it could not run."""
_GOODBYE_S = 1.0
_UNHEARD = DevicesTried(fingerprints=(), more=True)
_HEARD_S = 2.0
"""A pool that says nothing for so long is not waited for where there is another way."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request. `error` is None when there is a binary."""

    via: str
    binary: bytes = b""
    binary_kind: str = ""
    worker: str = ""
    attempt: int = 0
    compile_ns: int = 0
    finish_ns: int = 0
    log: str = ""
    not_stored: str = ""
    """Why the pool could not store the binary."""
    error: HrxmpError | None = None
    outcome: str = "ok"
    compiler_started: bool = True
    asked_ns: int = 0
    accepted_ns: int = 0
    done_ns: int = 0


class Ticket:
    """One open request. `wait` may be called from any thread."""

    def __init__(
        self, body: CompileRequest, exec_id: int | None, accepted: Accepted | None
    ) -> None:
        self.body = body
        self.exec_id = exec_id
        self.asked_ns = mono_ns()
        self.via = ""
        self.accepted_ns = 0
        self.worker = ""
        self.cancelled = False
        self.outcome: Outcome | None = None
        self._accepted = accepted
        self._known = threading.Event()
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the outcome is there."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> Outcome | None:
        """The outcome, or None when it is not there after `timeout_s`."""
        self._done.wait(timeout_s)
        return self.outcome

    def wait_accepted(self, timeout_s: float) -> None:
        """Wait until it is known how the request is served, or that it is not."""
        self._known.wait(timeout_s)

    def accept(self, via: str) -> bool:
        """Note where it is served from; False when that is known already."""
        if self.via:
            return False
        self.via, self.accepted_ns = via, mono_ns()
        if self._accepted is not None:
            self._accepted(via)
        self._known.set()
        return True

    def resolve(self, outcome: Outcome) -> None:
        """Give it its outcome; the first one counts."""
        if self.outcome is None:
            self.outcome = outcome
            self._known.set()
            self._done.set()


class CompileClient:
    """The open requests of one executor. `request`, `urgent` and `cancel` never block."""

    def __init__(
        self,
        endpoint: str,
        identity: Identity,
        clock: HybridLogicalClock,
        settings: Settings,
        *,
        trace_endpoint: str = "",
        run_begin_ns: int = 0,
        expects_compiles: bool = False,
        on_not_stored: Callable[[str], None] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._clock = clock
        self._curve_dir = settings.curve_dir
        self._pool_timeout_ns = int(settings.pool_timeout_s * 1e9)
        self._traced = bool(trace_endpoint)
        self._on_not_stored = on_not_stored
        self._tried = _UNHEARD
        self._tried_changed = threading.Condition()
        self._hello = Hello(
            role="executor",
            pid=os.getpid(),
            boot_id=lifecycle.boot_id(),
            package_version="",
            trace_endpoint=trace_endpoint,
            run_begin_ns=run_begin_ns,
            expects_compiles=expects_compiles,
        )
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._outbox: collections.deque[tuple[Body, int | None]] = collections.deque()
        self._wake = lifecycle.WakeUp()
        self._thread = threading.Thread(target=self._run, name="compile-client", daemon=True)
        self._closing = False
        self._ended = ""
        self._pool_life = 0
        self._welcome = False
        self._heartbeat_ns = 500_000_000
        self._heard_ns = mono_ns()
        self._looked_ns = mono_ns()
        self._said_hello_ns = 0
        self.reconnections = 0

    def start(self) -> None:
        """Connect. The pool need not be there yet."""
        self._thread.start()

    def request(
        self, body: CompileRequest, exec_id: int | None, accepted: Accepted | None = None
    ) -> Ticket:
        """Ask for a kernel. The ticket is resolved exactly once, with a binary or an error."""
        ticket = Ticket(body, exec_id, accepted)
        with self._lock:
            if not self._ended and not self._closing:
                self._tickets[body.request_id] = ticket
                self._outbox.append((body, exec_id))
                self._wake.set()
                return ticket
        ticket.resolve(_lost(ticket, self._ended or "the compile client is closed"))
        return ticket

    def urgent(self, request_ids: tuple[int, ...]) -> None:
        """Somebody waits for these now."""
        with self._lock:
            for ticket in [self._tickets[i] for i in request_ids if i in self._tickets]:
                ticket.body = replace(ticket.body, urgent=True)
        self._post(CompileUrgent(request_ids=request_ids))

    def cancel(self, request_id: int) -> None:
        """Nobody wants this one any more; it resolves as cancelled, or with what came first."""
        with self._lock:
            if request_id in self._tickets:
                self._tickets[request_id].cancelled = True
        self._post(CompileCancel(request_id=request_id))

    def tried(self, fingerprint: str, timeout_s: float) -> bool:
        """Whether a worker has compiled and run a line on this device; waits while one is at it."""

        def known() -> bool:
            return fingerprint in self._tried.fingerprints or not self._tried.more

        with self._tried_changed:
            if self._tried_changed.wait_for(lambda: self._tried is not _UNHEARD, _HEARD_S):
                self._tried_changed.wait_for(known, timeout_s)
            return fingerprint in self._tried.fingerprints

    def close(self) -> None:
        """Say goodbye and end the thread, bounded; what is open gets a PoolLostError."""
        self._closing = True
        self._wake.set()
        self._thread.join(_GOODBYE_S + 1)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        context = wire.context()
        try:
            link: wire.Link[FromPool] = wire.Link(
                wire.dealer(context, self._endpoint, self._curve_dir),
                FromPool,
                self._identity,
                self._clock,
            )
            try:
                self._loop(link)
            finally:
                link.close(linger_ms=int(_GOODBYE_S * 1000))
            self._end("the compile client is closed")
        except Exception as error:  # whatever it is, nobody may wait for ever
            self._end(f"the compile client failed: {error}")
            raise
        finally:
            context.term()

    def _loop(self, link: wire.Link[FromPool]) -> None:
        next_heartbeat = 0
        while not self._closing:
            now = mono_ns()
            if not self._welcome:
                self._say_hello(link, now)
            elif now >= next_heartbeat:
                link.send(Heartbeat(state="open" if self._tickets else "idle"))
                next_heartbeat = now + self._heartbeat_ns
            self._send_all(link)
            self._expire(now)
            lifecycle.wait([link], [self._wake.fd], _IDLE_MS)
            self._wake.clear()
            while (message := link.receive()) is not None:
                self._handle(link, message)
        if self._welcome:
            link.send(Goodbye(reason="the executor ends"))

    def _say_hello(self, link: wire.Link[FromPool], now: int) -> None:
        if now - self._said_hello_ns > _HELLO_AGAIN_NS:
            self._said_hello_ns = now
            link.send(self._hello)

    def _send_all(self, link: wire.Link[FromPool]) -> None:
        while self._welcome and self._outbox:
            body, exec_id = self._outbox[0]
            if not link.send(body, exec_id=exec_id):
                return
            self._outbox.popleft()

    def _handle(self, link: wire.Link[FromPool], message: wire.Received[FromPool]) -> None:
        now = mono_ns()
        self._heard_ns = now
        body = message.body
        if isinstance(body, Heartbeat) and body.state == "unknown":
            self._welcome = False
            return
        if isinstance(body, Welcome):
            self._welcomed(message.envelope.incarnation, body)
            return
        if isinstance(body, DevicesTried):
            with self._tried_changed:
                self._tried = body
                self._tried_changed.notify_all()
            return
        if message.envelope.incarnation != self._pool_life:
            self._welcome = False  # another pool: it must know us first
            return
        ticket = self._tickets.get(getattr(body, "request_id", -1))
        if ticket is None:
            return
        if isinstance(body, CompileAccepted):
            ticket.accept(body.via)
            if self._traced and body.via == "compile":
                link.send(CompileNoted(request_id=body.request_id), exec_id=ticket.exec_id)
        elif isinstance(body, CompileStarted):
            ticket.worker = body.worker
        elif isinstance(body, CompileDone | CompileFailed):
            outcome = _outcome(ticket, body, message.buffers)
            if outcome.not_stored and self._on_not_stored is not None:
                self._on_not_stored(outcome.not_stored)
            self._resolve(ticket, outcome)

    def _welcomed(self, pool_life: int, body: Welcome) -> None:
        """A pool knows us: ask it for everything that is open, in the order of asking."""
        self._heartbeat_ns = max(50, body.heartbeat_ms) * 1_000_000
        if self._welcome and pool_life == self._pool_life:
            return
        self.reconnections += self._pool_life not in (0, pool_life)
        self._pool_life, self._welcome = pool_life, True
        with self._lock:
            self._outbox = collections.deque(
                (ticket.body, ticket.exec_id) for ticket in self._tickets.values()
            )
            self._outbox.extend(
                (CompileCancel(request_id=ticket.body.request_id), None)
                for ticket in self._tickets.values()
                if ticket.cancelled
            )

    def _expire(self, now: int) -> None:
        """Give up on requests that no pool was there for."""
        if now - self._looked_ns > _STOOD_STILL_NS:
            self._heard_ns = now  # this process was stopped: the silence was not the pool's
        self._looked_ns = now
        if now - self._heard_ns < self._pool_timeout_ns:
            return
        self._welcome = False
        for ticket in list(self._tickets.values()):
            if now - ticket.asked_ns >= self._pool_timeout_ns:
                seconds = self._pool_timeout_ns / 1e9
                self._resolve(ticket, _lost(ticket, f"no compile pool answered for {seconds:g} s"))

    def _resolve(self, ticket: Ticket, outcome: Outcome) -> None:
        with self._lock:
            self._tickets.pop(ticket.body.request_id, None)
        ticket.resolve(outcome)

    def _end(self, reason: str) -> None:
        """Nobody waits for ever: whatever is open is resolved."""
        with self._lock:
            self._ended = reason
            left, self._tickets = list(self._tickets.values()), {}
        for ticket in left:
            ticket.resolve(_lost(ticket, reason))

    def _post(self, body: Body) -> None:
        with self._lock:
            self._outbox.append((body, None))
        self._wake.set()


def _outcome(ticket: Ticket, body: CompileDone | CompileFailed, buffers: list[bytes]) -> Outcome:
    label, key = ticket.body.variant.label(), ticket.body.key
    common = Outcome(
        via=ticket.via,
        worker=body.worker,
        attempt=body.attempt,
        log=body.log,
        asked_ns=ticket.asked_ns,
        accepted_ns=ticket.accepted_ns,
        done_ns=mono_ns(),
    )
    if isinstance(body, CompileFailed):
        return replace(
            common,
            error=from_info(body.error, kernel=label, key=key, log=body.log),
            outcome=body.outcome,
            compiler_started=body.compiler_started,
        )
    if len(buffers) != 1 or len(buffers[0]) != body.binary_bytes:
        broken = CompileError(
            f"the pool answered {label} without its binary", kernel=label, key=key
        )
        return replace(common, error=broken, outcome="lost")
    return replace(
        common,
        binary=buffers[0],
        binary_kind=body.binary_kind,
        compile_ns=body.compile_ns,
        finish_ns=body.finish_ns,
        not_stored=body.not_stored,
    )


def _lost(ticket: Ticket, reason: str) -> Outcome:
    label = ticket.body.variant.label()
    return Outcome(
        via=ticket.via,
        error=PoolLostError(f"{label}: {reason}", kernel=label, key=ticket.body.key),
        outcome="lost",
        compiler_started=False,
        asked_ns=ticket.asked_ns,
        accepted_ns=ticket.accepted_ns,
        done_ns=mono_ns(),
    )
