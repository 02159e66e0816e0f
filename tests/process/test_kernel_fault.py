"""A kernel that leaves its memory on a processor: how the run ends, what it says, what is traced.

On a GPU the same program is a step of `benchmarks/gpu.sh`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hrxmp.aggregator.check import check
from hrxmp.records import GraphBegin, GraphEnd, Lost, RunEnd, SanitizerFinding
from tests.process.run_process import DEVICES, PROGRAMS, Finished, hrxmp_run, usable_forms

SOUND_BEFORE = {"first": 0, "replay": 2}
"""Executions that end well before the one with the fault."""


@pytest.fixture(scope="module", params=list(DEVICES))
def device(request: pytest.FixtureRequest) -> str:
    if request.param not in usable_forms():
        pytest.skip(f"no {request.param} device works here")
    return DEVICES[request.param]


def faulty(when: str, folder: Path, device: str, **environ: str) -> Finished:
    environ = {"HRXMP_TRACE_COMPILE": "1", **environ}
    args = ("--sync-jit", PROGRAMS / "kernel_fault.py", when, folder)
    return hrxmp_run(*args, device=device, environ=environ)


@pytest.mark.parametrize("when", SOUND_BEFORE)
def test_a_fault_ends_the_run_and_is_told(device: str, tmp_path: Path, when: str) -> None:
    done = faulty(when, tmp_path, device)
    assert done.code == 128 + signal.SIGSEGV
    assert done.stdout.split() == ["last", "2.0"] * SOUND_BEFORE[when]
    (last,) = [line for line in done.said if "the executor was ended by" in line]
    assert "signal 11 (SIGSEGV)" in last and "--sanitizer access" in last


@pytest.mark.parametrize("when", SOUND_BEFORE)
def test_the_trace_of_a_fault_is_whole(device: str, tmp_path: Path, when: str) -> None:
    """What was acknowledged stands; what was begun is closed for the dead; run-end says the signal.

    The fault's own graph-begin may have died with the executor.
    """
    done = faulty(when, tmp_path, device)
    assert check(done.trace).problems == []
    begun = [record.exec_id for record in done.records(GraphBegin)]
    ends = done.records(GraphEnd)
    assert [end.exec_id for end in ends] == begun
    sound = SOUND_BEFORE[when]
    assert [end.outcome for end in ends] == ["ok"] * sound + ["lost"] * (len(begun) - sound)
    assert sound <= len(begun) <= sound + 1
    (lost,) = done.records(Lost)
    assert lost.of == "executor" and "gone without goodbye" in lost.reason
    (end,) = done.records(RunEnd)
    assert (end.source, end.status) == ("launcher", "signal 11")


@pytest.mark.parametrize("when", SOUND_BEFORE)
def test_the_sanitizer_names_what_faults(device: str, tmp_path: Path, when: str) -> None:
    """The same program does not die: the bad read is kept from happening, and named."""
    done = faulty(when, tmp_path, device, HRXMP_SANITIZER="access")
    assert done.code == 1
    assert any("error [sanitizer]" in line and "unary(OP=scale)" in line for line in done.said)
    first, *_ = done.records(SanitizerFinding)
    assert (first.exec_id, first.binding, first.check) == (SOUND_BEFORE[when] + 1, "x", "access")
    assert first.index >= 1 << 44 and first.count == 1000
    assert check(done.trace).problems == []


@pytest.mark.parametrize("when", SOUND_BEFORE)
def test_a_lost_device_is_told_at_any_call(device: str, when: str) -> None:
    """The driver refuses to copy the inputs, long before outputs are read; then all is refused."""
    program = PROGRAMS / "lost_device.py"
    done = hrxmp_run("--trace", "--sync-jit", program, when, device=device)
    assert done.code == 1
    assert "the device failed while it ran graph program 1, holding x 0.0 MB" in done.stdout
    assert "INVALID_CONTEXT" in done.stdout
    (told,) = [line for line in done.said if "error [" in line]
    assert "[device-fault]: this executor's device failed before" in told
    ends = done.records(GraphEnd)
    assert [end.outcome for end in ends] == ["ok"] * SOUND_BEFORE[when] + ["failed"]
    assert ends[-1].error is not None and ends[-1].error.code == "device-fault"
    assert [end.status for end in done.records(RunEnd)] == ["failed: device-fault"]
    assert check(done.trace).problems == []
