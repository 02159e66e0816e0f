"""Readings of the clocks, and the hybrid logical clock that orders all records.

Monotonic time is for durations and liveness, the hybrid clock for order, wall time only inside
the hybrid clock. `HybridLogicalClock` is pure: readings are passed in, so that a simulator can
drive it; one of them serves all links and threads of a process, so its steps are under a lock.
Kulkarni et al., "Logical Physical Clocks", 2014.
"""

from __future__ import annotations

import threading
import time

Hlc = tuple[int, int]
"""Hybrid time: (wall nanoseconds, counter). Compares as a tuple."""


mono_ns = time.monotonic_ns
"""CLOCK_MONOTONIC in nanoseconds: comparable between the processes of one boot."""

wall_ns = time.time_ns
"""Wall time in nanoseconds since the epoch; may step, so only the hybrid clock uses it."""


class HybridLogicalClock:
    """A clock that never goes down and is ahead of everything that was merged into it."""

    __slots__ = ("_counter", "_lock", "_wall")

    def __init__(self, start: Hlc = (0, 0)) -> None:
        self._wall, self._counter = start
        self._lock = threading.Lock()

    @property
    def now(self) -> Hlc:
        """The last time given out, without a step."""
        with self._lock:
            return self._wall, self._counter

    def tick(self, wall: int) -> Hlc:
        """Step for a local event or a send; strictly above every earlier time."""
        with self._lock:
            if wall > self._wall:
                self._wall, self._counter = wall, 0
            else:
                self._counter += 1
            return self._wall, self._counter

    def merge(self, other: Hlc, wall: int) -> Hlc:
        """Step for a receive; strictly above both the local and the received time."""
        with self._lock:
            self._counter = self._after(other, wall)
            self._wall = max(self._wall, other[0], wall)
            return self._wall, self._counter

    def _after(self, other: Hlc, wall: int) -> int:
        top = max(self._wall, other[0], wall)
        if top == self._wall == other[0]:
            return max(self._counter, other[1]) + 1
        if top == self._wall:
            return self._counter + 1
        return other[1] + 1 if top == other[0] else 0
