"""The broker's book: open requests, jobs, and what each of them is told.

Pure logic of the pool process. Equal keys share one job; each request that was accepted is
answered exactly once. What is to be sent or recorded goes to `out`, in order. It knows no worker
beyond a name, no socket and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from hrxmp.errors import CompileCancelledError
from hrxmp.messages import StatusJob
from hrxmp.workers.actions import (
    Accept,
    Action,
    Answer,
    Begin,
    Client,
    End,
    Failure,
    Request,
    Result,
    Started,
)

_ATTEMPTS = 2
_TRY_AGAIN = ("crash", "timeout", "memory")
_COUNTED = ("requests", "compiles", "joins", "disk_hits", "quarantined", "failures", "retries")


class Job:
    """One compile that serves every request for its key."""

    def __init__(self, job_id: int, owner: Request, now: int, limit_ns: int) -> None:
        self.job_id = job_id
        self.body = owner.body
        self.requests = {owner.ident: owner}
        self.owner: Request | None = owner
        """The request whose trace has this compile; None once that one is withdrawn."""
        self.created_ns = now
        self.queued_ns = now
        self.limit_ns = limit_ns
        """How long this attempt may take."""
        self.attempt = 1
        self.worker = ""
        self.assigned_ns = 0
        self.begun = False
        self.reported_ns = 0

    @property
    def label(self) -> str:
        """The kernel, for people."""
        return self.body.variant.label()

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for it now."""
        return any(request.body.urgent for request in self.requests.values())

    @property
    def runs(self) -> set[str]:
        """The runs that want it."""
        return {request.client[0] for request in self.requests.values()}

    @property
    def queue_ns(self) -> int:
        """How long this attempt waited for a worker."""
        return max(0, self.assigned_ns - self.queued_ns)

    def give_to(self, worker: str, now: int) -> None:
        """A worker gets it; its time runs from here."""
        self.worker, self.assigned_ns = worker, now


