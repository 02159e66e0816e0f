"""The sanitizer on real runs: planted faults are caught and named, good kernels are clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hrxmp.records import CompileRequested, GraphEnd, SanitizerFinding
from tests.model_files import write_tiny
from tests.process.run_process import DEVICES, PROGRAMS, Finished, hrxmp_run, usable_forms

FOUND = {"read": ("x", "access", 7), "write": ("y", "access", 3), "nan": ("y", "value", 1)}
"""Binding, check and count of each fault in each of the two commands."""


@pytest.fixture(scope="module", params=list(DEVICES))
def device(request: pytest.FixtureRequest) -> str:
    if request.param not in usable_forms():
        pytest.skip(f"no {request.param} device works here")
    return DEVICES[request.param]


def planted(fault: str, folder: Path, device: str, **environ: str) -> Finished:
    environ = {"HRXMP_TRACE_COMPILE": "1", "HRXMP_SANITIZER": "all", **environ}
    args = ("--sync-jit", str(PROGRAMS / "planted.py"), fault, str(folder))
    return hrxmp_run(*args, device=device, environ=environ)


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_reported(device: str, tmp_path: Path, fault: str) -> None:
    done = planted(fault, tmp_path, device, HRXMP_SANITIZER_REPORTING="report-only")
    assert done.code == 0, done.said
    binding, check, count = FOUND[fault]
    key = done.records(CompileRequested)[0].key
    for command, finding in enumerate(done.records(SanitizerFinding)):
        assert (finding.kernel, finding.key, finding.exec_id) == ("unary", key, 1)
        assert (finding.command, finding.binding, finding.check) == (command, binding, check)
        assert finding.count == count
        expected = {"read": range(1000, 1007), "write": range(-3, 0), "nan": (12,)}
        assert finding.index in expected[fault]
    assert len(done.records(SanitizerFinding)) == 2
    lines = [line for line in done.said if "sanitizer" in line]
    assert len(lines) == 2 and f"{binding!r}" in lines[0] and "unary(OP=scale)" in lines[0]


def test_a_finding_traps(device: str, tmp_path: Path) -> None:
    done = planted("write", tmp_path, device)
    assert done.code == 1 and "last" not in done.stdout
    assert any("error [sanitizer]" in line and "unary(" in line for line in done.said)
    (end,) = done.records(GraphEnd)
    assert end.outcome == "failed" and end.error is not None and end.error.code == "sanitizer"
    assert len(done.records(SanitizerFinding)) == 2


def test_only_what_was_asked_for_is_checked(device: str, tmp_path: Path) -> None:
    done = planted("nan", tmp_path, device, HRXMP_SANITIZER="access")
    assert done.code == 0 and done.records(SanitizerFinding) == []
    off = planted("nan", tmp_path / "off", device, HRXMP_SANITIZER="")
    assert off.code == 0 and off.records(SanitizerFinding) == []
    keys = [run.records(CompileRequested)[0].key for run in (done, off)]
    assert keys[0] != keys[1]  # a part of the key


def test_every_kernel_of_a_model_is_clean_and_right(device: str, tmp_path: Path) -> None:
    """Prefill and decode with all checks give the same tokens, and nothing is found."""
    model = write_tiny(tmp_path / "tiny.gguf")
    args = ["generate", "-m", model, "-p", "some words to begin with", "-n", "4"]
    args += ["--temp", "0", "--ids", "--ignore-eos"]
    plain = hrxmp_run(*args, device=device)
    checked = hrxmp_run(
        *args, device=device, environ={"HRXMP_SANITIZER": "all", "HRXMP_TRACE_COMPILE": "1"}
    )
    assert plain.code == 0 and checked.code == 0, checked.said[-5:]
    assert json.loads(plain.stdout) == json.loads(checked.stdout)
    assert checked.records(SanitizerFinding) == []
