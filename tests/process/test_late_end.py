"""An execution that fails while something that it asked for is being compiled, on a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrxmp.aggregator.check import check
from hrxmp.records import CompileBegin, CompileEnd, CompileRequested, GraphEnd, WaitEnd
from tests.process.pool_fixture import running_pool
from tests.process.run_process import PROGRAMS, hrxmp_run

COMPILER = "tests.process.programs.late_compiler:compile"


def test_what_a_failed_execution_asked_for_is_ended_with_it_and_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Execution 1 asks for two kernels, fails on one and withdraws the other, which goes on;
    execution 2 joins it."""
    monkeypatch.setenv("HRXMP_TEST_FOLDER", str(tmp_path))
    with running_pool(compiler=COMPILER, cache="off", trace_compile=True) as pool:
        script = PROGRAMS / "late_end.py"
        done = hrxmp_run("--trace", "--pool", pool.endpoint, script, tmp_path)
    assert (done.code, done.stdout.strip()) == (0, "right"), done.said
    assert check(done.trace).problems == []
    asked, joined = (r for r in done.records(CompileRequested) if r.kernel.startswith("unary"))
    assert (asked.exec_id, asked.prefetch, asked.via) == (1, False, "compile")
    assert (joined.exec_id, joined.via, joined.key) == (2, "in_flight", asked.key)
    (begin,) = [r for r in done.records(CompileBegin) if r.request == asked.request]
    (end,) = [r for r in done.records(CompileEnd) if r.request == asked.request]
    assert (begin.exec_id, end.exec_id, end.outcome) == (1, 1, "cancelled")
    failed, good = done.records(GraphEnd)
    assert (failed.exec_id, failed.outcome, failed.compiles, failed.failures) == (1, "failed", 2, 1)
    assert (good.exec_id, good.outcome, good.compiles, good.joins) == (2, "ok", 0, 1)
    waits = [w for w in done.records(WaitEnd) if w.request == joined.request]
    assert [(wait.exec_id, wait.asked_by, wait.outcome) for wait in waits] == [(2, 2, "ok")]
