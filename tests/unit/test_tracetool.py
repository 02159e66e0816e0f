"""What the readers print for people: within 80 columns, and alike things together."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from hrxmp import records
from hrxmp.aggregator.reader import Line, Trace
from hrxmp.tracetool import diff, main, summary
from hrxmp.tracetool.view import RunView, views

PARAMS = {f"PARAMETER_{n}": 10_000_000 + n for n in range(12)}
COUNTS = dict.fromkeys(
    ("joins", "disk_hits", "memory_hits", "driver_compiles", "failures", "program"), 0
)


def run(requests: dict[int, int]) -> RunView:
    """A run whose executions, by number, asked for so many kernels, large in all that is shown."""
    made: list[tuple[type[records.Record], int, dict[str, object]]] = []
    for exec_id, count in requests.items():
        names = {"request": exec_id, "kernel": "a_kernel_with_a_long_name"}
        made.append((records.GraphBegin, exec_id, {"uid": 1, "nodes": 1}))
        if count:
            made.append(
                (
                    records.CompileRequested,
                    exec_id,
                    names
                    | {
                        "key": f"{exec_id:064x}",
                        "params": PARAMS,
                        "local_size": [1],
                        "via": "compile",
                        "why": "first_use",
                        "near": "",
                        "differs": [],
                        "prefetch": False,
                    },
                )
            )
            made.append(
                (
                    records.CompileEnd,
                    exec_id,
                    names
                    | {
                        "worker": "worker-1",
                        "attempt": 1,
                        "compiler_started": True,
                        "outcome": "ok",
                        "compile_ns": 10**11,
                        "finish_ns": 10**10,
                        "binary_bytes": 1,
                        "log": "",
                        "log_path": "",
                        "error": None,
                    },
                )
            )
        made.append((records.GraphEnd, exec_id, COUNTS | {
            "requests": count, "compiles": count, "waits": count, "wait_ns": 10**9 * count,
            "dur_ns": 10**11, "uid": 1, "outcome": "failed", "error": None, "program_hit": False,
            "prepared_hit": False, "replayed": False}))  # fmt: skip
    lines = []
    for seq, (kind, exec_id, fields) in enumerate(made):
        record = kind(
            run_id="r", source="executor", incarnation=1, seq=seq, t_ns=seq, exec_id=exec_id,
            **fields,
        )  # fmt: skip
        lines.append(Line(seq + 1, record, False, msgspec.json.encode(record)))
    (view,) = views(Trace(lines))
    return view


def test_a_summary_fits_80_columns() -> None:
    text = io.StringIO()
    summary.show(run({1: 1, 2: 300}), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "PARAMETER_11=10000011" in text.getvalue(), "nothing is cut off"
    assert sum("300000 ms" in line for line in lines) == 1, "no figure is folded"


def test_executions_that_differ_alike_are_one_line() -> None:
    before = run(dict.fromkeys(range(1, 101), 0) | {50: 1, 60: 1})
    after = run(dict.fromkeys(range(1, 91), 0) | {50: 2, 60: 2, 70: 2})
    lines = [line for line in diff.diff(before, after) if "execution" in line]
    assert lines == [
        "~ executions 50, 60: requests 1 -> 2, compiles 1 -> 2",
        "~ execution 70: requests 0 -> 2, compiles 0 -> 2",
        "~ executions 91-100 (10): only in A",
    ]


def test_long_lines_are_folded_where_they_may() -> None:
    (line,) = (line for line in diff.diff(run({1: 1}), run({1: 0})) if line.startswith("-"))
    assert len(line) > 160
    folded = main.folded(line, 80)
    assert max(map(len, folded)) <= 80 and len(folded) > 2
    assert " ".join(part.strip() for part in folded) == line


def test_what_comes_after_the_end_of_a_run_is_of_the_same_trace() -> None:
    """A source may outlive its executor; its records must not open a second root."""
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from hrxmp.tracetool.otlp import Spans

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider.get_tracer("test"))
    base = {"run_id": "r", "source": "executor", "incarnation": 1, "t_ns": 5}
    names = {"request": 3, "kernel": "late", "worker": "worker-1", "attempt": 1}
    spans.take(records.GraphBegin(**base, seq=0, exec_id=1, uid=1, nodes=1))
    spans.take(records.RunEnd(**base, seq=1, exec_id=None, status="ok", executions=1, totals={}))
    spans.take(records.CompileBegin(**base, seq=2, exec_id=1, **names, queue_ns=0))
    spans.close()
    made = {span.name: span for span in exporter.get_finished_spans()}
    assert sorted(made) == ["compile late", "execution 1", "run r"]
    parent = made["compile late"].parent
    assert parent is not None
    assert parent.span_id == made["execution 1"].context.span_id
    assert made["run r"].status.is_unset
