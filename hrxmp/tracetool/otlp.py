"""Records as OpenTelemetry spans (extra `otlp`): run, execution, compile, wait.

A run is a trace; executions are its children; a compile is a child of the execution that asked,
a wait of the one that waited, with a link to the compile that it waited for. Works on a whole file
and on a live stream alike: it takes one record after the other. The official SDK does the rest.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, Status, StatusCode

from hrxmp.clock import wall_ns
from hrxmp.records import (
    CompileBegin,
    CompileEnd,
    CompileRequested,
    GraphBegin,
    GraphEnd,
    Record,
    RunBegin,
    RunEnd,
    WaitBegin,
    WaitEnd,
)

COMMON = ("event", "run", "source", "incarnation", "seq", "t_ns")
REMEMBERED = 1024
"""Ended runs whose later records, of a source that outlived its executor, still find their root."""


class Counting(SpanExporter):
    """An exporter that remembers how it went."""

    def __init__(self, inner: SpanExporter) -> None:
        self.inner = inner
        self.sent = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Pass on and count."""
        result = self.inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the inner exporter."""
        self.inner.shutdown()


class Run:
    """The open spans of one run."""

    def __init__(self, run_id: str, tracer: api.Tracer) -> None:
        self.epoch_ns = epoch_of(run_id)
        self.tracer = tracer
        self.root = tracer.start_span(f"run {run_id}", start_time=self.epoch_ns)
        self.root.set_attribute("hrxmp.run", run_id)
        self.executions: dict[int, Span] = {}
        self.compiles: dict[int, Span] = {}
        self.open: dict[tuple[str, Any], Span] = {}
        self.last_ns = 0

    def begin(self, kind: str, key: Any, name: str, parent: Span, at_ns: int, links: Any) -> Span:
        """Start a span."""
        context = api.set_span_in_context(parent)
        span = self.tracer.start_span(
            name, context, start_time=self.epoch_ns + at_ns, links=links or None
        )
        self.open[kind, key] = span
        return span

    def end(self, kind: str, key: Any, record: Record, failed: bool) -> None:
        """End a span that was begun; its record's columns are its attributes."""
        span = self.open.pop((kind, key), None)
        if span is not None:
            describe(span, record)
            if failed:
                span.set_status(Status(StatusCode.ERROR))
            span.end(self.epoch_ns + record.t_ns)

    def close(self, status: str) -> None:
        """End the run, and what is still open in it."""
        if status != "ok":
            self.root.set_status(Status(StatusCode.ERROR, status))
        for span in [*self.open.values(), self.root]:
            if span.is_recording():
                span.end(self.epoch_ns + self.last_ns)
        self.open.clear()


class Spans:
    """Turns records into spans."""

    def __init__(self, tracer: api.Tracer) -> None:
        self.tracer = tracer
        self.runs: dict[str, Run] = {}
        self.ended: dict[str, Run] = {}

    def take(self, record: Record) -> None:
        """One record, in the order of the trace."""
        run = self.runs.get(record.run_id) or self.ended.get(record.run_id)
        if run is None:
            run = self.runs[record.run_id] = Run(record.run_id, self.tracer)
        run.last_ns = max(run.last_ns, record.t_ns)
        match record:
            case RunBegin():
                describe(run.root, record)
            case RunEnd():
                describe(run.root, record)
                run.close(record.status)
                self._keep(record.run_id)
            case GraphBegin() | GraphEnd():
                _graph(run, record)
            case CompileRequested():
                _asked(run, record)
            case CompileBegin() | CompileEnd():
                _compile(run, record)
            case WaitBegin() | WaitEnd():
                _wait(run, record)

    def close(self) -> None:
        """End what no record ended."""
        for run in self.runs.values():
            run.close("no run-end")
        for run in self.ended.values():
            run.close("ok")
        self.runs.clear()
        self.ended.clear()

    def _keep(self, run_id: str) -> None:
        if run_id in self.runs:
            self.ended[run_id] = self.runs.pop(run_id)
        while len(self.ended) > REMEMBERED:
            oldest = next(iter(self.ended))
            self.ended.pop(oldest).close("ok")


def send(records: Iterable[Record], url: str) -> tuple[int, int]:
    """Send records as spans to a collector's OTLP/HTTP address; (sent, failed) spans."""
    exporter = Counting(OTLPSpanExporter(endpoint=url))
    provider = TracerProvider(resource=Resource.create({"service.name": "hrxmp"}))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    spans = Spans(provider.get_tracer("hrxmp"))
    try:
        for record in records:
            spans.take(record)
    finally:
        spans.close()
        provider.shutdown()
    return exporter.sent, exporter.failed


def epoch_of(run_id: str) -> int:
    """Wall time of a run's begin: run ids start with it. Now, for ids that users made up."""
    try:
        return calendar.timegm(time.strptime(run_id[:15], "%Y%m%dT%H%M%S")) * 1_000_000_000
    except ValueError:
        return wall_ns()


def describe(span: Span, record: Record) -> None:
    """A record's own columns as attributes."""
    for name, value in msgspec.to_builtins(record).items():
        if name in COMMON or value is None:
            continue
        plain = isinstance(value, str | int | float | bool)
        span.set_attribute(f"hrxmp.{name}", value if plain else msgspec.json.encode(value).decode())


def _graph(run: Run, record: GraphBegin | GraphEnd) -> None:
    key = record.exec_id
    if isinstance(record, GraphEnd):
        run.end("graph", key, record, record.outcome != "ok")
    else:
        span = run.begin("graph", key, f"execution {key}", run.root, record.t_ns, None)
        if key is not None:
            run.executions[key] = span


def _asked(run: Run, record: CompileRequested) -> None:
    span = _asker(run, record.exec_id)
    attributes = {"hrxmp.key": record.key, "hrxmp.via": record.via, "hrxmp.why": record.why}
    if span.is_recording():
        span.add_event(f"asked for {record.kernel}", attributes, run.epoch_ns + record.t_ns)


def _compile(run: Run, record: CompileBegin | CompileEnd) -> None:
    key = (record.request, record.attempt)
    if isinstance(record, CompileEnd):
        run.end("compile", key, record, record.outcome != "ok")
        return
    parent = _asker(run, record.exec_id)
    name = f"compile {record.kernel}"
    run.compiles[record.request] = run.begin("compile", key, name, parent, record.t_ns, None)


def _wait(run: Run, record: WaitBegin | WaitEnd) -> None:
    key = (record.exec_id, record.request)
    if isinstance(record, WaitEnd):
        compiled = run.compiles.get(record.request)
        waiting = run.open.get(("wait", key))
        if compiled is not None and waiting is not None:
            waiting.add_link(compiled.get_span_context())
        run.end("wait", key, record, record.outcome != "ok")
        return
    asker = _asker(run, record.asked_by)
    links = [Link(asker.get_span_context())] if record.asked_by != record.exec_id else None
    name = f"wait for {record.kernel}"
    run.begin("wait", key, name, _asker(run, record.exec_id), record.t_ns, links)


def _asker(run: Run, exec_id: int | None) -> Span:
    return run.root if exec_id is None else run.executions.get(exec_id, run.root)
