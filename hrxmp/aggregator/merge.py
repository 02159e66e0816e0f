"""The order of the trace: a merge of all sources' batches by hybrid clock, with watermarks.

A pure state machine: no sockets, no files, time is passed in. A lane holds what one source sent
and its mark, the promise that all it will send is later. What is at or below the smallest mark
of the lanes that count is complete and is released, sorted. A lane that was silent longer than
the hold-back does not count; what it sends below the released order is late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import itemgetter

import msgspec

from hrxmp.clock import Hlc

Item = tuple[int, int, bytes]
"""(wall ns, counter, line): one record on its way."""

PORTION = 8000
"""About so many records of a lane in one release: acknowledgements are then not far behind."""

END: Hlc = (1 << 63, 0)
"""Later than every clock."""

_clock_of = itemgetter(0, 1)


class Lane:
    """One source's queue. `order` breaks ties: source, incarnation, run."""

    __slots__ = ("batches", "heard_ns", "held", "leaving", "mark", "order", "promised")

    def __init__(self, order: tuple[str, int, str], now: int) -> None:
        self.order = order
        self.batches: deque[Batch] = deque()
        self.held = 0
        """Number of records in `batches`."""
        self.mark: Hlc = (0, 0)
        self.heard_ns = now
        self.promised: Hlc = (0, 0)
        """Up to here a former life of the aggregator had heard it: a repeat, never late."""
        self.leaving = False
        """Nothing more will come: the lane holds nobody back."""


class Batch(msgspec.Struct, gc=False):
    """Records of one lane, in order, from `start` on."""

    first_seq: int
    items: list[Item]
    start: int = 0


class Released(msgspec.Struct, gc=False):
    """Records that may be written now, in this order: late ones, then the others."""

    late: list[Item]
    items: list[Item]
    until: list[tuple[Lane, int]]
    """(lane, number): of this lane all below the number is among or before these."""
    floor: Hlc
    """Clock of the last record, of these or earlier ones."""


class Merge:
    """All lanes, and the clock of the last record that was released."""

    def __init__(self, hold_back_ns: int) -> None:
        self.hold_back_ns = hold_back_ns
        self.lanes: list[Lane] = []
        self.floor: Hlc = (0, 0)
        self.settled_ns = 0
        """Before this time nothing is released: sources of a former life may still return."""
        self.late_count = 0
        self._late: list[tuple[Lane, int, list[Item]]] = []

    def add(self, lane: Lane) -> None:
        """Let a lane take part; it holds the others back until it has spoken."""
        self.lanes.append(lane)
        self.lanes.sort(key=lambda one: one.order)

    def remove(self, lane: Lane) -> None:
        """Forget an emptied lane."""
        self.lanes.remove(lane)

    def push(self, lane: Lane, first_seq: int, items: list[Item], mark: Hlc, now: int) -> None:
        """Take a batch (possibly empty) and the promise that comes with it."""
        lane.heard_ns = now
        lane.mark = max(lane.mark, mark)
        if items:
            self._enqueue(lane, first_seq, items)

    def raise_floor(self, floor: Hlc) -> None:
        """A former life of the aggregator had written this far."""
        if floor <= self.floor:
            return
        self.floor = floor
        for lane in self.lanes:
            batches, lane.batches, lane.held = lane.batches, deque(), 0
            for batch in batches:
                self._enqueue(lane, batch.first_seq + batch.start, batch.items[batch.start :])

    def _enqueue(self, lane: Lane, first_seq: int, items: list[Item]) -> None:
        stop = _reach(items, 0, self.floor)
        start = _reach(items, 0, lane.promised) if stop else 0
        if start and stop > start:  # a repeat first, then what is late
            lane.batches.append(Batch(first_seq, items[:start]))
            lane.held += start
        late = max(stop - start, 0)
        if late:
            self.late_count += late
            self._late.append((lane, first_seq + stop, items[start:stop]))
        else:
            stop = 0
        if stop < len(items):
            lane.batches.append(Batch(first_seq, items, stop))
            lane.held += len(items) - stop

    def watermark(self, now: int) -> Hlc:
        """All that is at or below it has come, from every lane that counts."""
        marks = [
            lane.mark
            for lane in self.lanes
            if not lane.leaving and now - lane.heard_ns <= self.hold_back_ns
        ]
        return min(marks, default=END)

    def release(self, now: int, *, everything: bool = False) -> Released | None:
        """Take out what is complete; None when nothing is. `everything` ignores the marks."""
        if now < self.settled_ns and not everything:
            return None
        mark = self._portion(END if everything else self.watermark(now))
        late, until = self._take_late()
        items: list[Item] = []
        contributors = 0
        for lane in self.lanes:
            if lane.batches and (taken := _take(lane, mark, items)):
                until.append((lane, taken))
                contributors += 1
        if not items and not late:
            return None
        if contributors > 1:
            items.sort(key=_clock_of)  # stable: equal clocks stay in the order of the lanes
        if items:
            self.floor = max(self.floor, items[-1][:2])
        return Released(late, items, until, self.floor)

    def oldest(self) -> Hlc | None:
        """The clock of the earliest record that is held."""
        heads = [
            lane.batches[0].items[lane.batches[0].start][:2] for lane in self.lanes if lane.batches
        ]
        return min(heads, default=None)

    def lagging(self, now: int) -> list[Lane]:
        """Lanes that count and whose mark keeps the earliest held record back."""
        oldest = self.oldest()
        if oldest is None:
            return []
        return [
            lane
            for lane in self.lanes
            if lane.mark < oldest and not lane.leaving and now - lane.heard_ns <= self.hold_back_ns
        ]

    def held(self) -> int:
        """Number of records that wait."""
        return sum(lane.held for lane in self.lanes)

    def _portion(self, mark: Hlc) -> Hlc:
        """A smaller mark when more is complete than should be released at once."""
        for lane in self.lanes:
            if lane.held > PORTION:
                mark = min(mark, _portion_end(lane))
        return mark

    def _take_late(self) -> tuple[list[Item], list[tuple[Lane, int]]]:
        late: list[Item] = []
        until: list[tuple[Lane, int]] = []
        for lane, end, items in self._late:
            late += items
            until.append((lane, end))
        self._late.clear()
        return late, until


def _portion_end(lane: Lane) -> Hlc:
    """The clock at which a lane has given a portion."""
    count = 0
    for batch in lane.batches:
        count += len(batch.items) - batch.start
        if count >= PORTION:
            return batch.items[-1][:2]
    return END


def _take(lane: Lane, mark: Hlc, out: list[Item]) -> int:
    """Move a lane's records up to `mark` into `out`; the number after the last one, or 0."""
    end = 0
    while lane.batches:
        batch = lane.batches[0]
        items, start = batch.items, batch.start
        if items[-1][:2] <= mark:
            stop = len(items)
            lane.batches.popleft()
        else:
            stop = _reach(items, start, mark)
            batch.start = stop
        if stop > start:
            out += items[start:stop] if start or stop < len(items) else items
            lane.held -= stop - start
            end = batch.first_seq + stop
        if stop < len(items):
            break
    return end


def _reach(items: list[Item], start: int, mark: Hlc) -> int:
    """Index of the first record that is later than `mark`."""
    if items[start][:2] > mark:
        return start
    return bisect_left(items, (mark[0], mark[1] + 1), start)
