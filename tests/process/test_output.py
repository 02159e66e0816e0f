"""What stands on standard output, whatever else a run says: results only, whole rows, at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hrxmp.records import CompileBegin, CompileRequested, KernelLoad
from tests.model_files import write_tiny
from tests.process.run_process import ROOT, hrxmp_run

TRACED = {"HRXMP_TRACE_COMPILE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("output") / "tiny.gguf")


def test_json_rows_stand_alone_on_stdout(model: Path, tmp_path: Path) -> None:
    """X41: with tracing and progress on, stdout is one JSON array with our columns in each row."""
    args = ("bench", "-m", model, "-p", "8", "-n", "2", "-r", "2", "-o", "json", "--progress")
    done = hrxmp_run(*args, "--no-warmup", cache=tmp_path / "store", environ=TRACED)
    rows = json.loads(done.stdout)
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(8, 0), (0, 2)]
    for row in rows:
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        assert {"compiles", "wait_ms", "cache_state"} <= row.keys()
    assert rows[0]["compiles"] > 0 and rows[0]["cache_state"] == "cold"
    assert done.trace.lines and any("hrxmp bench" in line for line in done.said)


def test_rows_are_written_as_they_come(model: Path, tmp_path: Path) -> None:
    """X42: killed after two of five tests, the file has two whole rows."""
    rows = tmp_path / "rows"
    command = [sys.executable, "-m", "hrxmp", "run", "--cache", str(tmp_path / "store"), "bench"]
    command += ["-m", str(model), "-p", "4,5,6,7,8", "-n", "0", "-r", "1", "-o", "jsonl"]
    command += ["--progress"]
    with rows.open("wb") as out:
        run = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=out,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    assert run.stderr is not None
    for line in run.stderr:
        if b"test 3/5" in line and b"run 1" in line:  # two tests are over
            break
    run.kill()
    run.stderr.close()
    run.wait(60)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["n_prompt"] for row in found][:2] == [4, 5]
    assert rows.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("args", [["--help"], ["bench", "--help"], ["devices"], ["status"]])
def test_help_and_lists_compile_nothing(args: list[str], tmp_path: Path) -> None:
    """X43."""
    environ = {**TRACED, "HRXMP_RUNTIME_DIR": str(tmp_path)}
    done = hrxmp_run(*args, cache=tmp_path / "store", environ=environ)
    assert done.code == 0 and done.stdout
    kinds = (CompileRequested, CompileBegin, KernelLoad)
    assert not any(isinstance(line.record, kinds) for line in done.trace.lines)
    assert not (tmp_path / "store").exists()


def test_a_wrong_flag_starts_nothing(tmp_path: Path) -> None:
    done = hrxmp_run("bench", "--no-such-flag", cache=tmp_path / "store", environ=TRACED)
    assert done.code == 2 and not done.trace.lines and "no-such-flag" in done.stderr
