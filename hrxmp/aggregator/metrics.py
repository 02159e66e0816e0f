"""Prometheus text about runs, compiles, waits and the stream itself (extra `metrics`).

Part of the aggregator, only with `--metrics`. It reads released lines in a thread of its own, off
the aggregator's loop: when it cannot follow it skips blocks and counts them, and slows nobody.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    make_wsgi_app,
    start_http_server,
)

from hrxmp.errors import UsageError
from hrxmp.messages import StatusReply
from hrxmp.records import (
    OPENING,
    CompileEnd,
    CompileRequested,
    GraphEnd,
    Guard,
    Lost,
    Record,
    RunBegin,
    RunEnd,
    WaitEnd,
)

QUEUED_BYTES = 8 << 20
SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
OUTCOMES = ("ok", "rejected", "crash", "timeout", "memory", "setup", "cancelled", "lost")
Counted = (
    CompileEnd | CompileRequested | GraphEnd | Guard | Lost | RunBegin | RunEnd | WaitEnd
)  # fmt: skip

_decode = msgspec.json.Decoder(Counted).decode
_STARTS = tuple(f'"event":"{kind.__struct_config__.tag}"'.encode() for kind in Counted.__args__)


class _Silent(WSGIRequestHandler):
    """Logs nothing: standard error is the trace's."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _UnixServer(ThreadingMixIn, WSGIServer):
    """An HTTP server at a path; a socket that a former life left there is replaced."""

    address_family = socket.AF_UNIX
    daemon_threads = True

    def __init__(self, path: str, application: Any) -> None:
        if os.path.exists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
        old = os.umask(0o117)
        try:
            super().__init__(path, _Silent)  # type: ignore[arg-type]  # a path is an address too
        finally:
            os.umask(old)
        self.set_app(application)

    def server_bind(self) -> None:
        """Bind; a path has no host and no port."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """A connection; clients of a unix socket have no address."""
        connection, _nobody = super().get_request()
        return connection, ("local", 0)


class Metrics:
    """The registry and the thread that feeds it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._status: StatusReply | None = None
        self._make()
        self._work = threading.Condition()
        self._blocks: deque[bytes] = deque()
        self._queued = 0
        self._server: Any = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def serve(self, address: str, port: int) -> int:
        """Answer GET on an address; the port. Raises UsageError when it cannot be had."""
        try:
            self._server, _thread = start_http_server(port, address, self.registry)
        except OSError as error:
            raise UsageError(f"--metrics: {address}:{port}: {error.strerror}") from error
        self._thread.start()
        return int(self._server.server_port)

    def serve_socket(self, path: str) -> None:
        """Answer GET on a unix socket, for this user and its group."""
        try:
            self._server = _UnixServer(path, make_wsgi_app(self.registry))
        except OSError as error:
            raise UsageError(f"--metrics: {path}: {error.strerror}") from error
        threading.Thread(
            target=self._server.serve_forever, name="metrics-http", daemon=True
        ).start()
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def feed(self, block: bytes) -> None:
        """Whole lines that were released; returns at once."""
        with self._work:
            if self._queued > QUEUED_BYTES:
                self.skipped.inc(block.count(b"\n"))
                return
            self._blocks.append(block)
            self._queued += len(block)
            self._work.notify()

    def note(self, status: StatusReply) -> None:
        """The aggregator's state, a few times a second."""
        self._status = status

    def count(self, record: Record) -> None:
        """Count one record."""
        match record:
            case RunBegin():
                self.runs.inc()
            case RunEnd():
                self.runs_ended.labels("ok" if record.status == "ok" else "failed").inc()
            case GraphEnd():
                self.executions.labels(record.outcome).inc()
                self.memory_hits.inc(record.memory_hits)
                self.driver_compiles.inc(record.driver_compiles)
            case CompileRequested():
                self.requests.labels(record.via).inc()
            case CompileEnd():
                self.compiles.labels(record.outcome).inc()
                if record.compiler_started and not record.synthetic:
                    self.compile_seconds.observe((record.compile_ns + record.finish_ns) / 1e9)
            case WaitEnd():
                self.wait_seconds.observe(record.dur_ns / 1e9)
            case Guard():
                self.guarded.labels(record.action).inc()
            case Lost():
                self.lost.inc(max(record.last - record.first + 1, 1))

    def _make(self) -> None:
        self.runs = self._counter("runs", "Runs that began")
        self.runs_ended = self._counter("runs_ended", "Runs that ended", status=("ok", "failed"))
        self.executions = self._counter(
            "executions", "Graph executions", outcome=("ok", "failed", "lost")
        )
        self.requests = self._counter(
            "requests", "Kernels asked for", via=("compile", "in_flight", "disk", "quarantine")
        )
        self.memory_hits = self._counter("memory_hits", "Kernels found in memory")
        self.driver_compiles = self._counter("driver_compiles", "Compiles of drivers at load")
        self.compiles = self._counter("compiles", "Compiles that ended", outcome=OUTCOMES)
        self.guarded = self._counter("guarded", "Compiles after warm-up", action=("warn", "error"))
        self.lost = self._counter("lost_records", "Records said to be lost")
        self.skipped = self._counter("skipped_records", "Records that these metrics skipped")
        self.compile_seconds = self._histogram("compile_seconds", "Compiler and finishing time")
        self.wait_seconds = self._histogram("wait_seconds", "Time executions were blocked")
        self._gauge("sources", "Trace sources with a session", lambda s: s.totals["sessions"])
        self._gauge("active_runs", "Runs with a session", lambda s: len(s.runs))
        self._gauge("held_records", "Records held for their order", lambda s: s.pending)
        self._gauge("lag_seconds", "Age of the oldest held record", lambda s: s.oldest_ms / 1e3)
        self._gauge("received_records", "Records received so far", lambda s: s.totals["received"])
        self._gauge("late_records", "Records written late so far", lambda s: s.totals["late"])
        self._gauge("written_bytes", "Bytes written so far", lambda s: s.totals["written_bytes"])
        self._gauge(
            "output_trouble",
            "1 while the output refuses or is gone",
            lambda s: int(bool(s.totals["output_refused"] or s.totals["output_gone"])),
        )

    def _counter(self, name: str, text: str, **label: tuple[str, ...]) -> Counter:
        """A counter with at most one label, whose known values start at 0: a rate needs that."""
        counter = Counter(f"hrxmp_{name}", text, label, registry=self.registry)
        for values in label.values():
            for value in values:
                counter.labels(value)
        return counter

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"hrxmp_{name}", text, buckets=SECONDS, registry=self.registry)

    def _gauge(self, name: str, text: str, value: Callable[[StatusReply], float]) -> None:
        gauge = Gauge(f"hrxmp_{name}", text, registry=self.registry)
        gauge.set_function(lambda: value(self._status) if self._status is not None else 0)

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._blocks:
                    self._work.wait()
                block = self._blocks.popleft()
                self._queued -= len(block)
            for line in block.splitlines():
                self._line(line)

    def _line(self, line: bytes) -> None:
        start = line.find(b'"event"', len(OPENING) - 1, len(OPENING) + 16)
        if start < 0 or not line.startswith(_STARTS, start):
            return
        try:
            self.count(_decode(line))
        except msgspec.DecodeError:  # of another version: not counted
            self.skipped.inc()
