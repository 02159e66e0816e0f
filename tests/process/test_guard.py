"""The guard, storms and compiles of the driver, on real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hrxmp.aggregator.check import check
from hrxmp.records import CompileBegin, GraphEnd, Guard, KernelLoad, RunEnd, Storm
from tests.process.run_process import (
    DEVICES,
    FORBIDDEN,
    PROGRAMS,
    Finished,
    hrxmp_run,
    usable_forms,
)

PROGRAM = PROGRAMS / "guard_cases.py"
SLOW_NS = 300_000_000


@pytest.fixture(scope="module", params=list(DEVICES))
def device(request: pytest.FixtureRequest) -> str:
    if request.param not in usable_forms():
        pytest.skip(f"no {request.param} device works here")
    return DEVICES[request.param]


def traced(device: str, *args: str, cache: Path | str = "off", **environ: str) -> Finished:
    environ = {"HRXMP_TRACE_COMPILE": "1", **environ}
    return hrxmp_run(*args, cache=cache, device=device, environ=environ)


def test_the_api_forbids_compiles(device: str) -> None:
    done = traced(device, "--on-compile", "error", str(PROGRAM), "api")
    assert done.code == 0, done.said
    told = json.loads(done.stdout)
    assert told["replayed"] and told["after"] and told["warm"] == "refused"
    assert "rms_norm(" in told["inside"] and "nearest known key" in told["inside"]
    assert "params.K 64 -> 96" in told["inside"]
    assert [r.action for r in done.records(Guard)] == ["error", "error"]
    assert check(done.trace).problems == []


def test_warm_after_a_number_of_executions(device: str) -> None:
    """The third execution is the first that may not compile."""
    done = traced(
        device, "--on-compile", "error", "--warm-after", "2", str(PROGRAM), "changing", "4"
    )
    assert done.code == FORBIDDEN
    assert [end.outcome for end in done.records(GraphEnd)] == ["ok", "ok", "failed"]
    (guard,) = done.records(Guard)
    assert (guard.exec_id, guard.kernel, guard.why) == (3, "rms_norm", "differs")
    assert [(d.component, d.before, d.after) for d in guard.differs] == [("params.K", "64", "96")]
    assert any("compile-forbidden" in line and guard.key[:16] in line for line in done.said)
    assert len(done.records(CompileBegin)) == 2
    assert done.records(RunEnd)[0].status == "failed: compile-forbidden"


def test_warn_says_one_line_a_graph(device: str) -> None:
    done = traced(
        device, "--on-compile", "warn", "--warm-after", "1", str(PROGRAM), "changing", "4"
    )
    assert done.code == 0
    lines = [line for line in done.said if "after warm-up" in line]
    assert len(lines) == len(done.records(Guard)) == 3
    assert [guard.exec_id for guard in done.records(Guard)] == [2, 3, 4]
    assert all("nearest known key" in line for line in lines)


def test_a_storm_is_one_record(device: str) -> None:
    done = traced(device, str(PROGRAM), "changing", "9", HRXMP_STORM_KEYS="4", HRXMP_STORM_S="1000")
    assert done.code == 0
    (storm,) = done.records(Storm)
    assert (storm.kernel, storm.component, storm.count) == ("rms_norm", "params.K", 8)
    few = traced(device, str(PROGRAM), "changing", "4", HRXMP_STORM_KEYS="4", HRXMP_STORM_S="1000")
    assert few.records(Storm) == []


@pytest.mark.parametrize("where", ["load", "dry_launch"])
def test_a_compile_of_the_driver_is_seen(device: str, where: str, tmp_path: Path) -> None:
    """X27: with a warm store, the phase with its time, the count, and the guard."""
    store = tmp_path / "store"
    assert traced(device, str(PROGRAM), "changing", "1", cache=store).code == 0
    done = traced(device, str(PROGRAM), "slow", where, cache=store)
    assert done.code == 0
    (load,) = done.records(KernelLoad)
    times = {"load": load.load_ns, "dry_launch": load.launch_ns}
    assert load.driver_compiled and times[where] >= SLOW_NS
    (end,) = done.records(GraphEnd)
    assert (end.driver_compiles, end.compiles, end.disk_hits) == (1, 0, 1)
    assert check(done.trace).problems == []
    forbidden = traced(device, "--on-compile", "error", str(PROGRAM), "slow", where, cache=store)
    assert forbidden.code == FORBIDDEN
    assert [guard.why for guard in forbidden.records(Guard)] == ["driver-compiled"]
    assert any("driver" in line and "compile-forbidden" in line for line in forbidden.said)


def test_a_warm_first_launch_compiles_nothing(device: str, tmp_path: Path) -> None:
    """The executor's load and first launch of stored kernels take no compile on these devices."""
    store = tmp_path / "store"
    assert traced(device, str(PROGRAM), "changing", "3", cache=store).code == 0
    done = traced(device, str(PROGRAM), "changing", "3", cache=store)
    loads = done.records(KernelLoad)
    assert len(loads) == 3 and not any(load.driver_compiled for load in loads)
    assert not done.records(CompileBegin)
