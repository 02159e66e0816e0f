"""The checker finds each kind of lie. Every test takes a right trace and breaks one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hrxmp import records
from hrxmp.aggregator.check import Report, check
from hrxmp.aggregator.reader import read
from hrxmp.records import OPENING

NAMES = {"request": 1, "kernel": "k(K=1) local 1"}
COUNTS = dict.fromkeys(
    ("joins", "disk_hits", "memory_hits", "driver_compiles", "failures", "program"), 0
) | {"requests": 1, "compiles": 1, "waits": 1, "wait_ns": 7, "dur_ns": 9}
WORK = {"worker": "worker-1", "attempt": 1}
Columns = dict[str, Any]


def right() -> list[Columns]:
    """The records of a run with one execution that compiles one kernel and waits for it."""
    made: list[tuple[str, type[records.Record], int | None, Columns]] = [
        ("executor", records.GraphBegin, 5, {"uid": 1, "nodes": 2}),
        ("executor", records.CompileRequested, 5, NAMES | {
            "key": "aa", "params": {}, "local_size": [1], "via": "compile", "why": "first_use",
            "near": "", "differs": [], "prefetch": False}),
        ("executor", records.WaitBegin, 5, NAMES | {"asked_by": 5}),
        ("pool", records.CompileBegin, 5, NAMES | WORK | {"queue_ns": 1}),
        ("pool", records.CompileEnd, 5, NAMES | WORK | {
            "compiler_started": True, "outcome": "ok", "compile_ns": 3, "finish_ns": 2,
            "binary_bytes": 10, "log": "", "log_path": "", "error": None}),
        ("executor", records.WaitEnd, 5, NAMES | {"asked_by": 5, "dur_ns": 7, "outcome": "ok"}),
        ("executor", records.GraphEnd, 5, COUNTS | {
            "uid": 1, "outcome": "ok", "error": None, "program_hit": False,
            "prepared_hit": False, "replayed": False}),
        ("executor", records.RunEnd, None, {
            "status": "ok", "executions": 1, "totals": {"requests": 1, "wait_ns": 7}}),
    ]  # fmt: skip
    numbers = {"executor": 0, "pool": 0}
    columns = []
    for time, (source, kind, exec_id, fields) in enumerate(made):
        record = kind(
            run_id="r", source=source, incarnation=1, seq=numbers[source], t_ns=time,
            exec_id=exec_id, **fields,
        )  # fmt: skip
        numbers[source] += 1
        columns.append(msgspec.to_builtins(record))
    return columns


def checked(columns: list[Columns]) -> Report:
    """Write the lines as the aggregator does, among other output, and check them."""
    lines = [OPENING + msgspec.json.encode(one)[1:] + b"\n" for one in columns]
    lines.insert(1, b"warning: something else writes here\n")
    lines[0] = b"progress 10%\r" + lines[0]
    return check(read(lines))


def test_a_right_trace_is_right() -> None:
    report = checked(right())
    assert report.problems == []
    assert report.notes == []
    assert (report.records, report.executions, report.requests, report.waits) == (8, 1, 1, 1)
    assert report.other == 1


def lose(index: int) -> Callable[[list[Columns]], None]:
    def change(columns: list[Columns]) -> None:
        gone = columns.pop(index)
        for one in columns[index:]:
            if one["source"] == gone["source"]:
                one["seq"] -= 1

    return change


def put(index: int, **values: Any) -> Callable[[list[Columns]], None]:
    return lambda columns: columns[index].update(values)


def swap(first: int, second: int) -> Callable[[list[Columns]], None]:
    def change(columns: list[Columns]) -> None:
        columns[first], columns[second] = columns[second], columns[first]

    return change


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda columns: columns.pop(2), "gap"),
        (lose(0), "missing"),
        (lose(1), "missing"),
        (lose(3), "missing"),
        (lose(4), "missing"),
        (lose(5), "missing"),
        (lose(6), "missing"),
        (lambda columns: (lose(4)(columns), lose(3)(columns)), "lost"),
        (put(6, requests=2), "count"),
        (put(6, compiles=0, joins=1), "count"),
        (put(6, waits=0), "count"),
        (put(6, wait_ns=8), "count"),
        (put(6, driver_compiles=1), "count"),
        (put(7, executions=2), "total"),
        (put(7, totals={"requests": 3}), "total"),
        (put(2, asked_by=4), "attribution"),
        (put(4, exec=4), "attribution"),
        (put(5, t_ns=1), "time"),
        (swap(3, 4), "order"),
        (swap(4, 5), "order"),
        (lambda columns: columns.append(dict(columns[3], seq=2)), "missing"),
        (lambda columns: columns.insert(4, dict(columns[3], seq=1)), "twice"),
        (lambda columns: columns.append(dict(columns[3], kernel="x")), "repeat"),
    ],
)
def test_each_lie_is_found(change: Callable[[list[Columns]], Any], kind: str) -> None:
    columns = right()
    change(columns)
    found = {problem.kind for problem in checked(columns).problems}
    assert kind in found, found


def test_a_repeat_with_equal_bytes_is_no_problem() -> None:
    columns = right()
    columns.append(columns[3])
    report = checked(columns)
    assert report.problems == []
    assert report.repeats == 1


def test_a_torn_run_is_noted_and_not_blamed() -> None:
    columns = right()[:4]
    lost = records.Lost(
        run_id="r", source="aggregator", incarnation=9, seq=0, t_ns=99, exec_id=None,
        of="executor", first=3, last=-1, reason="gone without goodbye",
    )  # fmt: skip
    report = checked([*columns, msgspec.to_builtins(lost)])
    assert report.problems == []
    assert {note.kind for note in report.notes} == {"torn", "missing"}


def test_known_losses_are_problems() -> None:
    columns = right()
    columns.pop(2)
    lost = records.Lost(
        run_id="r", source="executor", incarnation=1, seq=6, t_ns=99, exec_id=None,
        of="executor", first=2, last=2, reason="full",
    )  # fmt: skip
    report = checked([*columns, msgspec.to_builtins(lost)])
    kinds = {problem.kind for problem in report.problems}
    assert "lost" in kinds
    assert "gap" not in kinds


@pytest.mark.parametrize(
    "line",
    [
        OPENING + b'"event":"graph-begin","run":"r"\n',
        OPENING + b"\n",
        OPENING + b'"event":"no-such-event","run":"r"}\n',
        OPENING + b'"event":"annotation","run":1}\n',
    ],
)
def test_a_broken_line_is_a_problem_and_no_exception(line: bytes) -> None:
    (problem,) = read([line]).problems
    assert problem.kind == "parse"
