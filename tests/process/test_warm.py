"""Warm-up on real runs: then nothing compiles, and what a missing entry or another key says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hrxmp import records
from hrxmp.aggregator.check import check
from hrxmp.records import CompileRequested, RunBegin
from hrxmp.workloads.needed import components
from tests.model_files import smollm2, write_tiny
from tests.process.run_process import DEVICES, FORBIDDEN, Finished, hrxmp_run, usable_forms

FORBID = {"HRXMP_ON_COMPILE": "error", "HRXMP_TRACE_COMPILE": "1"}
MIXED = ["-p", "1,2,5,9,64,100", "-n", "3", "-ub", "64", "-r", "1", "--no-warmup", "-o", "json"]


class Warmed:
    """A store that `warm` filled for one device."""

    def __init__(self, folder: Path, model: Path, device: str) -> None:
        self.folder, self.model, self.device = folder, model, device
        self.store = folder / "store"
        self.done = self.warm("-m", model, cache=self.store)

    def warm(self, *args: str | Path, cache: Path) -> Finished:
        args = ("--trace", "warm", "-ub", "64", "-o", "json", *args)
        return hrxmp_run(*args, cache=cache, device=self.device)

    def bench(self, *args: str, cache: Path | None = None, **environ: str) -> Finished:
        return hrxmp_run(
            "bench", "-m", self.model, *(args or MIXED),
            cache=cache or self.store, device=self.device, environ={**FORBID, **environ},
        )  # fmt: skip


@pytest.fixture(scope="module", params=list(DEVICES))
def warmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    if request.param not in usable_forms():
        pytest.skip(f"no {request.param} device works here")
    folder = tmp_path_factory.mktemp("warm")
    return Warmed(folder, write_tiny(folder / "tiny.gguf"), DEVICES[request.param])


def test_warm_compiles_everything_and_proves_it(warmed: Warmed) -> None:
    done = warmed.done
    assert done.code == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert summary["compiled"] == summary["kernels"] == summary["verified"] > 10
    assert summary["ok"] and not (summary["failed"] or summary["missing"])
    assert check(done.trace).problems == []
    again = json.loads(warmed.warm("-m", warmed.model, cache=warmed.store).stdout)
    assert (again["compiled"], again["stored"]) == (0, summary["kernels"])


def test_a_bench_asks_ahead_and_starts_no_worker_for_a_full_store(
    warmed: Warmed, tmp_path: Path
) -> None:
    args = ("--trace", "bench", "-m", warmed.model, "-pg", "5,3", "-p", "0", "-n", "0", "-r", "1")
    for cache_state in ("cold", "warm"):
        flags = (*args, "--no-warmup", "-o", "json")
        done = hrxmp_run(*flags, cache=tmp_path / "store", device=warmed.device)
        assert done.code == 0, done.said
        (row,) = json.loads(done.stdout)
        first, cold = done.records(records.GraphEnd)[0], cache_state == "cold"
        assert (row["cache_state"], row["compiles"] > 0) == (cache_state, cold)
        assert first.compiles == 0, "what it needs was asked for before, or is there"
        asked = done.records(CompileRequested)
        ahead = {r.key for r in asked if r.prefetch}
        own = {r.key for r in asked if r.exec_id == first.exec_id}
        assert len(own) == first.requests and own <= ahead
        started = done.records(records.WorkerStart), done.records(records.CompileBegin)
        assert [bool(found) for found in started] == [cold, cold]


def test_any_prompt_length_runs_under_error(warmed: Warmed) -> None:
    """X28: from the first execution on, prefill and decode compile nothing."""
    done = warmed.bench("-p", "1,2,5,9,64,100", *MIXED[2:], HRXMP_WARM_AFTER="0")
    assert done.code == 0, done.said
    ends = done.records(records.GraphEnd)
    assert len(ends) > 9
    assert {(e.compiles, e.joins, e.driver_compiles, e.failures, e.waits) for e in ends} == {
        (0, 0, 0, 0, 0)
    }
    assert sum(e.disk_hits for e in ends) == sum(e.requests for e in ends) > 10
    assert not done.records(records.CompileBegin)
    assert {row["cache_state"] for row in json.loads(done.stdout)} == {"warm"}


def test_generate_is_guarded_from_its_first_execution(warmed: Warmed) -> None:
    args = ("generate", "-m", warmed.model, "-p", "abc", "-n", "4", "--temp", "0", "--ids")
    args += ("-ub", "64", "--ignore-eos")
    done = hrxmp_run(*args, cache=warmed.store, device=warmed.device, environ=FORBID)
    assert done.code == 0, done.said
    assert not done.records(records.CompileBegin) and len(json.loads(done.stdout)) == 4
    cold = hrxmp_run(*args, cache=warmed.folder / "empty", device=warmed.device, environ=FORBID)
    assert cold.code == FORBIDDEN
    assert any("compile-forbidden" in line and "first use" in line for line in cold.said)


def test_a_missing_entry_is_named(warmed: Warmed) -> None:
    """X29: under `error` the run fails and says key, nearest key and difference; `warn` goes on."""
    asked = [r for r in warmed.done.records(CompileRequested) if r.via == "compile"]
    products = Counter(r.kernel for r in asked if r.kernel.startswith("mul_mat_"))
    del products["mul_mat_vec"]  # decode's; prefill has tiles of one form or the other
    gone = next(r for r in asked if r.kernel == products.most_common(1)[0][0])
    entry = warmed.store / f"{gone.key}.hrxk"
    kept = entry.read_bytes()
    entry.unlink()
    try:
        failed = warmed.bench("-p", "64", *MIXED[2:])
        assert failed.code == FORBIDDEN
        (record,) = failed.records(records.Guard)
        assert (record.key, record.action, record.why) == (gone.key, "error", "differs")
        assert record.near and all(d.component.startswith("params.") for d in record.differs)
        assert any(record.key[:16] in line and record.near[:16] in line for line in failed.said)
        assert failed.records(records.GraphEnd)[-1].outcome == "failed"
        assert not failed.records(records.CompileBegin) and not entry.exists()
        warned = warmed.bench("-p", "64", *MIXED[2:], HRXMP_ON_COMPILE="warn")
        assert warned.code == 0
        lines = [line for line in warned.said if "after warm-up" in line]
        assert len(lines) == 1 and gone.key[:16] in lines[0]
        assert [r.key for r in warned.records(records.Guard)] == [gone.key]
        assert entry.exists()  # compiled anew
    finally:
        entry.write_bytes(kept)
        entry.chmod(0o600)


def test_a_trace_is_a_warm_up_list(warmed: Warmed, tmp_path: Path) -> None:
    """X31: what a traced run needed is compiled into an empty store; the same run compiles none."""
    first = warmed.bench(cache=tmp_path / "first", HRXMP_ON_COMPILE="off")
    assert first.code == 0 and first.records(records.CompileBegin)
    trace = tmp_path / "trace"
    trace.write_text("other output\n" + first.stderr)
    done = warmed.warm("--from-trace", trace, cache=tmp_path / "second")
    summary = json.loads(done.stdout)
    assert done.code == 0 and summary["ok"]
    keys = {r.key for r in first.records(CompileRequested)}
    assert summary["compiled"] == summary["kernels"] == len(keys)
    again = warmed.bench(cache=tmp_path / "second")
    assert again.code == 0, again.said
    assert not again.records(records.CompileBegin)
    assert {r.key for r in again.records(CompileRequested)} == keys


def test_keys_of_another_world_are_refused(warmed: Warmed, tmp_path: Path) -> None:
    """A key that this driver cannot make is refused and the component named; the rest is done."""
    asked = [line for line in warmed.done.trace.lines if isinstance(line.record, CompileRequested)]
    (begin,) = [line for line in warmed.done.trace.lines if isinstance(line.record, RunBegin)]
    foreign, record = json.loads(begin.raw), asked[0].record
    foreign["run"], foreign["components"]["driver"] = "another", "an older one"
    request = json.loads(asked[0].raw) | {"run": "another"}
    made = components(record, foreign["components"])
    assert made is not None
    request["key"] = made.digest()
    texts = [json.dumps(line, separators=(",", ":")).encode() for line in (foreign, request)]
    (tmp_path / "trace").write_bytes(b"\n".join([begin.raw, asked[1].raw, *texts]))
    done = warmed.warm("--from-trace", tmp_path / "trace", cache=tmp_path / "store")
    summary = json.loads(done.stdout)
    assert done.code == 1 and not summary["ok"]
    assert summary["kernels"] == summary["compiled"] == summary["verified"] == 1
    (text,) = summary["refused"]
    assert "driver was 'an older one', is " in text and ";" not in text


def test_bad_command_lines_are_refused(tmp_path: Path) -> None:
    neither = hrxmp_run("warm", cache=tmp_path / "store")
    assert neither.code == 2 and "-m MODEL" in neither.stderr
    absent = hrxmp_run("warm", "--from-trace", tmp_path / "absent", cache=tmp_path / "store")
    assert absent.code == 2 and "cannot be read" in absent.stderr
    empty = tmp_path / "empty"
    empty.write_text("nothing of ours\n")
    none = hrxmp_run("warm", "--from-trace", empty, cache=tmp_path / "store")
    assert none.code == 2 and "no compile-request" in none.stderr


def test_warm_needs_a_store(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    off = hrxmp_run("warm", "-m", model, cache="off")
    assert off.code == 2 and "store" in off.stderr


@pytest.mark.model
def test_the_real_model_is_warm_for_every_length(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = hrxmp_run("warm", "-m", smollm2(), "-o", "json", cache=store)
    assert done.code == 0 and json.loads(done.stdout)["ok"], done.stderr[-2000:]
    args = ("bench", "-m", smollm2(), "-p", "1,2,33,100,600", "-n", "4", "-r", "1", "--no-warmup")
    ran = hrxmp_run(*args, cache=store, environ=FORBID)
    assert ran.code == 0, ran.said
    assert not ran.records(records.CompileBegin)
