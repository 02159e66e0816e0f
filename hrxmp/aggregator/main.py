"""hrxmp-aggregator: the process that orders the records of all sources and writes them.

The command line and the wiring; the loop is in `loop`, the logic in `sessions` and `merge`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hrxmp import lifecycle, wire
from hrxmp.aggregator.loop import Aggregator
from hrxmp.aggregator.merge import Merge
from hrxmp.aggregator.rotation import Rotation
from hrxmp.aggregator.sessions import Sessions
from hrxmp.aggregator.sink import Sink
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.delivery import host_id
from hrxmp.errors import HrxmpError, UsageError
from hrxmp.identity import Identity, new_identity
from hrxmp.messages import ToAggregator
from hrxmp.notify import Service
from hrxmp.settings import Settings

SETTLE_NS = 600_000_000
"""After a restart, sources of the former life get so long to come back."""


def parser() -> argparse.ArgumentParser:
    """The command line of the daemon."""
    line = argparse.ArgumentParser(
        prog="hrxmp-aggregator", description="Order the trace records of many runs into one stream."
    )
    line.add_argument("--bind", required=True, metavar="ENDPOINT", help="ipc://PATH or tcp://…")
    line.add_argument("--group", action="store_true", help="the group may connect, not only me")
    line.add_argument("--output", default="-", metavar="FILE", help="append to FILE; - is stderr")
    line.add_argument("--rotate-mb", type=float, default=0, help="start a new file at this size")
    line.add_argument("--rotate-s", type=float, default=0, help="start a new file at this age")
    line.add_argument("--keep", type=int, default=10, help="old files to keep; 0: all")
    line.add_argument(
        "--metrics",
        default="",
        metavar="PORT|SOCKET",
        help="Prometheus, at [ADDRESS:]PORT or a path",
    )
    line.add_argument("--run", default="*", metavar="GLOB", help="only runs whose id matches")
    line.add_argument("--event", nargs="*", default=[], metavar="NAME", help="only these events")
    line.add_argument("--hold-back-ms", type=int, help="longest wait for a silent source")
    line.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    line.add_argument("--parent-fd", type=int, default=-1, help=argparse.SUPPRESS)
    line.add_argument("--exit-when-idle", action="store_true", help="end with the last source")
    return line


def main(argv: list[str] | None = None) -> int:
    """Run the daemon; the exit code."""
    options = parser().parse_args(argv)
    environment: Mapping[str, str] = os.environ
    try:
        settings = Settings.from_environment(environment)
        return _serve(options, settings, Service(environment))
    except HrxmpError as error:
        sys.stderr.write(f"hrxmp-aggregator: {error}\n")
        return 2


def _serve(options: argparse.Namespace, settings: Settings, service: Service) -> int:
    context = wire.context()
    with wire.doorkeeper(context, options.bind, settings.curve_dir):
        _run(options, settings, service, context)
    context.term()
    return 0


def _run(options: argparse.Namespace, settings: Settings, service: Service, context: Any) -> None:
    wake = lifecycle.WakeUp()
    signals = lifecycle.StopSignals(wake)
    signals.install()
    identity = new_identity("-", "aggregator")
    clock = HybridLogicalClock()
    socket = wire.router(context, options.bind, settings.curve_dir, group=options.group)
    link = wire.Link[ToAggregator](socket, ToAggregator, identity, clock)
    hold_back_ms = settings.hold_back_ms if options.hold_back_ms is None else options.hold_back_ms
    sessions = _sessions(identity, clock, hold_back_ms, options.run)
    events = frozenset(name.encode() for name in options.event)
    aggregator = Aggregator(link, sessions, _sink(options, wake), wake, service, events)
    aggregator.exit_when_idle = options.exit_when_idle
    if options.metrics:
        _serve_metrics(aggregator, options.metrics)
    lifecycle.arm_parent_watch(options.parent_fd, partial(_parent_gone, aggregator))
    lifecycle.notify_ready(options.ready_fd)
    service.ready()
    aggregator.run(signals)


def _parent_gone(aggregator: Aggregator) -> None:
    aggregator.parent_gone = True
    aggregator.wake.set()


def _serve_metrics(aggregator: Aggregator, address: str) -> None:
    try:
        from hrxmp.aggregator.metrics import Metrics
    except ImportError as error:
        raise UsageError(
            "--metrics needs prometheus-client", remedy="install hrxmp with the extra `metrics`"
        ) from error
    aggregator.watcher = metrics = Metrics()
    if address.startswith("/"):
        metrics.serve_socket(address)
        return
    host, _colon, port = address.rpartition(":")
    if not port.isdecimal():
        raise UsageError(f"--metrics {address!r}: expected a port, address:port or /path")
    metrics.serve(host.strip("[]") or "127.0.0.1", int(port))


def _sink(options: argparse.Namespace, wake: lifecycle.WakeUp) -> Sink:
    """Standard error, or a private file that is appended to and rotated."""
    if options.output == "-":
        return Sink(2, wake.set)
    rotation = Rotation(
        Path(options.output),
        max_bytes=int(options.rotate_mb * (1 << 20)),
        max_age_s=options.rotate_s,
        keep=options.keep,
    )
    try:
        return Sink(rotation.open(), wake.set, rotation)
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror}") from error


def _sessions(
    identity: Identity, clock: HybridLogicalClock, hold_back_ms: int, run_glob: str
) -> Sessions:
    return Sessions(
        Merge(hold_back_ms * 1_000_000),
        clock,
        heartbeat_ms=max(min(hold_back_ms // 4, 250), 20),
        incarnation=identity.incarnation,
        host=host_id(),
        started_ns=mono_ns(),
        settle_ns=SETTLE_NS,
        run_glob=run_glob,
    )


if __name__ == "__main__":
    sys.exit(main())
