"""The broker: which job runs next, on which worker, and for how long. A pure state machine.

Runs in the pool process. Events come in as method calls with the time passed in; actions come
out, in the order in which they must happen. Urgent jobs go first, runs take turns, and no job
waits without a bound, whatever workers do. It touches no socket, no process and no clock.
"""

from __future__ import annotations

from collections import Counter

from hrxmp.errors import (
    CompileCancelledError,
    CompileCrashError,
    CompileMemoryError,
    CompileSetupError,
    CompileTimeoutError,
    ErrorInfo,
)
from hrxmp.workers.actions import (
    Action,
    Assign,
    Client,
    Failure,
    Kill,
    Limits,
    Progress,
    Request,
    Result,
    Retire,
    Spawn,
)
from hrxmp.workers.book import Book, Job

_START_FAILURES = 3
_EXPECTED = 10
"""Most workers that start before there is a job. A GPU's contexts are made one after the other, a
tenth of a second each: when the tenth is there, the first workers have finished a kernel or two.
"""


class Worker:
    """What the broker knows of one worker. It takes one job at a time: one credit."""

    def __init__(self, name: str, device: str, now: int) -> None:
        self.name = name
        self.device = device
        """The device that it opened, or will; empty until its first job when any will do."""
        self.state = "starting"
        """`starting`, `idle`, `busy` or `leaving`."""
        self.since_ns = now
        self.job: Job | None = None
        self.jobs_done = 0


