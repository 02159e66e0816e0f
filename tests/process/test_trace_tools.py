"""The daemon and the reader tools as users start them: files, filters, status, live views."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from hrxmp import wire
from hrxmp.aggregator.reader import read, read_file
from hrxmp.aggregator.rotation import Rotation
from hrxmp.clock import HybridLogicalClock
from hrxmp.identity import new_identity
from hrxmp.messages import FromAggregator, StatusReply, StatusRequest
from hrxmp.records import OPENING, Annotation
from tests.process.aggregator_process import (
    PATIENCE_S,
    ROOT,
    AggregatorProcess,
    aggregator,
    tracer,
)
from tests.process.pool_fixture import quick
from tests.process.test_trace_order import ends, start_pair


def tool(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """`hrxmp-trace` with these arguments."""
    command = [sys.executable, "-m", "hrxmp", "trace", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two runs among other output."""
    folder = tmp_path_factory.mktemp("log")
    endpoint, path = f"ipc://{folder}/trace", folder / "stderr"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, b"a warning of somebody else\n")
    with aggregator(endpoint, descriptor):
        assert ends([*start_pair(endpoint, "first", 3, 9000),
                     *start_pair(endpoint, "second", 2, 10)]) == [0] * 4  # fmt: skip
    os.close(descriptor)
    return path


def test_check(log: Path) -> None:
    done = tool("check", log)
    assert done.returncode == 0
    assert "2 runs" in done.stdout
    assert "1 other lines" in done.stdout
    broken = [text for text in log.read_text().splitlines(True) if '"wait-end"' not in text]
    assert tool("check", "-", input="".join(broken)).returncode == 1


