"""The broker: events in, actions out, no process and no clock but the one passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hrxmp.errors import ErrorInfo
from hrxmp.kernels.keys import KeyComponents, Variant
from hrxmp.messages import CompileRequest
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
    Limits,
    Progress,
    Request,
    Result,
    Retire,
    Spawn,
    Started,
)
from hrxmp.workers.broker import Broker

A: Client = ("run-a", "executor", 1)
B: Client = ("run-b", "executor", 2)
SECOND = 1_000_000_000
DONE = Result(binary=b"binary", kind="fake", compile_ns=5)
T = TypeVar("T", bound=Action)


def broker(workers: int = 2, **limits: Any) -> Broker:
    base = {"job_ns": 10 * SECOND, "idle_ns": 60 * SECOND, "worker_jobs": 500}
    values = {**base, "progress_ns": 2 * SECOND, **limits}
    return Broker(Limits(workers=workers, **values))


def request(
    request_id: int,
    kernel: str = "k",
    client: Client = A,
    *,
    urgent: bool = False,
    device: str = "d",
) -> Request:
    variant = Variant(definition=kernel, params=(), local_size=(1,))
    parts = KeyComponents(
        source="", entry_point=kernel, params=(), local_size=(1,), build_options="", sanitizer="",
        platform="", device="", compute_units=1, driver="",
    )  # fmt: skip
    body = CompileRequest(
        request_id=request_id, key=parts.digest(), variant=variant, components=parts,
        device=device, urgent=urgent,
    )  # fmt: skip
    return Request(client=client, exec_id=request_id * 10, body=body)


def of(kind: type[T], actions: Sequence[Action]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def crash(outcome: str = "crash", code: str = "compile-crash") -> Failure:
    error = ErrorInfo(code=code, message="it went")
    return Failure(outcome=outcome, compiler_started=True, error=error)


def bring_up(pool: Broker, actions: Sequence[Action], now: int = 0) -> list[Action]:
    """Let every worker that was asked for come up; what follows."""
    found: list[Action] = []
    for spawn in of(Spawn, actions):
        found += pool.worker_ready(spawn.worker, now)
    return found


def start(pool: Broker, *requests: Request, now: int = 0) -> list[Assign]:
    """Submit, bring workers up, and begin: the assignments."""
    actions = [action for item in requests for action in pool.submit(item, now)]
    actions += bring_up(pool, actions, now)
    for job in of(Assign, actions):
        pool.job_started(job.worker, job.job_id, now)
    return of(Assign, actions)


def test_a_request_goes_all_the_way() -> None:
    pool = broker()
    first = pool.submit(request(1), 0)
    assert [type(action) for action in first] == [Accept, Spawn]
    assert of(Accept, first)[0].via == "compile"
    (job,) = of(Assign, bring_up(pool, first, 5))
    begun = pool.job_started(job.worker, job.job_id, 6)
    assert [type(action) for action in begun] == [Begin, Started]
    assert of(Begin, begun)[0].queue_ns == 5
    done = pool.job_done(job.worker, job.job_id, DONE, 9)
    assert [type(action) for action in done] == [End, Answer]
    assert of(Answer, done)[0].outcome == DONE
    assert not pool.book.jobs
    assert pool.workers[job.worker].state == "idle"


def test_equal_keys_share_one_job_and_all_are_answered() -> None:
    """X16: one begin, seven joined, eight answers."""
    pool = broker()
    clients = [(f"run-{n}", "executor", n) for n in range(8)]
    actions = [a for n, c in enumerate(clients) for a in pool.submit(request(n, client=c), 0)]
    assert Counter(a.via for a in of(Accept, actions)) == {"compile": 1, "in_flight": 7}
    assert len(of(Spawn, actions)) == 1
    (job,) = of(Assign, bring_up(pool, actions))
    begun = pool.job_started(job.worker, job.job_id, 1)
    assert (len(of(Begin, begun)), len(of(Started, begun))) == (1, 8)
    done = pool.job_done(job.worker, job.job_id, DONE, 2)
    assert len(of(End, done)) == 1
    assert {a.request.client for a in of(Answer, done)} == set(clients)


def test_a_late_joiner_hears_that_it_began() -> None:
    pool = broker()
    start(pool, request(1))
    joined = pool.submit(request(2, client=B), 5)
    assert [type(a) for a in joined] == [Accept, Started]


def test_the_store_answers_at_once() -> None:
    pool = broker()
    assert pool.book.needs_lookup(request(1))
    actions = pool.submit(request(1), 0, DONE)
    assert [type(a) for a in actions] == [Accept, Answer]
    assert of(Accept, actions)[0].via == "disk"


def test_a_crash_is_tried_once_more_on_another_worker_then_quarantined() -> None:
    """X07: two runs of the compiler in all; the third request costs nothing."""
    pool = broker()
    (job,) = start(pool, request(1))
    again = pool.worker_gone(job.worker, 77, "signal 6 (SIGABRT)", "ouch", 5)
    assert of(Answer, again) == []
    (end,) = of(End, again)
    assert isinstance(end.outcome, Failure)
    assert "77" in end.outcome.error.message
    assert "SIGABRT" in end.outcome.error.message
    assert "ouch" in end.outcome.error.message
    (second,) = of(Assign, bring_up(pool, again, 6))
    assert second.attempt == 2
    assert second.worker != job.worker
    final = pool.worker_gone(second.worker, 78, "signal 6 (SIGABRT)", "", 7)
    (answer,) = of(Answer, final)
    assert isinstance(answer.outcome, Failure)
    assert answer.outcome.outcome == "crash"
    third = pool.submit(request(2), 8)
    assert [type(a) for a in third] == [Accept, Answer]
    assert of(Accept, third)[0].via == "quarantine"
    other_run = pool.submit(request(3, client=B), 8)
    assert of(Accept, other_run)[0].via == "compile"


def test_quarantine_ends_with_the_run() -> None:
    pool = broker()
    (job,) = start(pool, request(1))
    (job,) = of(Assign, bring_up(pool, pool.worker_gone(job.worker, 1, "x", "", 1)))
    pool.worker_gone(job.worker, 1, "x", "", 1)
    assert of(Accept, pool.submit(request(2), 8))[0].via == "quarantine"
    pool.run_over(A[0])
    assert of(Accept, pool.submit(request(2), 8))[0].via == "compile"


def test_a_rejection_is_final_and_not_quarantined() -> None:
    pool = broker()
    (job,) = start(pool, request(1))
    failed = pool.job_failed(job.worker, job.job_id, crash("rejected", "compile-rejected"), 5)
    assert len(of(Answer, failed)) == 1
    assert of(Accept, pool.submit(request(2), 6))[0].via == "compile"


def test_a_job_past_its_deadline_loses_its_worker_and_gets_half_the_time_again() -> None:
    """X08: limit, half the limit, answer."""
    pool = broker(job_ns=2 * SECOND)
    (job,) = start(pool, request(1))
    assert of(Kill, pool.tick(2 * SECOND)) == []
    over = pool.tick(2 * SECOND + 1)
    assert of(Kill, over)[0].worker == job.worker
    assert [r.body.request_id for r in of(Kill, over)[0].held] == [1]
    (second,) = of(Assign, bring_up(pool, over, 2 * SECOND + 1))
    final = pool.tick(3 * SECOND + 2)
    assert of(Kill, final)[0].worker == second.worker
    (answer,) = of(Answer, final)
    assert isinstance(answer.outcome, Failure)
    assert answer.outcome.outcome == "timeout"


def test_the_answer_of_a_worker_that_lost_its_job_does_not_count() -> None:
    pool = broker(job_ns=SECOND)
    (job,) = start(pool, request(1))
    pool.tick(2 * SECOND)
    assert of(Answer, pool.job_done(job.worker, job.job_id, DONE, 2 * SECOND)) == []
    assert pool.worker_gone(job.worker, 1, "signal 9", "", 2 * SECOND) == []


def test_an_answer_for_another_job_does_not_count() -> None:
    pool = broker()
    (job,) = start(pool, request(1))
    assert of(Answer, pool.job_done(job.worker, job.job_id + 1, DONE, 1)) == []
    assert of(Answer, pool.job_done("worker-99", job.job_id, DONE, 1)) == []
    assert of(Answer, pool.job_done(job.worker, job.job_id, DONE, 1)) != []
    assert of(Answer, pool.job_done(job.worker, job.job_id, DONE, 1)) == []


def test_memory_ends_the_worker_and_says_the_figures() -> None:
    pool = broker()
    (job,) = start(pool, request(1))
    actions = pool.over_memory(job.worker, 600, 512, 5)
    assert of(Kill, actions)[0].reason == "memory"
    (end,) = of(End, actions)
    assert isinstance(end.outcome, Failure)
    assert "600 MB" in end.outcome.error.message
    assert "512 MB" in end.outcome.error.message


def test_what_somebody_waits_for_goes_before_prefetches() -> None:
    pool = broker(workers=1)
    (first,) = start(pool, request(1, "a"))
    for number, kernel in enumerate("bcd"):
        pool.submit(request(2 + number, kernel), 1)
    pool.submit(request(9, "urgent", urgent=True), 2)
    (next_job,) = of(Assign, pool.job_done(first.worker, first.job_id, DONE, 3))
    assert next_job.body.request_id == 9
    pool.urgent(A, (4,), 4)
    (after,) = of(Assign, pool.job_done(first.worker, next_job.job_id, DONE, 5))
    assert after.body.request_id == 4


def test_runs_take_turns() -> None:
    """A run that asks for much does not starve one that asks for little."""
    pool = broker(workers=1)
    (job,) = start(pool, *(request(n, f"a{n}") for n in range(6)))
    pool.submit(request(50, "b0", client=B), 1)
    pool.submit(request(51, "b1", client=B), 1)
    order = []
    for _ in range(5):
        (job,) = of(Assign, pool.job_done(job.worker, job.job_id, DONE, 2))
        order.append(job.body.variant.definition[0])
    assert order == ["b", "a", "b", "a", "a"]


def test_no_more_workers_than_allowed_and_none_without_need() -> None:
    pool = broker(workers=3)
    one = pool.submit(request(1, "a"), 0)
    assert len(of(Spawn, one)) == 1
    more = [a for n in range(2, 8) for a in pool.submit(request(n, f"k{n}"), 0)]
    assert len(of(Spawn, more)) == 2


def test_idle_workers_end_and_old_ones_are_replaced() -> None:
    pool = broker(workers=1, idle_ns=10 * SECOND, worker_jobs=2)
    (job,) = start(pool, request(1, "a"))
    assert of(Retire, pool.job_done(job.worker, job.job_id, DONE, 1)) == []
    (job,) = start(pool, request(2, "b"))
    (retired,) = of(Retire, pool.job_done(job.worker, job.job_id, DONE, 1))
    assert "2 jobs" in retired.reason
    more = pool.submit(request(3, "c"), 2)
    assert len(of(Spawn, more)) == 1  # the leaving one does not count
    bring_up(pool, more, 2)
    (name,) = [w.name for w in pool.workers.values() if w.job]
    pool.job_done(name, pool.workers[name].job.job_id, DONE, 3)  # type: ignore[union-attr]
    assert of(Retire, pool.tick(3 + 11 * SECOND))[0].reason == "idle"


def test_a_device_whose_workers_do_not_start_fails_its_jobs_at_the_third() -> None:
    pool = broker(workers=1)
    actions = pool.submit(request(1), 0)
    for attempt in range(3):
        assert of(Answer, actions) == []
        (spawn,) = of(Spawn, actions)
        actions = pool.worker_gone(spawn.worker, 5, "exit code 3", "no such driver", attempt)
    (answer,) = of(Answer, actions)
    assert isinstance(answer.outcome, Failure)
    assert (answer.outcome.outcome, answer.outcome.compiler_started) == ("setup", False)
    assert "no such driver" in answer.outcome.error.message
    assert len(of(Spawn, pool.submit(request(2, "other"), 9))) == 1


def test_a_worker_that_never_says_hello_is_killed() -> None:
    pool = broker(workers=1, start_ns=3 * SECOND)
    (spawn,) = of(Spawn, pool.submit(request(1), 0))
    actions = pool.tick(4 * SECOND)
    assert of(Kill, actions)[0].worker == spawn.worker
    assert len(of(Spawn, actions)) == 1


def test_cancelling_the_last_wish_drops_a_queued_job() -> None:
    pool = broker(workers=1)
    start(pool, request(1, "a"))
    pool.submit(request(2, "b"), 0)
    actions = pool.cancel(A, 2, 1)
    (answer,) = of(Answer, actions)
    assert isinstance(answer.outcome, Failure)
    assert answer.outcome.outcome == "cancelled"
    assert len(pool.book.jobs) == 1
    assert pool.cancel(A, 2, 1) == []


def test_a_cancelled_job_goes_on_for_those_who_joined() -> None:
    pool = broker()
    (job,) = start(pool, request(1))
    pool.submit(request(2, client=B), 0)
    cancelled = pool.cancel(A, 1, 1)
    assert len(of(End, cancelled)) == 1  # the pair of its begin
    done = pool.job_done(job.worker, job.job_id, DONE, 2)
    assert of(End, done) == []
    assert [a.request.client for a in of(Answer, done)] == [B]


def test_an_unwanted_job_runs_on_until_its_worker_is_needed() -> None:
    pool = broker(workers=1)
    (job,) = start(pool, request(1, "a"))
    pool.client_gone(A, 1)
    assert pool.workers[job.worker].job is not None
    actions = pool.submit(request(2, "b", client=B), 2)
    assert of(Kill, actions)[0].reason == "cancelled"
    assert len(of(Spawn, actions)) == 1


def test_an_idle_worker_of_another_device_makes_room() -> None:
    pool = broker(workers=1)
    (job,) = start(pool, request(1, "a", device="one"))
    pool.job_done(job.worker, job.job_id, DONE, 1)
    actions = pool.submit(request(2, "b", device="two"), 2)
    assert len(of(Retire, actions)) == 1
    assert of(Spawn, actions)[0].device == "two"


def test_a_device_without_memory_for_more_workers_gets_fewer() -> None:
    pool = broker(workers=2)
    (first,) = start(pool, request(1, "a"))
    pool.job_done(first.worker, first.job_id, DONE, 1)
    jobs = start(pool, request(2, "b"), request(3, "c"), now=2)
    newcomer = next(job for job in jobs if job.worker != first.worker)
    full = Failure(
        outcome="setup", compiler_started=False,
        error=ErrorInfo(code="device-memory", message="no memory"),
    )  # fmt: skip
    actions = pool.job_failed(newcomer.worker, newcomer.job_id, full, 3)
    assert of(Answer, actions) == []
    assert of(Spawn, actions) == []
    assert len(of(Retire, actions)) == 1
    other = next(job for job in jobs if job.worker == first.worker)
    (again,) = of(Assign, pool.job_done(first.worker, other.job_id, DONE, 4))
    assert again.body.request_id == newcomer.body.request_id


def test_slow_compiles_are_reported_at_intervals() -> None:
    pool = broker(progress_ns=2 * SECOND)
    start(pool, request(1))
    assert of(Progress, pool.tick(SECOND)) == []
    assert len(of(Progress, pool.tick(2 * SECOND))) == 1
    assert of(Progress, pool.tick(3 * SECOND)) == []
    (second,) = of(Progress, pool.tick(4 * SECOND))
    assert second.elapsed_ns == 4 * SECOND


def test_a_request_sent_again_is_accepted_again_and_answered_once() -> None:
    pool = broker()
    (job,) = start(pool, request(1))
    again = pool.submit(request(1), 1)
    assert [type(a) for a in again] == [Accept]
    assert of(Accept, again)[0].via == "compile"
    assert len(of(Answer, pool.job_done(job.worker, job.job_id, DONE, 2))) == 1


def test_draining_finishes_what_runs_and_starts_nothing() -> None:
    pool = broker(workers=1)
    (job,) = start(pool, request(1, "a"))
    pool.submit(request(2, "b"), 0)
    pool.drain()
    actions = pool.job_done(job.worker, job.job_id, DONE, 1)
    assert len(of(Answer, actions)) == 1
    assert of(Assign, actions) == []
    assert not pool.busy


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "submit", "submit", "ready", "started", "done", "failed", "gone", "memory",
             "cancel", "client", "tick", "urgent", "again"]
        ),
        st.integers(0, 5),
        st.integers(0, 1),
    ),
    max_size=60,
)  # fmt: skip


@given(EVENTS, st.integers(1, 3))
@settings(max_examples=400)
def test_whatever_happens_each_request_is_answered_exactly_once(
    events: list[tuple[str, int, int]], workers: int
) -> None:
    """Random stories, then a clean end: one answer each, begins and ends in pairs, no leftovers."""
    story = Story(broker(workers=workers, job_ns=8 * SECOND, worker_jobs=3))
    for event in events:
        story.step(*event)
    story.finish()
    story.check()


class Story:
    """A pool under random events; keeps the books that the broker should keep."""

    def __init__(self, pool: Broker) -> None:
        self.pool = pool
        self.now = 0
        self.next_id = 0
        self.asked: dict[tuple[Client, int], Request] = {}
        self.gone: set[tuple[Client, int]] = set()
        self.answers: Counter[tuple[Client, int]] = Counter()
        self.accepts: Counter[tuple[Client, int]] = Counter()
        self.open: dict[tuple[Client, int], int] = {}
        self.assigned: dict[str, int] = {}

    def step(self, kind: str, number: int, side: int) -> None:
        self.now += SECOND // 2
        client, pool, now = (A, B)[side], self.pool, self.now
        names = sorted(pool.workers)
        name = names[number % len(names)] if names else "worker-0"
        job_id = self.assigned.get(name, -1)
        if kind == "submit":
            self.next_id += 1
            item = request(self.next_id, f"k{number}", client)
            self.asked[item.ident] = item
            self.take(pool.submit(item, now))
        elif kind == "again" and self.asked:
            item = list(self.asked.values())[number % len(self.asked)]
            if not self.answers[item.ident] and item.ident not in self.gone:
                self.take(pool.submit(item, now))
        elif kind == "client":
            self.gone |= {ident for ident in self.asked if ident[0] == client}
            self.take(pool.client_gone(client, now))
        elif kind == "cancel":
            self.take(pool.cancel(client, number + 1, now))
        elif kind == "urgent":
            self.take(pool.urgent(client, (number + 1,), now))
        elif kind == "tick":
            self.take(pool.tick(now))
        else:
            self.worker_event(kind, name, job_id)

    def worker_event(self, kind: str, name: str, job_id: int) -> None:
        pool, now = self.pool, self.now
        worker = pool.workers.get(name)
        if kind == "gone":
            self.take(pool.worker_gone(name, 1, "signal 9", "", now))
        elif worker is None:
            return
        elif kind == "ready":
            self.take(pool.worker_ready(name, now))
        elif kind == "started":
            self.take(pool.job_started(name, job_id, now))
        elif kind == "done":
            self.take(pool.job_done(name, job_id, DONE, now))
        elif kind == "failed":
            self.take(pool.job_failed(name, job_id, crash("rejected"), now))
        elif kind == "memory":
            self.take(pool.over_memory(name, 2, 1, now))

    def take(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Assign):
                self.assigned[action.worker] = action.job_id
            elif isinstance(action, Accept):
                self.accepts[action.request.ident] += 1
            elif isinstance(action, Answer):
                assert self.accepts[action.request.ident], "answered before it was accepted"
                self.answers[action.request.ident] += 1
            elif isinstance(action, Begin):
                assert action.request.ident not in self.open, "begun twice"
                self.open[action.request.ident] = action.attempt
            elif isinstance(action, End):
                assert self.open.pop(action.request.ident) == action.attempt
        busy = [w for w in self.pool.workers.values() if w.state != "leaving"]
        assert len(busy) <= self.pool.limits.workers

    def finish(self) -> None:
        for _ in range(200):
            if not self.pool.book.jobs:
                return
            for name in sorted(self.pool.workers):
                for kind in ("ready", "done"):
                    self.worker_event(kind, name, self.assigned.get(name, -1))
            self.now += SECOND
            self.take(self.pool.tick(self.now))
        raise AssertionError("jobs are left")

    def check(self) -> None:
        for ident in self.asked:
            if ident not in self.gone:
                assert self.answers[ident] == 1
            else:
                assert self.answers[ident] <= 1
        assert self.open == {}
        assert not self.pool.book._open


def test_expected_compiles_find_their_workers_started() -> None:
    """Workers of no device yet, at most as many as allowed; the first jobs give them one."""
    pool = broker(workers=2)
    expected = pool.expect(0)
    assert [spawn.device for spawn in of(Spawn, expected)] == ["", ""]
    assert of(Spawn, pool.expect(0)) == []
    first = pool.submit(request(1, "a", device="one"), 1)
    assert of(Spawn, first) == []  # one is on its way
    (job,) = of(Assign, bring_up(pool, expected, 2))
    assert pool.workers[job.worker].device == "one"
    (other,) = of(Assign, pool.submit(request(2, "b", device="two"), 3))
    assert pool.workers[other.worker].device == "two"


def test_workers_that_nobody_asked_for_try_their_device() -> None:
    """One that dies of it is none too few: a job gets an ordinary one in its place."""
    pool = broker(workers=2)
    first, second = of(Spawn, pool.expect(0))
    assert pool.trying
    pool.worker_ready(first.worker, 1)
    assert pool.trying
    pool.worker_gone(second.worker, 7, "signal 6 (SIGABRT)", "", 2)
    assert not pool.trying
    pool.recycle(first.worker, "another test", 3)
    pool.worker_gone(first.worker, 6, "exit code 0", "", 4)
    assert [s.device for s in of(Spawn, pool.submit(request(1, "a", device="one"), 5))] == ["one"]
    assert not pool.trying


def test_expected_compiles_count_the_workers_that_jobs_have_brought() -> None:
    pool = broker(workers=4)
    started = pool.submit(request(1, "a", device="one"), 0)
    expected = pool.expect(0)
    assert [spawn.device for spawn in of(Spawn, [*started, *expected])] == ["one", "", "", ""]
    bring_up(pool, started, 1)
    bring_up(pool, expected, 1)
    assert of(Spawn, pool.expect(2)) == []
    pool.tick(70 * SECOND)  # those without a job end
    assert len(of(Spawn, pool.expect(70 * SECOND))) == 3
    pool.drain()
    assert pool.expect(71 * SECOND) == []


def test_a_device_has_no_more_workers_than_it_has_memory_for() -> None:
    """Also of those that were started before anybody named a device."""
    pool = broker(workers=4)
    expected = pool.expect(0)
    jobs = []
    for number in range(4):
        item = request(number, f"k{number}", device="gpu")
        item = replace(item, body=replace(item.body, most_workers=2))
        jobs += pool.submit(item, 1)
    jobs += bring_up(pool, expected, 2)
    assert len(of(Assign, jobs)) == 2
    first = of(Assign, jobs)[0]
    (again,) = of(Assign, pool.job_done(first.worker, first.job_id, DONE, 3))
    assert again.worker == first.worker
    (other,) = of(Assign, pool.submit(request(9, "cpu", device="cpu"), 4))
    assert pool.workers[other.worker].device == "cpu"