class Broker:
    """All jobs and workers of a pool. Every event returns what is to be done."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.book = Book(limits.job_ns)
        self.workers: dict[str, Worker] = {}
        self._caps: dict[str, int] = {}
        """Most workers of a device, where it had no memory for more."""
        self._start_failures: dict[str, int] = {}
        self._served: dict[str, int] = {}
        self._turn = 0
        self._last_worker = 0
        self._draining = False

    # -- executors ----------------------------------------------------------------------------

    def submit(self, request: Request, now: int, stored: Result | None = None) -> list[Action]:
        """A request arrived; `stored` is its binary when the store had it."""
        if request.body.most_workers:
            self._cap(request.body.device, request.body.most_workers)
        self.book.submit(request, now, stored)
        return self._schedule(now)

    def urgent(self, client: Client, request_ids: tuple[int, ...], now: int) -> list[Action]:
        """An executor waits for these now."""
        for request_id in request_ids:
            self.book.make_urgent(client, request_id)
        return self._schedule(now)

    def cancel(self, client: Client, request_id: int, now: int) -> list[Action]:
        """Nobody waits for this request any more; it is answered as cancelled."""
        self.book.cancel(client, request_id)
        return self._schedule(now)

    def client_gone(self, client: Client, now: int) -> list[Action]:
        """An executor is gone: its requests need no answer any more."""
        self.book.client_gone(client)
        return self._schedule(now)

    def expect(self, now: int) -> list[Action]:
        """An executor will need compiles soon: there should be a few workers."""
        return self._schedule(now, at_least=min(self.limits.workers, _EXPECTED))

    def run_over(self, run_id: str) -> None:
        """A run has no executor any more."""
        self.book.run_over(run_id)
        self._served.pop(run_id, None)

    # -- workers ------------------------------------------------------------------------------

    def worker_ready(self, name: str, now: int) -> list[Action]:
        """A worker said hello."""
        worker = self.workers.get(name)
        if worker is not None and worker.state == "starting":
            self._start_failures.pop(worker.device, None)
            worker.state, worker.since_ns = "idle", now
        return self._schedule(now)

    def job_started(self, name: str, job_id: int, now: int) -> list[Action]:
        """A worker has its job in hand."""
        job = self._held(name, job_id)
        if job is not None and not job.begun:
            self.book.begin(job, now)
        return self._take()

    def job_done(self, name: str, job_id: int, result: Result, now: int) -> list[Action]:
        """A worker finished its job."""
        job = self._held(name, job_id)
        if job is not None:
            self.book.succeeded(job, result, now)
            self._release(self.workers[name], now)
        return self._schedule(now)

    def job_failed(self, name: str, job_id: int, failure: Failure, now: int) -> list[Action]:
        """A worker lives, but has no binary."""
        job = self._held(name, job_id)
        if job is None:
            return []
        worker = self.workers[name]
        others = sum(w.device == worker.device and w.jobs_done > 0 for w in self.workers.values())
        if failure.error.code == "device-memory" and others and not worker.jobs_done:
            # The device holds no more contexts: fewer workers, and the job goes to one that has it.
            self._cap(worker.device, others)
            self.book.put_back(job, failure)
            worker.job = None
            self._retire(worker, "the device has no memory for its context")
        else:
            self.book.attempt_failed(job, failure, now)
            self._release(worker, now)
        return self._schedule(now)

    def worker_gone(self, name: str, pid: int, how: str, words: str, now: int) -> list[Action]:
        """A worker process ended, or could not be started; `how` says so."""
        worker = self.workers.pop(name, None)
        said = f"; its last words: {words[-600:]}" if words else ""
        if worker is None:
            return []
        if worker.job is not None:
            text = f"{worker.job.label}: the compiler's process {pid} ended by {how}{said}"
            failure = Failure(
                outcome="crash",
                compiler_started=worker.job.begun,
                error=CompileCrashError(text).info(),
                log=words,
            )
            self.book.attempt_failed(worker.job, failure, now)
        elif worker.state == "starting":
            self._start_failed(worker, f"{name} ended at its start: {how}{said}", now)
        return self._schedule(now)

    def over_memory(self, name: str, used_mb: int, limit_mb: int, now: int) -> list[Action]:
        """A busy worker went past the job's memory limit."""
        worker = self.workers.get(name)
        if worker is not None and worker.job is not None:
            text = f"{worker.job.label}: its compiler took {used_mb} MB, the limit is {limit_mb} MB"
            self._doom(worker, worker.job, "memory", CompileMemoryError(text).info(), now)
        return self._schedule(now)

    def recycle(self, name: str, reason: str, now: int) -> list[Action]:
        """An idle worker should be replaced."""
        worker = self.workers.get(name)
        if worker is not None and worker.state == "idle":
            self._retire(worker, reason)
        return self._schedule(now)

    def drain(self) -> None:
        """Finish what runs, start nothing more."""
        self._draining = True

    def tick(self, now: int) -> list[Action]:
        """Time passed: deadlines, reports of slow compiles, idle workers."""
        for worker in list(self.workers.values()):
            waited = now - worker.since_ns
            if worker.job is not None:
                self._watch_job(worker, worker.job, now)
            elif worker.state == "starting" and waited > self.limits.start_ns:
                del self.workers[worker.name]
                self._emit(Kill(worker=worker.name, reason="it did not start in time"))
                self._start_failed(worker, f"{worker.name} did not start in time", now)
            elif worker.state == "idle" and waited > self.limits.idle_ns:
                self._retire(worker, "idle")
        return self._schedule(now)

    @property
    def busy(self) -> bool:
        """Whether a job runs at this moment."""
        return any(worker.job is not None for worker in self.workers.values())

    @property
    def owes(self) -> bool:
        """Whether a job runs that somebody waits for."""
        return any(worker.job and worker.job.requests for worker in self.workers.values())

    @property
    def trying(self) -> bool:
        """Whether workers are starting that nobody has asked for yet: they try their device."""
        return any(w.state == "starting" and not w.device for w in self.workers.values())

    def requests_of(self, name: str) -> tuple[Request, ...]:
        """Who wants the job of a worker."""
        worker = self.workers.get(name)
        return tuple(worker.job.requests.values()) if worker and worker.job else ()

    # -- inside: workers and time -------------------------------------------------------------

    def _held(self, name: str, job_id: int) -> Job | None:
        """The job, when that worker really has it: answers for a job that was taken away, or that
        was never given, do not count."""
        worker = self.workers.get(name)
        job = worker.job if worker is not None else None
        return job if job is not None and job.job_id == job_id else None

    def _release(self, worker: Worker, now: int) -> None:
        worker.job, worker.state, worker.since_ns = None, "idle", now
        worker.jobs_done += 1
        if worker.jobs_done >= self.limits.worker_jobs > 0:
            self._retire(worker, f"recycled after {worker.jobs_done} jobs")

    def _watch_job(self, worker: Worker, job: Job, now: int) -> None:
        elapsed = now - job.assigned_ns
        if elapsed > job.limit_ns:
            text = f"{job.label}: not compiled in {job.limit_ns / 1e9:g} s"
            self._doom(worker, job, "timeout", CompileTimeoutError(text).info(), now)
        elif job.begun and job.owner and now - job.reported_ns >= self.limits.progress_ns:
            job.reported_ns = now
            self._emit(Progress(request=job.owner, worker=worker.name, elapsed_ns=elapsed))

    def _doom(self, worker: Worker, job: Job, outcome: str, error: ErrorInfo, now: int) -> None:
        """Kill a worker for its job. The job does not wait until the process is gone: one that is
        stuck in a driver may never go."""
        del self.workers[worker.name]
        held = tuple(job.requests.values())
        self._emit(Kill(worker=worker.name, reason=outcome, held=held))
        failure = Failure(outcome=outcome, compiler_started=job.begun, error=error)
        self.book.attempt_failed(job, failure, now)

    def _retire(self, worker: Worker, reason: str) -> None:
        worker.state = "leaving"
        self._emit(Retire(worker=worker.name, reason=reason))

    def _start_failed(self, worker: Worker, text: str, now: int) -> None:
        failures = self._start_failures.get(worker.device, 0) + 1
        self._start_failures[worker.device] = failures
        if failures < _START_FAILURES:
            return
        del self._start_failures[worker.device]
        error = CompileSetupError(f"no compile worker starts: {text}").info()
        failure = Failure(outcome="setup", compiler_started=False, error=error)
        for job in self.book.queued():
            if job.body.device == worker.device:
                self.book.attempt_failed(job, failure, now)

    # -- inside: scheduling -------------------------------------------------------------------

    def _schedule(self, now: int, at_least: int = 0) -> list[Action]:
        idle = [w for w in self.workers.values() if w.state == "idle"]
        if self._draining or not (idle or self._has_room()):
            return self._take()  # usual under load: nothing to look through the queue for
        queued = self.book.queued()
        for worker in sorted(idle, key=lambda worker: not worker.device):
            mine = [job for job in queued if self._may_take(worker, job.body.device)]
            if mine:
                job = min(mine, key=self._rank)
                queued.remove(job)
                self._assign(worker, job, now)
        self._staff(queued, now, at_least)
        return self._take()

    def _may_take(self, worker: Worker, device: str) -> bool:
        """A worker of no device yet may take any job, where the device has room for it."""
        if worker.device:
            return worker.device == device
        return self._working(device) < self._caps.get(device, self.limits.workers)

    def _working(self, device: str) -> int:
        return sum(w.device == device and w.state != "leaving" for w in self.workers.values())

    def _cap(self, device: str, most: int) -> None:
        self._caps[device] = min(most, self._caps.get(device, most))

    def _rank(self, job: Job) -> tuple[bool, int, int, int]:
        """Who goes first: urgent ones, then the run that was served longest ago, then second
        attempts, then the oldest."""
        runs = (request.client[0] for request in job.requests.values())
        served = min((self._served.get(run, 0) for run in runs), default=0)
        return not job.urgent, served, -job.attempt, job.job_id

    def _assign(self, worker: Worker, job: Job, now: int) -> None:
        worker.state, worker.since_ns, worker.job = "busy", now, job
        worker.device = job.body.device
        job.give_to(worker.name, now)
        self._turn += 1
        self._served |= dict.fromkeys(job.runs, self._turn)
        self._emit(
            Assign(worker=worker.name, job_id=job.job_id, attempt=job.attempt, body=job.body)
        )

    def _staff(self, queued: list[Job], now: int, at_least: int) -> None:
        """Who is started: a worker for each job that found none and has none on its way, if need be
        in the place of another; then any workers, until there are `at_least` so many."""
        coming = Counter(w.device for w in self.workers.values() if w.state == "starting")
        for device, wanted in Counter(job.body.device for job in queued).items():
            wanted = max(0, wanted - coming[device])
            any_will_do = min(wanted, coming[""])
            coming[""] -= any_will_do
            wanted -= any_will_do
            if device in self._caps:
                wanted = min(wanted, self._caps[device] - self._working(device))
            for _ in range(wanted):
                if not self._room_for(device, now):
                    return
                self._spawn(device, now, "jobs wait")
        for _ in range(at_least - sum(w.state != "leaving" for w in self.workers.values())):
            self._spawn("", now, "compiles are expected")

    def _spawn(self, device: str, now: int, reason: str) -> None:
        self._last_worker += 1
        name = f"worker-{self._last_worker}"
        self.workers[name] = Worker(name, device, now)
        self._emit(Spawn(worker=name, device=device, reason=reason))

    def _has_room(self) -> bool:
        """Whether a worker could be started, if need be in the place of another."""
        working = [w for w in self.workers.values() if w.state != "leaving"]
        unwanted = any(w.job is not None and not w.job.requests for w in working)
        return unwanted or len(working) < self.limits.workers

    def _room_for(self, device: str, now: int) -> bool:
        working = [w for w in self.workers.values() if w.state != "leaving"]
        if len(working) < self.limits.workers:
            return True
        idle = next((w for w in working if w.state == "idle" and w.device != device), None)
        if idle is not None:
            self._retire(idle, "another device needs a worker")
            return True
        for worker in working:
            if worker.job is not None and not worker.job.requests:
                error = CompileCancelledError("nobody waits for it any more").info()
                self._doom(worker, worker.job, "cancelled", error, now)
                return True
        return False

    def _emit(self, action: Action) -> None:
        self.book.out.append(action)

    def _take(self) -> list[Action]:
        out, self.book.out = self.book.out, []
        return out
