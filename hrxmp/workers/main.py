"""hrxmp-workers: the pool process. Sockets, signals, one loop; `pool` does the rest.

Started by `hrxmp-run` for one run, or as a daemon that many runs share. It must start and stay up
on a box whose driver is broken, so it loads neither pyopencl nor numpy. SIGTERM drains: what runs
is finished and answered, the rest is asked for again by its executors at the next pool.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hrxmp import lifecycle, notify, wire
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.identity import new_identity, new_run_id
from hrxmp.kernels.store import Store, open_store
from hrxmp.messages import FromWorker, ToPool
from hrxmp.scratch import ScratchFolder
from hrxmp.settings import Settings
from hrxmp.workers.actions import Limits
from hrxmp.workers.broker import Broker
from hrxmp.workers.capacity import bounded, usable_cores
from hrxmp.workers.crew import Crew
from hrxmp.workers.pool import HEARTBEAT_MS, Pool
from hrxmp.workers.sessions import Traces

DRAIN_S = 10.0
_BUSY_MS = 50
_ORPHAN_S = 2.5


def main(argv: list[str], environ: Mapping[str, str] | None = None) -> int:
    """Run a pool until it is told to stop; the exit code."""
    args = _parser().parse_args(argv)
    wake = lifecycle.WakeUp()
    signals = lifecycle.StopSignals(wake)
    signals.install()
    lifecycle.arm_parent_watch(args.parent_fd, partial(_orphaned, signals))
    environ = os.environ if environ is None else environ
    service, environ = notify.Service(environ), notify.without(environ)
    settings = Settings.from_environment(environ)
    scratch = ScratchFolder(Path(settings.runtime_dir or tempfile.gettempdir()))
    context = wire.context()
    try:
        with wire.doorkeeper(context, args.bind, settings.curve_dir):
            # Of a run's own pool, the executor says what is wrong with the store that they share.
            store = open_store(settings, None if args.parent_fd >= 0 else _say)
            pool = _open(args, settings, environ, scratch.path, context, store)
            try:
                if args.expects_compiles and not store.entry_count():
                    pool.expect()
                lifecycle.notify_ready(args.ready_fd)
                service.ready()
                _loop(pool, wake, signals, service)
            finally:
                pool.close("the pool ends")
                pool.requests.close(linger_ms=200)
                pool.work.close()
    finally:
        context.term()
        scratch.remove()
    return 0


def _open(
    args: argparse.Namespace,
    settings: Settings,
    environ: Mapping[str, str],
    folder: Path,
    context: Any,
    store: Store,
) -> Pool:
    clock = HybridLogicalClock()
    identity = new_identity(new_run_id(), "pool")
    endpoint = f"ipc://{folder}/work"
    requests: wire.Link[ToPool] = wire.Link(
        wire.router(context, args.bind, settings.curve_dir, group=args.group),
        ToPool,
        identity,
        clock,
    )
    work: wire.Link[FromWorker] = wire.Link(
        wire.router(context, endpoint), FromWorker, identity, clock
    )
    workers = bounded(args.workers or settings.workers, usable_cores(), _say)
    return Pool(
        requests,
        work,
        Broker(Limits.of(settings, workers)),
        Crew(endpoint, identity.run_id, folder, environ, args.compiler),
        Traces(settings, clock),
        store,
        settings,
        _say,
    )


def _loop(
    pool: Pool, wake: lifecycle.WakeUp, signals: lifecycle.StopSignals, service: notify.Service
) -> None:
    stop_by_ns = 0
    while True:
        timeout_ms = _BUSY_MS if pool.broker.busy or stop_by_ns else HEARTBEAT_MS // 2
        ready = lifecycle.wait(
            [pool.requests, pool.work], [wake.fd, *pool.descriptors()], timeout_ms
        )
        wake.clear()
        if signals.count and not stop_by_ns:  # before a worker that ends can get another job
            service.stopping()
            stop_by_ns = mono_ns() + int(DRAIN_S * 1e9)
            pool.broker.drain()
        pool.receive()
        pool.client_ended(ready)
        pool.tick()
        service.beat(mono_ns())
        late = signals.count > 1 or mono_ns() > stop_by_ns
        if stop_by_ns and (late or not pool.broker.owes):
            return


def _orphaned(signals: lifecycle.StopSignals) -> None:
    """The launcher is gone: end in order, and if that does not work, end anyway."""
    signals.stop_now()
    time.sleep(_ORPHAN_S)
    lifecycle.leave_now()


def _say(text: str) -> None:
    """A daemon's one sentence to whoever started it."""
    sys.stderr.write(f"hrxmp-workers: {text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hrxmp-workers", description="The compile pool: a broker and its compile workers."
    )
    parser.add_argument("--bind", required=True, metavar="ENDPOINT", help="ipc:// or tcp://")
    parser.add_argument("--group", action="store_true", help="the group may connect, not only me")
    parser.add_argument("--workers", type=int, default=0, help="most workers; 0: usable cores")
    parser.add_argument(
        "--expects-compiles", action="store_true", help="start workers before they are asked for"
    )
    parser.add_argument(
        "--compiler", default="", metavar="MODULE:FUNCTION", help="for tests: instead of OpenCL"
    )
    parser.add_argument("--ready-fd", type=int, default=-1, help="told when it is ready")
    parser.add_argument("--parent-fd", type=int, default=-1, help="it ends when this closes")
    return parser
