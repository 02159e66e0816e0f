"""The executor process: joins its run, runs the workload, ends with its exit code.

Opened by the launcher only. The parent watch is armed before anything heavy is imported: when the
launcher is gone this process ends at once. Drivers load while it imports the rest. The launcher
alone hears a terminal's Ctrl-C; here SIGTERM is the one way to stop, and it interrupts the workload
only, never start-up or goodbye.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from types import FrameType

from hrxmp import lifecycle
from hrxmp.errors import HrxmpError
from hrxmp.executor import opening
from hrxmp.kernels.store import open_store
from hrxmp.settings import Settings

Workload = Callable[[list[str], Callable[[], object]], int]
"""Runs a command line; the second argument opens the Executor when the workload needs it."""


class Stopped(KeyboardInterrupt):
    """The run is to end: raised in the workload, which may clean up."""


class Stop:
    """SIGTERM as an exception, but only while the workload runs."""

    def __init__(self) -> None:
        self.asked = False
        self._armed = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_signal)

    def run(self, workload: Callable[[], int]) -> int:
        """Run the workload, if it is not too late; raises Stopped out of it."""
        self._armed = True
        try:
            if self.asked:
                raise Stopped
            return workload()
        finally:
            self._armed = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self._armed:
            self._armed = False
            raise Stopped


def main(argv: list[str], workload: Workload) -> int:
    """Run `workload` on the command after `--`; its exit code."""
    split = argv.index("--")
    args = _parser().parse_args(argv[:split])
    lifecycle.arm_parent_watch(args.parent_fd, lifecycle.leave_now)
    stop = Stop()
    settings = Settings.from_environment(os.environ)
    opening.prepare(settings, open_store(settings, None), opens=args.opens_device)
    from hrxmp.executor import session

    link = session.Link(
        run_id=args.run, run_begin_ns=args.begin, aggregator=args.aggregator, pool=args.pool
    )
    opened = session.Session(settings, link)
    session.enter(opened)
    lifecycle.notify_ready(args.ready_fd)
    status = "failed"
    try:
        code = stop.run(lambda: workload(argv[split + 1 :], session.connect))
        status = "ok" if code == 0 else f"exit {code}"
    except HrxmpError as error:
        status = f"failed: {error.code}"
        raise
    except Stopped:
        status = f"signal {int(signal.SIGTERM)}"
        code = 128 + signal.SIGTERM
    except SystemExit as leave:
        status = "ok" if not leave.code else f"exit {leave.code}"
        raise
    finally:
        opened.close(status)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hrxmp executor")
    parser.add_argument("--run", required=True)
    parser.add_argument("--begin", type=int, required=True)
    parser.add_argument("--aggregator", default="")
    parser.add_argument("--pool", default="")
    parser.add_argument("--opens-device", action="store_true", help="it will need one at once")
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--parent-fd", type=int, default=-1)
    return parser
