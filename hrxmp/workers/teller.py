"""Tells executors and traces what the broker decided about their requests.

Runs in the pool process. It keeps the order of the actions, for each request: what is held back
until the executor has noted the acceptance goes out in the order in which it was decided.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hrxmp import wire
from hrxmp.messages import Body, CompileAccepted, CompileDone, CompileFailed, CompileStarted
from hrxmp.workers.actions import (
    Accept,
    Answer,
    Begin,
    Client,
    End,
    Failure,
    Progress,
    Request,
    Result,
    Started,
)
from hrxmp.workers.crew import Crew
from hrxmp.workers.sessions import Outgoing, RunTrace, Session

Told = Accept | Begin | Progress | End | Started | Answer


class Teller:
    """The way out to executors; `clients` is the pool's table of sessions."""

    def __init__(self, link: wire.Link[Any], crew: Crew, clients: dict[Client, Session]) -> None:
        self._link = link
        self._crew = crew
        self._clients = clients

    def tell(self, action: Told) -> None:
        """Send or record one action; nothing when its executor is gone."""
        session = self._clients.get(action.request.client)
        if session is None:
            return
        request_id = action.request.body.request_id
        if isinstance(action, Accept):
            accepted = CompileAccepted(request_id=request_id, via=action.via)
            session.open.add(request_id)
            self._send(session, action.request, accepted)
            if action.via == "compile":
                session.hold(request_id)
        elif isinstance(action, Started | Answer):
            if isinstance(action, Answer):
                session.open.discard(request_id)
            body, buffers = _message(action)
            session.perform(
                request_id, partial(self._send, session, action.request, body, *buffers)
            )
        elif session.trace is not None:
            self._record(session, session.trace, action)

    def refuse(self, session: Session, request: Request, failure: Failure) -> None:
        """Answer a request that was never accepted."""
        body, _ = _message(Answer(request=request, worker="", attempt=0, outcome=failure))
        self._send(session, request, body)

    def _record(self, session: Session, trace: RunTrace, action: Begin | Progress | End) -> None:
        if isinstance(action, Begin):
            act = partial(trace.begin, action)
        elif isinstance(action, Progress):
            member = self._crew.members.get(action.worker)
            pid, phase = (member.child.pid, member.phase) if member else (0, "")
            act = partial(trace.progress, action, pid, phase)
        else:
            act = partial(trace.end, action)
        session.perform(action.request.body.request_id, act)

    def _send(self, session: Session, request: Request, body: Body, *buffers: bytes) -> None:
        session.send(self._link, Outgoing(body=body, exec_id=request.exec_id, buffers=buffers))


def _message(action: Started | Answer) -> tuple[Body, tuple[bytes, ...]]:
    """An action as its message and buffers."""
    where: dict[str, Any] = {
        "request_id": action.request.body.request_id,
        "worker": action.worker,
        "attempt": action.attempt,
    }
    if isinstance(action, Started):
        return CompileStarted(**where, queue_ns=action.queue_ns), ()
    outcome = action.outcome
    if isinstance(outcome, Result):
        return _done(where, outcome), (outcome.binary,)
    failed = CompileFailed(
        **where,
        compiler_started=outcome.compiler_started,
        outcome=outcome.outcome,
        error=outcome.error,
        log=outcome.log,
    )
    return failed, ()


def _done(where: dict[str, Any], result: Result) -> CompileDone:
    return CompileDone(
        **where,
        binary_kind=result.kind,
        binary_bytes=len(result.binary),
        compile_ns=result.compile_ns,
        finish_ns=result.finish_ns,
        log=result.log,
        not_stored=result.not_stored,
    )
