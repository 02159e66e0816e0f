"""Tracing off is free: nothing of it is touched, not even a clock. And the poison does work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model_files import write_tiny
from tests.process.run_process import PROGRAMS, hrxmp_run

PROGRAM = PROGRAMS / "poisoned.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("off") / "tiny.gguf")


@pytest.mark.parametrize("jit", ["--sync-jit", ""])
def test_a_whole_bench_touches_nothing_of_the_trace(model: Path, jit: str) -> None:
    flags = [jit] if jit else []
    done = hrxmp_run(*flags, PROGRAM, model, *flags)
    assert done.code == 0, done.stderr[-3000:]
    (row,) = json.loads(done.stdout)
    assert row["compiles"] > 5 and len(row["samples_ns"]) == 2
    assert done.stderr == ""


@pytest.mark.parametrize("jit", ["--sync-jit", ""])
def test_the_poison_works(model: Path, jit: str) -> None:
    """The same program with tracing on meets it at once: the test above can fail."""
    flags = [jit] if jit else []
    done = hrxmp_run("--trace", *flags, PROGRAM, model, *flags)
    assert done.code != 0 and "Poisoned" in done.stderr
