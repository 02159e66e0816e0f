"""The arena plan: which intermediate values share memory, by the commands that use them.

Pure: numbers in, numbers out. Commands run in order, so memory whose last reader has been
enqueued can be written by a later command.
"""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, kw_only=True):
    """An intermediate value: its bytes, and the first and last command that touch it."""

    nbytes: int
    first: int = -1
    last: int = -1


class ArenaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`slot_of[value]` and the bytes of each slot."""

    slot_of: tuple[int, ...]
    slot_bytes: tuple[int, ...]


def plan(values: list[Value]) -> ArenaPlan:
    """Give each value a slot, the best fitting free one or a new one.

    A slot may grow to the largest value that it ever holds. Values that no command touches get no
    slot (-1).
    """
    slots: list[int] = []
    busy_until: list[int] = []
    slot_of = [-1] * len(values)
    for index in sorted(range(len(values)), key=lambda i: values[i].first):
        value = values[index]
        if value.first < 0:
            continue
        free = [s for s, until in enumerate(busy_until) if until < value.first]
        chosen = min(free, key=lambda s: _misfit(slots[s], value.nbytes), default=-1)
        if chosen < 0:
            chosen = len(slots)
            slots.append(0)
            busy_until.append(0)
        slots[chosen] = max(slots[chosen], value.nbytes)
        busy_until[chosen] = value.last
        slot_of[index] = chosen
    return ArenaPlan(slot_of=tuple(slot_of), slot_bytes=tuple(slots))


def _misfit(slot: int, wanted: int) -> tuple[bool, int]:
    """Slots that are large enough first, the tightest of them first."""
    return slot < wanted, abs(slot - wanted)
