"""A pool as a daemon that several runs share, and what lies around it on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hrxmp import records
from hrxmp.executor import compile_client
from hrxmp.kernels.store import Store
from tests.process.pool_fixture import PATIENCE_S, make_request, outcome, running_pool
from tests.process.run_process import PROGRAMS, ROOT, Finished, hrxmp_run

CASES = PROGRAMS / "backend_cases.py"


def test_runs_of_several_processes_share_one_pool() -> None:
    """Equal keys are compiled once for all of them, and each trace has its own run only."""
    with running_pool(compiler="", trace_compile=True) as pool:

        def run(_number: int) -> Finished:
            options = ("--trace", "--pool", pool.endpoint)
            return hrxmp_run(*options, CASES, "add_f32", "scale_f32", cache=pool.settings.cache)

        with ThreadPoolExecutor(3) as threads:
            runs = list(threads.map(run, range(3)))
        assert [r.code for r in runs] == [0, 0, 0], runs[0].stderr[-2000:]
        asked = [r.records(records.CompileRequested) for r in runs]
        keys = {record.key for found in asked for record in found}
        via = Counter(record.via for found in asked for record in found)
        begun = sum(len(r.records(records.CompileBegin)) for r in runs)
        assert via["compile"] == begun == len(keys)
        for r in runs:
            assert len({line.record.run_id for line in r.trace.lines}) == 1
            sources = {line.record.source for line in r.trace.lines}
            assert sources <= {"executor", "pool", "launcher", "aggregator"}
        pool.until(lambda reply: reply.runs == ())


def test_a_broken_driver_stops_neither_the_pool_nor_its_status(tmp_path: Path) -> None:
    """The pool starts and serves where pyopencl and numpy cannot be imported; so do workers with
    a compiler that needs neither."""
    for name in ("pyopencl", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = (
        "import sys\n"
        "import hrxmp.workers.main, hrxmp.workers.worker, hrxmp.aggregator.main\n"
        "assert not {'pyopencl', 'numpy', 'gguf'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with running_pool(compiler="") as pool:
            client = pool.client()
            found = outcome(client.request(make_request(n=1), 1))
            assert (found.outcome, found.compiler_started) == ("setup", False)
            assert "pyopencl" in found.error.message
            assert pool.status()[0].role == "pool"
            client.close()


def test_a_driver_that_kills_who_tries_it_keeps_no_job_from_its_worker(tmp_path: Path) -> None:
    """Workers that were started before anybody asked die while they try the device: the executor
    is told that none has, and its job gets a worker that does not try."""
    (tmp_path / "pyopencl.py").write_text(
        "import os, sys\n"
        "if '--try-device' in sys.argv: os.abort()\n"
        "raise ImportError('no pyopencl here')\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setattr(compile_client, "_HEARD_S", PATIENCE_S)
        with running_pool(compiler="", flags=("--expects-compiles",)) as pool:
            client = pool.client()
            assert not client.tried("any device", PATIENCE_S)
            found = outcome(client.request(make_request(n=1), 1))
            assert (found.outcome, found.compiler_started) == ("setup", False)
            assert "no pyopencl here" in found.error.message
            client.close()


def test_workers_start_unasked_where_compiles_are_expected_and_the_store_is_empty() -> None:
    with running_pool(flags=("--expects-compiles",)) as pool:
        assert len(pool.status()[0].workers) == 2
        client = pool.client()
        assert outcome(client.request(make_request(n=1), 1)).error is None
        assert pool.status()[0].totals["compiles"] == 1
        client.close()
        pool.stop()
        kept = make_request(n=1)
        assert Store(Path(pool.settings.cache)).put(kept.key, kept.components, b"b", "fake") == ""
        pool.start()
        assert pool.status()[0].workers == ()


def test_x20_a_stale_lock_in_pyopencls_cache_is_not_even_looked_at(tmp_path: Path) -> None:
    locks = []
    for name in ("pyopencl-compiler-cache-v2-py3", "pyopencl-invoker-cache-v41-nano"):
        for parent in ("pyopencl", "pytools/pdict-v5-" + name):
            folder = tmp_path / parent / name
            folder.mkdir(parents=True)
            (folder / "lock").write_text("")
            locks.append(folder / "lock")
    done = hrxmp_run(CASES, "add_f32", environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.code == 0
    assert done.said == []
    assert all(lock.exists() for lock in locks)
    assert not any(path.suffix == ".bin" for path in tmp_path.rglob("*"))


def test_a_pool_on_an_endpoint_that_is_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "hrxmp", "workers", "--bind", f"ipc://{tmp_path}/file"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 2
    assert "exists and is not a socket" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_a_second_pool_does_not_take_the_address_of_a_living_one() -> None:
    with running_pool() as pool:
        done = subprocess.run(
            [sys.executable, "-m", "hrxmp", "workers", "--bind", pool.endpoint],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=150,
        )  # fmt: skip
        assert done.returncode == 2
        assert "served by another process" in done.stderr
        client = pool.client()
        assert outcome(client.request(make_request(n=1), 1)).error is None
        client.close()
