"""`hrxmp-trace diff A B`: which keys one trace compiled and the other did not, and the counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

from hrxmp.tracetool.view import RunView, Wanted, ms, title

COUNTS = ("requests", "compiles", "joins", "disk_hits", "memory_hits", "driver_compiles",
          "failures", "waits")  # fmt: skip


def diff(before: RunView, after: RunView) -> Iterator[str]:
    """The lines of the comparison; none when both asked for the same keys in equal numbers."""
    old, new = before.keys(), after.keys()
    yield from _only("-", [old[key] for key in old if key not in new])
    yield from _only("+", [new[key] for key in new if key not in old])
    yield from _counts(before, after)
    yield from _executions(before, after)


def timing(before: RunView, after: RunView) -> str:
    """One line on what both spent; it is no difference."""
    spent = [sum(one.compile_ns + one.finish_ns for one in run.compiled())
             for run in (before, after)]  # fmt: skip
    waited = [sum(wait.dur_ns for wait in run.waits) for run in (before, after)]
    both = len(before.keys().keys() & after.keys().keys())
    return (
        f"{both} keys in both; compiling {ms(spent[0])} -> {ms(spent[1])}, "
        f"waiting {ms(waited[0])} -> {ms(waited[1])}"
    )


def _only(sign: str, wanted: list[Wanted]) -> Iterator[str]:
    for one in wanted:
        kernel = title(one.asked).replace(",", ", ")  # it may be folded there
        yield f"{sign} {one.asked.key[:16]} {kernel} via {one.asked.via}"


def _counts(before: RunView, after: RunView) -> Iterator[str]:
    for name in COUNTS:
        old, new = _total(before, name), _total(after, name)
        if old != new:
            yield f"~ {name}: {old} -> {new}"


def _executions(before: RunView, after: RunView) -> Iterator[str]:
    """Executions whose counts differ, those that differ alike together."""
    alike: dict[str, list[int]] = defaultdict(list)
    for number in sorted(before.executions.keys() | after.executions.keys()):
        old, new = _row(before, number), _row(after, number)
        if old != new:
            alike[_words(old, new)].append(number)
    for words, numbers in alike.items():
        many = f" ({len(numbers)})" if len(numbers) > 2 else ""
        yield f"~ execution{'s' * (len(numbers) > 1)} {_ranges(numbers)}{many}: {words}"


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers for people: `1, 3-7`."""
    runs = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _key, group in runs)]
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ends)


def _row(run: RunView, number: int) -> dict[str, int] | None:
    execution = run.executions.get(number)
    if execution is None or execution.end is None:
        return None
    return {name: getattr(execution.end, name) for name in COUNTS if name != "waits"}


def _words(old: dict[str, int] | None, new: dict[str, int] | None) -> str:
    if old is None or new is None:
        return "only in B" if old is None else "only in A"
    return ", ".join(f"{k} {old[k]} -> {new[k]}" for k in old if old[k] != new[k])


def _total(run: RunView, name: str) -> int:
    ends = [one.end for one in run.executions.values() if one.end is not None]
    return sum(getattr(end, name) for end in ends)