def test_check_of_nothing_is_not_right(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("no records here\n")
    assert tool("check", tmp_path / "empty").returncode == 1
    assert tool("check", tmp_path / "missing").returncode == 2


def test_extract(log: Path) -> None:
    lines = tool("extract", log).stdout.splitlines()
    assert len(lines) == len(log.read_text().splitlines()) - 1
    assert all(json.loads(line)["hrxmp"] == "trace/1" for line in lines)


def test_summary_and_explain(log: Path) -> None:
    assert "0 of 3 executions" in tool("summary", "--run", "first", log).stdout
    text = tool("explain", "--run", "first", log).stdout
    assert "execution 2" in text
    assert "for k2(K=576) [request 2]" in text
    assert "why: first use" in text
    assert tool("explain", "--run", "third", log).returncode == 2


def test_diff(log: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    same.write_bytes(log.read_bytes())
    assert tool("diff", "--run", "first", log, same).returncode == 0
    fewer = tmp_path / "fewer"
    fewer.write_text("".join(
        line for line in log.read_text().splitlines(True)
        if '"run":"second"' in line and '"exec":1,' not in line
    ))  # fmt: skip
    done = tool("diff", "--run", "second", log, fewer)
    assert done.returncode == 1
    assert "~ requests: 2 -> 1" in done.stdout
    assert "only in A" in done.stdout


def test_export_and_report(log: Path) -> None:
    events = json.loads(tool("export", log).stdout)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len([one for one in spans if one["name"].startswith("execution")]) == 5
    assert len([one for one in spans if one["tid"] == "worker-1"]) == 5
    rows = tool("export", "--format", "csv", log).stdout.splitlines()
    assert len(rows) == 6
    page = tool("report", log).stdout
    assert page.startswith("<!doctype html>")
    assert "whole and consistent" in page
    assert page.count("<svg") == 2


def test_files_are_private_and_runs_and_events_are_filtered(tmp_path: Path) -> None:
    endpoint, path = f"ipc://{tmp_path}/trace", tmp_path / "out"
    flags = ("--output", str(path), "--run", "wanted-*", "--event", "annotation", "run-end")
    with aggregator(endpoint, sys.stderr.fileno(), *flags):
        for run in ("wanted-1", "other-1"):
            assert ends(start_pair(endpoint, run, 2, 10)) == [0, 0]
    assert path.stat().st_mode & 0o777 == 0o600
    trace = read_file(path)
    assert {line.record.run_id for line in trace.lines} == {"wanted-1"}
    assert {type(line.record).__name__ for line in trace.lines} == {"Annotation", "RunEnd"}


def status(endpoint: str) -> tuple[StatusReply, float]:
    """The aggregator's status and how long it took, in seconds."""
    context = wire.context()
    link = wire.Link[FromAggregator](
        wire.dealer(context, endpoint), FromAggregator, new_identity("-", "asker"),
        HybridLogicalClock(),
    )  # fmt: skip
    begin = time.monotonic()
    link.send(StatusRequest(token=5))
    assert link.poll(int(PATIENCE_S * 1000))
    message = link.receive()
    took = time.monotonic() - begin
    link.close()
    context.term()
    assert message is not None
    assert isinstance(message.body, StatusReply)
    return message.body, took


@pytest.fixture
def blocked(tmp_path: Path) -> Iterator[tuple[str, AggregatorProcess]]:
    """An aggregator whose reader does not read, with more records than the pipe holds."""
    endpoint = f"ipc://{tmp_path}/trace"
    read_end, write_end = os.pipe()
    with aggregator(endpoint, write_end) as running:
        os.close(write_end)
        source = tracer(endpoint, "executor")
        for _ in range(2000):
            source.emit(Annotation, label="x" * 300)
        assert not source.flush(0.3)
        yield endpoint, running
        os.close(read_end)
        source.close()


def test_status_while_the_reader_is_stopped(blocked: tuple[str, AggregatorProcess]) -> None:
    stop = time.monotonic() + PATIENCE_S
    while status(blocked[0])[0].totals["received"] < 2000:  # the rest is still on its way
        assert time.monotonic() < stop
    answers = [status(blocked[0]) for _ in range(11)]
    assert quick([took for _reply, took in answers], 0.1)
    reply = answers[-1][0]
    assert (reply.role, reply.token, reply.runs) == ("aggregator", 5, ("r1",))
    assert reply.totals["received"] == 2000


def test_terminate_ends_it_although_the_reader_is_stopped(
    blocked: tuple[str, AggregatorProcess],
) -> None:
    blocked[1].process.send_signal(signal.SIGTERM)
    assert blocked[1].process.wait(PATIENCE_S) == 0


def test_terminate_keeps_what_was_not_written_for_the_successor(tmp_path: Path) -> None:
    endpoint, path = f"ipc://{tmp_path}/trace", tmp_path / "out"
    flags = ("--output", str(path))
    first = AggregatorProcess(endpoint, sys.stderr.fileno(), *flags)
    source = tracer(endpoint, "executor")
    for number in range(3000):
        source.emit(Annotation, label=f"{number}")
        if number == 1000:
            first.process.terminate()
    assert first.process.wait(PATIENCE_S) == 0
    with aggregator(endpoint, sys.stderr.fileno(), *flags):
        assert source.close(PATIENCE_S)
    assert [line.record.seq for line in read_file(path).lines] == list(range(3000))


def test_tail_sees_what_passes_its_filters(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/trace"
    with aggregator(endpoint, os.open(os.devnull, os.O_WRONLY)):
        command = [sys.executable, "-m", "hrxmp", "trace", "tail", endpoint, "--event"]
        watcher = subprocess.Popen(
            [*command, "annotation", "--run", "r*"], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert watcher.stdout is not None
        os.set_blocking(watcher.stdout.fileno(), False)
        source, other = tracer(endpoint, "executor"), tracer(endpoint, "executor", run="other")
        seen = b""
        deadline = time.monotonic() + PATIENCE_S
        while not seen and time.monotonic() < deadline:
            other.emit(Annotation, label="not this one")
            source.emit(Annotation, label="this one")
            source.flush(0.1)
            seen = watcher.stdout.read() or b""
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(PATIENCE_S) == 130
        seen += watcher.stdout.read() or b""
        watcher.stdout.close()
        source.close()
        other.close()
    assert seen.startswith(OPENING)
    labels = {line.record.label for line in read(seen.splitlines()).lines}  # type: ignore[union-attr]
    assert labels == {"this one"}


def test_tail_of_nobody(tmp_path: Path) -> None:
    done = tool("tail", f"ipc://{tmp_path}/nobody")
    assert done.returncode == 2
    assert "no aggregator answers" in done.stderr


def test_rotation_keeps_every_line_and_few_files(tmp_path: Path) -> None:
    endpoint, path = f"ipc://{tmp_path}/trace", tmp_path / "out"
    flags = ("--output", str(path), "--rotate-mb", "0.05", "--keep", "0")
    with aggregator(endpoint, sys.stderr.fileno(), *flags):
        source = tracer(endpoint, "executor")
        for number in range(2000):
            source.emit(Annotation, label=f"{number}" + "x" * 100)
            if number % 200 == 0:
                source.flush()
        assert source.close(PATIENCE_S)
    old = sorted(tmp_path.glob("out.*"))
    assert len(old) > 3
    assert {one.suffix for one in old} == {".gz"}
    assert {one.stat().st_mode & 0o777 for one in old} == {0o600}
    lines = [line for one in old for line in gzip.decompress(one.read_bytes()).splitlines()]
    lines += path.read_bytes().splitlines()
    assert [line.record.seq for line in read(lines).lines] == list(range(2000))


def test_rotation_forgets_the_oldest(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path / "out", max_bytes=10, keep=2)
    descriptor = rotation.open()
    for number in range(5):
        os.write(descriptor, b"line %d, long enough\n" % number)
        assert rotation.due(descriptor)
        descriptor = rotation.rotate(descriptor)
        rotation.join(PATIENCE_S)
    assert not rotation.due(descriptor)
    os.close(descriptor)
    old = sorted(tmp_path.glob("out.*"))
    assert [gzip.decompress(one.read_bytes())[:6] for one in old] == [b"line 3", b"line 4"]


def fetched(where: str) -> str:
    """The metrics at a port or a path."""
    family = socket.AF_UNIX if "/" in where else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.connect(where if "/" in where else ("127.0.0.1", int(where)))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with client.makefile("rb") as answer:
            return answer.read().decode()


def free_port() -> str:
    """A free port below those that the system hands out, so that nobody is given it meanwhile."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise RuntimeError("no port is free")


@pytest.mark.parametrize("kind", ["port", "path"])
def test_metrics(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("prometheus_client")
    where = free_port() if kind == "port" else str(tmp_path / "metrics")
    endpoint = f"ipc://{tmp_path}/trace"
    null = os.open(os.devnull, os.O_WRONLY)
    with aggregator(endpoint, null, "--metrics", where):
        assert ends(start_pair(endpoint, "r1", 5, 10)) == [0, 0]
        deadline = time.monotonic() + PATIENCE_S
        text = ""
        while "hrxmp_runs_ended_total{" not in text and time.monotonic() < deadline:
            text = fetched(where)
    os.close(null)
    assert 'hrxmp_executions_total{outcome="ok"} 5.0' in text
    assert 'hrxmp_requests_total{via="compile"} 5.0' in text
    assert "hrxmp_compile_seconds_count 5.0" in text
    assert "hrxmp_wait_seconds_count 5.0" in text
    assert "hrxmp_lost_records_total 0.0" in text


@pytest.mark.parametrize(
    "flags",
    [
        ("--bind", "http://x"),
        ("--bind", "tcp://127.0.0.1:1"),
        ("--bind", "ipc://{folder}/a", "--output", "{folder}/no/such/folder"),
        ("--bind", "ipc://{folder}/a", "--metrics", "x"),
    ],
)
def test_what_cannot_be_meant_is_said(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "hrxmp", "aggregator"]
    command += [flag.format(folder=tmp_path) for flag in flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.startswith("hrxmp-aggregator: ")
    assert done.stderr.count("\n") == 1


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OpenTelemetry exporter posts."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        encoded = self.headers.get("Content-Encoding") == "gzip"
        self.bodies.append(gzip.decompress(body) if encoded else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


def test_otlp(log: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    Collector.bodies.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        done = tool("export", "--format", "otlp", "--to", url, "--run", "first", log)
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    spans = {
        span.name: span
        for body in Collector.bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert len(spans) == 1 + 3 * 3
    root, execution = spans["run first"], spans["execution 2"]
    compiled, wait = spans["compile k2"], spans["wait for k2"]
    assert execution.parent_span_id == root.span_id
    assert compiled.parent_span_id == wait.parent_span_id == execution.span_id
    assert [link.span_id for link in wait.links] == [compiled.span_id]
    assert execution.start_time_unix_nano <= wait.start_time_unix_nano
    assert wait.end_time_unix_nano <= execution.end_time_unix_nano
    assert len({span.trace_id for span in spans.values()}) == 1


def test_otlp_to_nobody_fails(log: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    environ = os.environ | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    done = tool("export", "--format", "otlp", "--to", "http://127.0.0.1:9/x", log, env=environ)
    assert done.returncode == 1
    assert "0 spans sent" in done.stdout


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    pytest.importorskip("prometheus_client")
    from hrxmp.aggregator.metrics import Metrics

    there = {
        sample.name for family in Metrics().registry.collect() for sample in family.samples
    } | {f"hrxmp_{name}_total" for name in ("executions", "requests", "compiles", "guarded")}
    text = (ROOT / "deploy" / "grafana-dashboard.json").read_text()
    asked = set(re.findall(r"hrxmp_[a-z_]+", text))
    assert asked <= there
    assert len(json.loads(text)["panels"]) == 12
