"""What the broker works with: requests, outcomes, limits; and the actions that it gives back.

Pure data of the pool process. The broker decides, `main` carries out: each action is one thing to
send, to record or to do with a process, in the order in which it must happen.
"""

from __future__ import annotations

import msgspec

from hrxmp.errors import ErrorInfo
from hrxmp.messages import CompileRequest
from hrxmp.settings import Settings

Client = tuple[str, str, int]
"""One life of one executor: (run id, source, incarnation)."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One executor's wish, with the graph execution that asked for it."""

    client: Client
    exec_id: int | None
    body: CompileRequest

    @property
    def ident(self) -> tuple[Client, int]:
        """What tells it from every other request."""
        return self.client, self.body.request_id


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished binary and what it cost."""

    binary: bytes
    kind: str
    compile_ns: int = 0
    finish_ns: int = 0
    log: str = ""
    not_stored: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no binary. `outcome` is one of the trace's outcomes other than `ok`."""

    outcome: str
    compiler_started: bool
    error: ErrorInfo
    log: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers, and what bounds a job and a worker."""

    workers: int
    job_ns: int
    idle_ns: int
    worker_jobs: int
    progress_ns: int
    start_ns: int = 60_000_000_000

    @classmethod
    def of(cls, settings: Settings, workers: int) -> Limits:
        """The limits that the settings ask for."""
        return cls(
            workers=max(1, workers),
            job_ns=int(settings.job_timeout_s * 1e9),
            idle_ns=int(settings.worker_idle_s * 1e9),
            worker_jobs=settings.worker_jobs,
            progress_ns=int(settings.progress_s * 1e9),
        )


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all actions."""


class Accept(Action, frozen=True, kw_only=True):
    """Tell the executor where its request is served from."""

    request: Request
    via: str


class Begin(Action, frozen=True, kw_only=True):
    """Record that a compiler starts on `request`, the one that a job was made for."""

    request: Request
    worker: str
    attempt: int
    queue_ns: int


class Progress(Action, frozen=True, kw_only=True):
    """Record that the compile of `request` is slow and still running."""

    request: Request
    worker: str
    elapsed_ns: int


class End(Action, frozen=True, kw_only=True):
    """Record that the compiler is done with `request`, one way or the other."""

    request: Request
    worker: str
    attempt: int
    outcome: Result | Failure


class Started(Action, frozen=True, kw_only=True):
    """Tell the executor that a worker began on its request."""

    request: Request
    worker: str
    attempt: int
    queue_ns: int


class Answer(Action, frozen=True, kw_only=True):
    """Answer the request: exactly one for each request that was accepted."""

    request: Request
    worker: str
    attempt: int
    outcome: Result | Failure


class Assign(Action, frozen=True, kw_only=True):
    """Hand a job to a worker."""

    worker: str
    job_id: int
    attempt: int
    body: CompileRequest


class Spawn(Action, frozen=True, kw_only=True):
    """Start a worker process for a device."""

    worker: str
    device: str
    reason: str


class Retire(Action, frozen=True, kw_only=True):
    """Ask an idle worker to end."""

    worker: str
    reason: str


class Kill(Action, frozen=True, kw_only=True):
    """End a worker at once."""

    worker: str
    reason: str
    held: tuple[Request, ...] = ()
