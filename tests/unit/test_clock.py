"""The hybrid logical clock: never down, above everything merged, and the same from many threads."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from hrxmp.clock import Hlc, HybridLogicalClock

WALLS = st.integers(0, 1 << 40)
HLCS = st.tuples(WALLS, st.integers(0, 1 << 20))


def test_wall_time_leads_and_the_counter_breaks_ties() -> None:
    clock = HybridLogicalClock()
    assert clock.tick(5) == (5, 0)
    assert clock.tick(5) == (5, 1)
    assert clock.tick(3) == (5, 2)
    assert clock.tick(6) == (6, 0)


def test_merge_of_each_kind() -> None:
    clock = HybridLogicalClock((10, 3))
    assert clock.merge((10, 7), 2) == (10, 8)
    assert clock.merge((9, 99), 2) == (10, 9)
    assert clock.merge((12, 4), 2) == (12, 5)
    assert clock.merge((12, 4), 20) == (20, 0)
    assert clock.now == (20, 0)


@given(st.lists(st.tuples(WALLS, st.none() | HLCS)))
def test_every_step_is_above_the_last_and_above_what_came_in(
    steps: list[tuple[int, Hlc | None]],
) -> None:
    clock = HybridLogicalClock()
    last = clock.now
    for wall, other in steps:
        now = clock.tick(wall) if other is None else clock.merge(other, wall)
        assert now > last
        assert now[0] >= wall
        assert other is None or now > other
        last = now


def test_threads_never_get_the_same_time() -> None:
    clock = HybridLogicalClock()
    taken: list[list[Hlc]] = [[] for _ in range(4)]

    def take(out: list[Hlc]) -> None:
        out += [clock.tick(7) for _ in range(5000)]

    threads = [threading.Thread(target=take, args=(out,)) for out in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [time for out in taken for time in out]
    assert len(set(everything)) == len(everything)
    assert all(out == sorted(out) for out in taken)
