"""The pure parts of benchmarks/startup.py: the schedule simulation and the reading of a trace."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.startup import Start, compiles, makespan, taken_apart


def test_jobs_go_in_order_to_the_worker_that_is_free_first() -> None:
    assert makespan([3, 2, 2], 1) == 7
    assert makespan([3, 2, 2], 2) == 4
    assert makespan([2, 2, 3], 2) == 5  # the order counts
    assert makespan([3, 2, 2], 16) == 3
    assert makespan([], 2) == 0


def test_no_schedule_beats_the_sum_of_work_or_the_longest_job() -> None:
    source = random.Random(7)
    for _ in range(200):
        lengths = [source.uniform(1, 100) for _ in range(source.randrange(1, 40))]
        workers = source.randrange(1, 17)
        bound = max(max(lengths), sum(lengths) / workers)
        asked = makespan(lengths, workers)
        longest_first = makespan(sorted(lengths, reverse=True), workers)
        assert bound <= asked * (1 + 1e-9)
        assert asked <= sum(lengths) / workers + max(lengths)
        assert bound <= longest_first * (1 + 1e-9)


def test_a_pool_has_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="0 workers"):
        makespan([1.0], 0)


def event(name: str, t_ms: int, **columns: Any) -> dict[str, Any]:
    return {"event": name, "t_ns": t_ms * 1_000_000, "exec": None, **columns}


TRACE = [
    event("run-begin", 100, incarnation=1_040_000_000),
    event("compile-request", 110, request=1, key="a", via="compile"),
    event("compile-request", 110, request=2, key="decode only", via="compile"),
    event("compile-begin", 120, request=1),
    event("compile-begin", 120, request=2),
    event("graph-begin", 130) | {"exec": 1},
    event("compile-request", 130, request=3, key="a", via="prefetch") | {"exec": 1},
    event("compile-end", 150, request=1),
    event("wait-end", 150, dur_ns=20_000_000) | {"exec": 1},
    event("kernel-load", 152, load_ns=2_000_000) | {"exec": 1},
    event("graph-end", 155) | {"exec": 1},
    event("compile-end", 400, request=2),
]


def test_only_compiles_that_the_first_execution_needs_count() -> None:
    assert compiles(TRACE) == {1: 30.0}


def test_the_phases_of_a_start_follow_each_other_without_a_gap() -> None:
    start = Start(begin=980_000_000, zero=1_000_000_000, byte=1_160_000_000)
    phases, beside = taken_apart(start, TRACE)
    assert [round(ms) for _, ms in phases] == [20, 40, 60, 30, 25, 5]
    assert sum(ms for _, ms in phases) == pytest.approx(start.seconds * 1000)
    assert [round(ms) for _, ms in beside] == [180, 140, 170, 1, 30, 20, 2]