class Book:
    """All open requests and unfinished jobs of a pool."""

    def __init__(self, job_ns: int) -> None:
        self.jobs: dict[str, Job] = {}
        self.totals = dict.fromkeys(_COUNTED, 0)
        self.by_run: dict[str, dict[str, int]] = {}
        self.out: list[Action] = []
        self._open: dict[tuple[Client, int], tuple[Request, str]] = {}
        self._quarantine: dict[tuple[str, str], Failure] = {}
        self._job_ns = job_ns
        self._last_job = 0

    # -- requests -----------------------------------------------------------------------------

    def needs_lookup(self, request: Request) -> bool:
        """Whether the store should be asked first: nothing else would answer this request."""
        known = request.body.key in self.jobs or request.ident in self._open
        return not known and (request.client[0], request.body.key) not in self._quarantine

    def submit(self, request: Request, now: int, stored: Result | None) -> None:
        """Accept a request: from quarantine, from the store, by joining a job or by making one."""
        if request.ident in self._open:
            # Sent again after a reconnection: the acceptance may have been lost with the old one.
            self.out.append(Accept(request=request, via=self._open[request.ident][1]))
            return
        self._count("requests", {request.client[0]})
        job = self.jobs.get(request.body.key)
        refused = self._quarantine.get((request.client[0], request.body.key))
        if refused is not None:
            self._answer_at_once(request, "quarantine", "quarantined", refused)
        elif job is not None:
            self._accept(request, "in_flight", "joins")
            job.requests[request.ident] = request
            if job.begun:
                self.out.append(_started(job, request))
        elif stored is not None:
            self._answer_at_once(request, "disk", "disk_hits", stored)
        else:
            self._accept(request, "compile", "compiles")
            self._last_job += 1
            limit_ns = request.body.deadline_ms * 1_000_000 or self._job_ns
            self.jobs[request.body.key] = Job(self._last_job, request, now, limit_ns)

    def make_urgent(self, client: Client, request_id: int) -> None:
        """Somebody waits for this request now."""
        if (client, request_id) in self._open:
            request, via = self._open[client, request_id]
            raised = replace(request, body=replace(request.body, urgent=True))
            self._open[client, request_id] = raised, via
            self.jobs[request.body.key].requests[request.ident] = raised

    def cancel(self, client: Client, request_id: int) -> None:
        """Nobody waits for this request any more: it is answered as cancelled."""
        if (client, request_id) not in self._open:
            return
        request = self._open[client, request_id][0]
        failure = _cancelled("the request was cancelled")
        job = self.jobs[request.body.key]
        self._withdraw(request, failure)
        self.out.append(
            Answer(request=request, worker=job.worker, attempt=job.attempt, outcome=failure)
        )

    def client_gone(self, client: Client) -> None:
        """An executor is gone: its requests need no answer any more."""
        failure = _cancelled("the executor is gone")
        for request in [r for ident, (r, _via) in self._open.items() if ident[0] == client]:
            self._withdraw(request, failure)

    def run_over(self, run_id: str) -> None:
        """The run has no executor any more: its quarantine ends with it."""
        self.by_run.pop(run_id, None)
        for entry in [entry for entry in self._quarantine if entry[0] == run_id]:
            del self._quarantine[entry]

    # -- jobs ---------------------------------------------------------------------------------

    def queued(self) -> list[Job]:
        """The jobs that wait for a worker."""
        return [job for job in self.jobs.values() if not job.worker]

    def begin(self, job: Job, now: int) -> None:
        """A compiler starts on the job."""
        job.begun, job.reported_ns = True, now
        self._begin(job)
        self.out.extend(_started(job, request) for request in job.requests.values())

    def succeeded(self, job: Job, result: Result, now: int) -> None:
        """The job has its binary."""
        if not job.begun:
            self.begin(job, now)
        self._end(job, result)
        self._answer(job, result)

    def attempt_failed(self, job: Job, failure: Failure, now: int) -> None:
        """An attempt ended without a binary: try again once, or answer everybody."""
        if not job.begun:  # each attempt is a pair of records
            self.begin(job, now)
        self._end(job, failure)
        if not job.requests:
            del self.jobs[job.body.key]
        elif failure.outcome in _TRY_AGAIN and job.attempt < _ATTEMPTS:
            self._try_again(job, failure, now)
        else:
            self._count("failures", job.runs)
            if failure.outcome in _TRY_AGAIN:
                self._quarantine |= {(run, job.body.key): failure for run in job.runs}
            self._answer(job, failure)

    def put_back(self, job: Job, failure: Failure) -> None:
        """The worker could not take the job at all: it waits again, and no attempt is counted."""
        self._end(job, failure)
        job.worker, job.begun = "", False

    def status(self, now: int, phases: dict[str, str]) -> Iterator[StatusJob]:
        """Every unfinished job, oldest first."""
        for job in self.jobs.values():
            yield StatusJob(
                kernel=job.label,
                key=job.body.key,
                state="compiling" if job.worker else "queued",
                age_ms=(now - job.created_ns) // 1_000_000,
                worker=job.worker,
                phase=phases.get(job.worker, ""),
                runs=tuple(sorted(job.runs)),
                requests=tuple(
                    (r.client[0], r.exec_id, r.body.request_id) for r in job.requests.values()
                ),
                urgent=job.urgent,
            )

    # -- inside -------------------------------------------------------------------------------

    def _count(self, what: str, runs: set[str]) -> None:
        """Count once in all, and once for each run that it is for."""
        self.totals[what] += 1
        for run in runs:
            self.by_run.setdefault(run, dict.fromkeys(_COUNTED, 0))[what] += 1

    def _accept(self, request: Request, via: str, counted: str) -> None:
        self._count(counted, {request.client[0]})
        self._open[request.ident] = request, via
        self.out.append(Accept(request=request, via=via))

    def _answer_at_once(
        self, request: Request, via: str, counted: str, outcome: Result | Failure
    ) -> None:
        self._count(counted, {request.client[0]})
        self.out.append(Accept(request=request, via=via))
        self.out.append(Answer(request=request, worker="", attempt=0, outcome=outcome))

    def _withdraw(self, request: Request, failure: Failure) -> None:
        """Take a request out of its job. A job that runs goes on: its binary will be stored."""
        del self._open[request.ident]
        job = self.jobs[request.body.key]
        del job.requests[request.ident]
        if job.owner is not None and job.owner.ident == request.ident:
            if not job.begun:  # a pair of records for it too, or nothing would say how it ended
                self._begin(job)
            self._end(job, replace(failure, compiler_started=job.begun))
            job.owner = None
        if not job.requests and not job.worker:
            del self.jobs[request.body.key]

    def _begin(self, job: Job) -> None:
        if job.owner is not None:
            self.out.append(
                Begin(
                    request=job.owner,
                    worker=job.worker,
                    attempt=job.attempt,
                    queue_ns=job.queue_ns,
                )
            )

    def _end(self, job: Job, outcome: Result | Failure) -> None:
        if job.owner is not None:
            self.out.append(
                End(request=job.owner, worker=job.worker, attempt=job.attempt, outcome=outcome)
            )

    def _answer(self, job: Job, outcome: Result | Failure) -> None:
        """Answer everybody and forget the job. Never raises; nothing is left open."""
        del self.jobs[job.body.key]
        for request in job.requests.values():
            del self._open[request.ident]
            self.out.append(
                Answer(request=request, worker=job.worker, attempt=job.attempt, outcome=outcome)
            )

    def _try_again(self, job: Job, failure: Failure, now: int) -> None:
        self._count("retries", job.runs)
        job.attempt += 1
        job.worker, job.begun, job.queued_ns = "", False, now
        if failure.outcome == "timeout":
            # It had all its time once; the second try is for a fault of the first worker.
            job.limit_ns //= 2


def _started(job: Job, request: Request) -> Started:
    return Started(request=request, worker=job.worker, attempt=job.attempt, queue_ns=job.queue_ns)


def _cancelled(text: str) -> Failure:
    error = CompileCancelledError(text).info()
    return Failure(outcome="cancelled", compiler_started=False, error=error)
