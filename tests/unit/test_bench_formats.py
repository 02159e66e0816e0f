"""Bench's flags and outputs: what is asked for, and that each format can be read by its readers."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sqlite3
import statistics
from pathlib import Path

import msgspec
import pytest

from hrxmp.errors import UsageError
from hrxmp.executor.counts import GraphCounts
from hrxmp.models.gguf_file import GgufFile
from hrxmp.workloads import arguments
from hrxmp.workloads.bench import Counted, model_type
from hrxmp.workloads.formats import COLUMNS, Row, printer, statistics_of
from hrxmp.workloads.profile_table import short_labels
from tests.model_files import write_tiny

SAMPLES = [2_000_000_000, 1_000_000_000, 4_000_000_000]
ROW = Row(
    build_commit="0.1.0", build_number=0, cpu_info="A \"quoted\", it's", gpu_info="",
    backends="OpenCL", model_filename="/models/m.gguf", model_type="llama 135M Q4_1",
    model_size=96576768, model_n_params=134515008, n_batch=2048, n_ubatch=512, n_threads=2,
    type_k="f32", type_v="f32", flash_attn=True, devices="0", use_mmap=True, n_prompt=64,
    n_gen=16, n_depth=512, test_time="2026-01-02T03:04:05Z", platform="P", device="D",
    driver="1.2", hrxmp_version="0.1.0", warmup=False, compiles=7, wait_ms=1.5,
    cache_state="cold", **statistics_of(SAMPLES, 80),
)  # fmt: skip
OTHER = msgspec.structs.replace(ROW, n_gen=0, n_depth=0, cache_state="warm")


def parse(*flags: str) -> list[arguments.BenchTest]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    arguments.add_bench_arguments(parser)
    return arguments.bench_tests(parser.parse_args(flags))


def names(*flags: str) -> list[str]:
    return [test.name for test in parse("-m", "x.gguf", *flags)]


def printed(form: str, *rows: Row, shown: frozenset[str] = frozenset()) -> str:
    stream = io.StringIO()
    target = printer(form, stream, shown)
    target.begin()
    for row in rows:
        target.row(row)
    target.end()
    return stream.getvalue()


def test_the_defaults_are_llama_benchs() -> None:
    assert names() == ["pp512", "tg128"]
    (first, _) = parse("-m", "x.gguf")
    assert (first.n_batch, first.n_ubatch, first.kv_type) == (2048, 512, "f32")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-p 0 -n 0 -pg 64,16", ["pp64+tg16"]),
        ("-p 16,32 -p 64 -n 0", ["pp16", "pp32", "pp64"]),
        ("-p 0 -n 8 -d 0,512", ["tg8", "tg8 @ d512"]),
        ("-p 4 -n 2 -pg 64,16 -pg 8,0", ["pp4", "tg2", "pp64+tg16", "pp8"]),
        ("-p 1-3 -n 0", ["pp1", "pp2", "pp3"]),
        ("-p 1-6+2 -n 0", ["pp1", "pp3", "pp5"]),
        ("-p 16-100*2 -n 0", ["pp16", "pp32", "pp64"]),
    ],
)
def test_lists_pairs_and_ranges(flags: str, expected: list[str]) -> None:
    assert names(*flags.split()) == expected


def test_all_settings_are_combined() -> None:
    tests = parse(*["-m", "a,b", "-n", "0", "-b", "64,128", "-ub", "32,256", "-ctk", "f32,f16"])
    assert len(tests) == 2 * 2 * 2 * 2
    assert {(t.n_batch, t.n_ubatch) for t in tests} == {(64, 32), (64, 64), (128, 32), (128, 128)}


@pytest.mark.parametrize(
    "flags",
    ["", "-m x -p 0 -n 0", "-m x -b 0", "-m x -ctk q8_0", "-m x -ctk f16 -ctv f32"],
)
def test_flags_that_cannot_be_meant(flags: str) -> None:
    with pytest.raises(UsageError):
        parse(*flags.split())


@pytest.mark.parametrize(
    "flags", ["-p -1", "-p x", "-p 8-4", "-p 1-9+0", "-p 1-9*1", "-pg 64", "-r 0", "-o xml",
              "-p 0-99999999"],
)  # fmt: skip
def test_values_of_the_wrong_form(flags: str) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse("-m", "x", *flags.split())


def test_statistics() -> None:
    rates = [40.0, 80.0, 20.0]
    assert ROW.samples_ns == tuple(SAMPLES)
    assert ROW.samples_ts == tuple(rates)
    assert ROW.avg_ts == pytest.approx(statistics.mean(rates))
    assert ROW.stddev_ts == pytest.approx(statistics.stdev(rates))
    assert (ROW.avg_ns, ROW.stddev_ns) == (2333333333, 1527525232)
    assert statistics_of([5], 1)["stddev_ns"] == 0


def test_json_has_all_columns_the_own_ones_last() -> None:
    first, second = json.loads(printed("json", ROW, OTHER))
    assert [*first] == [*Row.__struct_fields__]
    assert [*first][-3:] == ["compiles", "wait_ms", "cache_state"]
    assert first["samples_ns"] == SAMPLES
    assert (first["wait_ms"], second["cache_state"]) == (1.5, "warm")
    assert json.loads(printed("json")) == []


def test_jsonl_is_one_object_a_line() -> None:
    lines = printed("jsonl", ROW, OTHER).splitlines()
    assert [msgspec.json.decode(line, type=Row) for line in lines] == [ROW, OTHER]


def test_csv_reads_back() -> None:
    rows = list(csv.DictReader(io.StringIO(printed("csv", ROW, OTHER))))
    assert [*rows[0]] == [*Row.__struct_fields__]
    assert rows[0]["cpu_info"] == ROW.cpu_info
    assert json.loads(rows[0]["samples_ns"]) == SAMPLES
    assert (rows[0]["warmup"], rows[1]["n_gen"]) == ("false", "0")


def test_sql_runs_in_sqlite() -> None:
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(printed("sql", ROW, OTHER))
        query = "SELECT cpu_info, avg_ts, samples_ns, warmup, cache_state FROM llama_bench"
        found = database.execute(query).fetchall()
    finally:
        database.close()
    assert found[0][:2] == (ROW.cpu_info, pytest.approx(ROW.avg_ts))
    assert json.loads(found[0][2]) == SAMPLES
    assert (found[0][3], found[1][4]) == (0, "warm")


def test_the_table_is_llama_benchs_with_columns_at_the_end() -> None:
    lines = printed("md", ROW, OTHER).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert cells[0] == [
        "model", "size", "params", "backend", "test", "t/s", "compiles", "wait_ms", "cache_state",
    ]  # fmt: skip
    assert cells[2] == [
        "llama 135M Q4_1", "92.10 MiB", "134.52 M", "OpenCL", "pp64+tg16 @ d512", "46.67 ± 30.55",
        "7", "1.5", "cold",
    ]  # fmt: skip
    assert set("".join(cells[1])) == {"-", ":"}
    assert lines[-1] == "build: hrxmp 0.1.0, D, 1.2"
    assert len({len(line) for line in (lines[0], lines[1], lines[3])}) == 1


def test_the_table_shows_settings_that_are_not_the_default() -> None:
    header = printed("md", ROW, shown=frozenset({"n_ubatch", "type_k"})).splitlines()[0]
    titles = [cell.strip() for cell in header.strip("|").split("|")]
    assert titles[4:6] == ["n_ubatch", "type_k"]
    assert {column.title for column in COLUMNS} >= set(titles)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (GraphCounts(requests=3, compiles=3, waits=2, wait_ns=5), "cold"),
        (GraphCounts(requests=3, joins=3), "cold"),
        (GraphCounts(requests=3, disk_hits=3), "warm"),
        (GraphCounts(memory_hits=9), "warm"),
        (GraphCounts(requests=3, compiles=1, disk_hits=2), "mixed"),
        (GraphCounts(driver_compiles=1, disk_hits=1), "mixed"),
    ],
)
def test_the_cache_state_follows_from_the_counts(counts: GraphCounts, expected: str) -> None:
    counted = Counted()
    counted.add_counts(counts)
    counted.add_counts(GraphCounts())
    assert counted.cache_state == expected
    assert (counted.executions, counted.wait_ns) == (2, counts.wait_ns)


def test_the_model_type_names_architecture_size_and_weights(tmp_path: Path) -> None:
    file = GgufFile.open(write_tiny(tmp_path / "m.gguf", "q4_k_m"))
    assert model_type(file) == "llama 1.51M Q4_K - Medium"
    file = GgufFile.open(write_tiny(tmp_path / "n.gguf", "q5_1"))
    assert model_type(file) == "llama 1.51M Q5_1"


def test_a_profile_names_what_tells_kernels_apart() -> None:
    labels = ["a(N=1,K=2) local 1", "a(N=3,K=2) local 1", "b(N=1) local 2", "a(N=1,K=2) local 4"]
    assert short_labels(labels) == ["a N=1 local 1", "a N=3 local 1", "b", "a N=1 local 4"]
