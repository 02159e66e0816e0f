"""The compile pool: sockets and processes on one side, the broker's decisions on the other.

Runs in the pool process's only loop. Everything that arrives becomes an event for the broker,
everything that the broker decides is carried out here, in order. It loads neither pyopencl nor
numpy, and nothing here blocks longer than reading one store entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from hrxmp import wire
from hrxmp.clock import mono_ns
from hrxmp.errors import ChildError, CompileSetupError, HrxmpError
from hrxmp.kernels.entry import StoreEntry
from hrxmp.kernels.store import Store
from hrxmp.messages import (
    Body,
    CompileCancel,
    CompileJob,
    CompileNoted,
    CompileRequest,
    CompileUrgent,
    DevicesTried,
    FromWorker,
    Goodbye,
    Heartbeat,
    Hello,
    JobDone,
    JobFailed,
    JobStarted,
    Shutdown,
    StatusReply,
    StatusRequest,
    ToPool,
    Welcome,
)
from hrxmp.settings import Settings
from hrxmp.workers import report
from hrxmp.workers.actions import (
    Accept,
    Action,
    Answer,
    Assign,
    Begin,
    Client,
    End,
    Failure,
    Kill,
    Progress,
    Request,
    Result,
    Retire,
    Spawn,
    Started,
)
from hrxmp.workers.broker import Broker
from hrxmp.workers.crew import Crew, Gone
from hrxmp.workers.sessions import Outgoing, Session, Traces
from hrxmp.workers.teller import Teller

HEARTBEAT_MS = 500
_AT_ONCE = 256
_MOST_CLIENTS = 512
_MOST_OPEN = 4096
LIVENESS = 6
_GROWN_SHARE = 2
"""A worker that keeps more than this fraction of the job limit after a job is replaced."""


class Pool:
    """The state of a pool process. One thread calls it."""

    def __init__(
        self,
        requests: wire.Link[ToPool],
        work: wire.Link[FromWorker],
        broker: Broker,
        crew: Crew,
        traces: Traces,
        store: Store,
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        self.requests = requests
        self.work = work
        self.broker = broker
        self.crew = crew
        self.sessions: dict[bytes, Session] = {}
        self._clients: dict[Client, Session] = {}
        self._teller = Teller(requests, crew, self._clients)
        self._traces = traces
        self._store = store
        self._memory_mb = settings.job_memory_mb
        self._say = say
        self._said: set[str] = set()
        self._started_ns = mono_ns()
        self._next_heartbeat_ns = 0
        self._late_heartbeats = 0
        self._tried = DevicesTried(fingerprints=(), more=False)
        self._todo: deque[Action] = deque()

    # -- the loop's entries -------------------------------------------------------------------

    def receive(self) -> None:
        """Handle what has arrived; of a flood only a part, so that the rest gets its turn."""
        for _ in range(_AT_ONCE):
            if (message := self.requests.receive()) is None:
                break
            self._from_executor(message)
        for _ in range(_AT_ONCE):
            if (reply := self.work.receive()) is None:
                break
            self._from_worker(reply)

    def expect(self) -> None:
        """Compiles will be asked for soon: workers start for them."""
        self._do(self.broker.expect(mono_ns()))
        self._tell_tried(self._tried.fingerprints)

    def tick(self) -> None:
        """Look at processes and at the time."""
        now = mono_ns()
        for gone in self.crew.collect():
            self._worker_gone(gone, now)
        for worker in list(self.broker.workers.values()):
            if worker.job is not None and self._memory_mb:
                used = self.crew.grown_mb(worker.name)
                if used > self._memory_mb:
                    self._do(self.broker.over_memory(worker.name, used, self._memory_mb, now))
        self._do(self.broker.tick(now))
        self.crew.press(now)
        self._late_heartbeats += self.crew.count_late(now)
        for session in list(self._clients.values()):
            session.release_late(now)
            session.flush(self.requests)
            if session.silent(now):
                self._client_gone(session)
        if now >= self._next_heartbeat_ns:
            self._next_heartbeat_ns = now + HEARTBEAT_MS * 1_000_000
            self._tell_all(Heartbeat(state="busy" if self.broker.busy else "idle"))
        self._tell_tried(self._tried.fingerprints)

    def client_ended(self, ready: Iterable[int]) -> None:
        """Handles of executor processes that ended."""
        ended = set(ready)
        for session in [s for s in self._clients.values() if s.fd in ended]:
            self._client_gone(session)

    def descriptors(self) -> list[int]:
        """Handles to poll besides the sockets."""
        watched = [session.fd for session in self._clients.values() if session.fd >= 0]
        return watched + self.crew.descriptors()

    def close(self, reason: str) -> None:
        """Tell executors, end workers and streams."""
        self._tell_all(Shutdown(reason=reason, grace_ms=0))
        self.crew.close()
        for session in list(self._clients.values()):
            session.close()
        self._traces.close()

    # -- executors ----------------------------------------------------------------------------

    def _from_executor(self, message: wire.Received[ToPool]) -> None:
        body, now = message.body, mono_ns()
        if isinstance(body, StatusRequest):
            self.requests.send(self._status(body.token, now), to=message.peer)
            return
        if isinstance(body, Hello):
            self._hello(message, body)
            return
        session = self.sessions.get(message.peer)
        if session is None:
            # Of an earlier life of this pool: it says hello again, and asks again.
            self.requests.send(Heartbeat(state="unknown"), to=message.peer)
            return
        session.heard_ns = now
        match body:
            case CompileRequest():
                self._request(session, message.envelope.exec_id, body, now)
            case CompileNoted(request_id=request_id):
                session.noted(request_id)
            case CompileUrgent(request_ids=ids):
                self._do(self.broker.urgent(session.client, ids, now))
            case CompileCancel(request_id=request_id):
                self._do(self.broker.cancel(session.client, request_id, now))
            case Goodbye():
                self._client_gone(session)
            case _:
                pass

    def _hello(self, message: wire.Received[ToPool], body: Hello) -> None:
        envelope = message.envelope
        client = (envelope.run_id, envelope.source, envelope.incarnation)
        known = self.sessions.get(message.peer)
        if known is not None and known.client != client:
            return  # one connection is one executor
        session = self._clients.get(client)
        if session is None and len(self._clients) >= _MOST_CLIENTS:
            self._say_once(f"more than {_MOST_CLIENTS} executors: others are not served")
            return
        if session is None:
            trace = self._traces.open(envelope.run_id, body)
            session = self._clients[client] = Session(client, body, message.peer, trace)
            if body.expects_compiles:
                self.expect()
        else:
            self.sessions.pop(session.peer, None)
            session.peer = message.peer
            session.heard_ns = mono_ns()
        self.sessions[message.peer] = session
        session.send(
            self.requests,
            Outgoing(body=Welcome(heartbeat_ms=HEARTBEAT_MS, liveness=LIVENESS)),
        )
        session.send(self.requests, Outgoing(body=self._tried))

    def _request(
        self, session: Session, exec_id: int | None, body: CompileRequest, now: int
    ) -> None:
        request = Request(client=session.client, exec_id=exec_id, body=body)
        try:
            if body.key != body.components.digest():
                raise CompileSetupError("the key is not the digest of its components")
            if len(session.open) >= _MOST_OPEN:
                raise CompileSetupError(f"more than {_MOST_OPEN} requests are open")
            stored = self._lookup(request) if self.broker.book.needs_lookup(request) else None
        except HrxmpError as error:
            failure = Failure(outcome="setup", compiler_started=False, error=error.info())
            self._teller.refuse(session, request, failure)
            return
        self._do(self.broker.submit(request, now, stored))

    def _lookup(self, request: Request) -> Result | None:
        found = self._store.get(request.body.key, request.body.components)
        if isinstance(found, StoreEntry):
            return Result(binary=found.binary, kind=found.kind, compile_ns=found.compile_ns)
        return None

    def _client_gone(self, session: Session) -> None:
        self._do(self.broker.client_gone(session.client, mono_ns()))
        self.sessions.pop(session.peer, None)
        del self._clients[session.client]
        session.close()
        self._traces.leave(session.run_id)
        if not any(other.run_id == session.run_id for other in self._clients.values()):
            self.broker.run_over(session.run_id)

    def _tell_all(self, body: Body) -> None:
        """Tell every executor what need not arrive."""
        for session in self._clients.values():
            self.requests.send(body, to=session.peer, run_id=session.run_id)

    def _tell_tried(self, fingerprints: Iterable[str]) -> None:
        """Tell every executor which devices work, when that has changed."""
        known = DevicesTried(fingerprints=tuple(sorted(fingerprints)), more=self.broker.trying)
        if known != self._tried:
            self._tried = known
            self._tell_all(known)

    # -- workers ------------------------------------------------------------------------------

    def _from_worker(self, message: wire.Received[FromWorker]) -> None:
        name, body, now = message.envelope.source, message.body, mono_ns()
        if isinstance(body, Hello):
            if self.crew.hello(name, body.pid, message.peer):
                self.crew.send(self.work, name, Welcome(heartbeat_ms=HEARTBEAT_MS, liveness=0))
                self._do(self.broker.worker_ready(name, now))
                self._tell_tried({*self._tried.fingerprints, body.device_fingerprint} - {""})
            else:
                self.work.send(
                    Shutdown(reason="not a worker of this pool", grace_ms=0), to=message.peer
                )
            return
        member = self.crew.known(name, message.peer)
        if member is None:
            return
        member.heard_ns = now
        match body:
            case Heartbeat(phase=phase):
                member.phase = phase
            case JobStarted(job_id=job_id):
                self._do(self.broker.job_started(name, job_id, now))
            case JobDone():
                self._job_done(name, body, message.buffers, now)
            case JobFailed():
                failure = Failure(
                    outcome=body.outcome,
                    compiler_started=body.compiler_started,
                    error=body.error,
                    log=body.log,
                )
                self._do(self.broker.job_failed(name, body.job_id, failure, now))
                self._watch_growth(name, now)
            case _:
                pass

    def _job_done(self, name: str, body: JobDone, buffers: list[bytes], now: int) -> None:
        if len(buffers) != 1:
            return  # the deadline answers for a worker that sends rubbish
        not_stored = "" if body.not_stored == "off" else body.not_stored
        if not_stored:
            self._store.note_trouble(not_stored)
        result = Result(
            binary=buffers[0],
            kind=body.binary_kind,
            compile_ns=body.compile_ns,
            finish_ns=body.create_ns + body.launch_ns + body.read_ns,
            log=body.log,
            not_stored=not_stored,
        )
        self._do(self.broker.job_done(name, body.job_id, result, now))
        self._watch_growth(name, now)

    def _watch_growth(self, name: str, now: int) -> None:
        grown = self.crew.total_growth_mb(name)
        if self._memory_mb and grown > self._memory_mb // _GROWN_SHARE:
            self._do(self.broker.recycle(name, f"recycled: it grew by {grown} MB", now))

    def _worker_gone(self, gone: Gone, now: int) -> None:
        requests = gone.held or self.broker.requests_of(gone.worker)
        reason = gone.reason or f"it ended by itself: {gone.exit}"
        for trace in self._traces.all():
            run_id = trace.tracer.identity.run_id
            held = [r.body.request_id for r in requests if r.client[0] == run_id]
            trace.worker_exit(gone.worker, gone.pid, reason, gone.exit.signal, held)
        self._do(self.broker.worker_gone(gone.worker, gone.pid, str(gone.exit), gone.words, now))

    # -- carrying out -------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        """Carry out actions in order; those that follow from one come after all of these."""
        outermost = not self._todo
        self._todo.extend(actions)
        while outermost and self._todo:
            self._act(self._todo[0])
            self._todo.popleft()

    def _act(self, action: Action) -> None:
        match action:
            case Spawn():
                self._spawn(action)
            case Assign():
                self._assign(action)
            case Retire(worker=worker, reason=reason):
                self.crew.send(self.work, worker, Shutdown(reason=reason, grace_ms=0))
                self.crew.leave(worker, reason)
            case Kill(worker=worker, reason=reason, held=held):
                self.crew.kill(worker, reason, held)
            case Accept() | Begin() | Progress() | End() | Started() | Answer():
                self._teller.tell(action)

    def _spawn(self, action: Spawn) -> None:
        try:
            self.crew.start(action.worker, try_device=not action.device)
        except ChildError as error:
            self._say_once(str(error))
            self._do(self.broker.worker_gone(action.worker, 0, str(error), "", mono_ns()))

    def _assign(self, action: Assign) -> None:
        body = action.body
        job = CompileJob(
            job_id=action.job_id,
            attempt=action.attempt,
            key=body.key,
            variant=body.variant,
            components=body.components,
            device=body.device,
        )
        self.crew.assigned(action.worker)
        self._introduce(action.worker)
        if not self.crew.send(self.work, action.worker, job):
            self.crew.kill(action.worker, "it could not be reached")

    def _introduce(self, worker: str) -> None:
        """Say to the runs that wait for its job that there is this worker: before the job is in
        its hands, so that one that dies on it at once is known."""
        member = self.crew.members[worker]
        reason = "started" if member.jobs == 1 else "shared"
        for request in self.broker.requests_of(worker):
            session = self._clients.get(request.client)
            if session is not None and session.trace is not None:
                session.trace.worker_start(worker, member.child.pid, reason)

    def _status(self, token: int, now: int) -> StatusReply:
        runs = (session.run_id for session in self._clients.values())
        totals = report.dropped(self.requests.dropped, self.work.dropped)
        totals["late_heartbeats"] = self._late_heartbeats
        return report.status(
            token, now, self._started_ns, self.broker, self.crew, runs=runs, totals=totals
        )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
