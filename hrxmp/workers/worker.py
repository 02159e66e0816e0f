"""One compile worker: one device, one compiler, one job at a time. `python -m hrxmp worker`.

Started by the pool only. The main thread owns the compiler and may be stuck in a driver for as
long as it likes; a small thread owns the socket and tells the phase. The parent watch is armed
before anything heavy is imported, so this module imports nothing heavy at its top.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from hrxmp import lifecycle

if TYPE_CHECKING:
    from hrxmp.workers.compiling import Compiler
    from hrxmp.workers.worker_link import WorkerLink


def main(argv: list[str]) -> int:
    """Serve jobs until the pool says stop; the exit code."""
    args = _parser().parse_args(argv)
    lifecycle.arm_parent_watch(args.parent_fd, lifecycle.leave_now, death_signal=signal.SIGKILL)
    lifecycle.close_other_descriptors({args.parent_fd, args.ready_fd})
    lifecycle.volunteer_for_oom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when a worker ends

    from hrxmp.workers.compiling import Compiler, load_function

    function = load_function(args.compiler) if args.compiler else None
    compiler = Compiler.from_environment(os.environ, args.scratch, function)
    compiler.wake()
    from hrxmp.workers.worker_link import WorkerLink

    # Before hello: a job that waits here could run on a worker that is ready.
    compiler.prepare(try_device=args.try_device)
    link = WorkerLink(args.endpoint, args.run, args.name, tried=compiler.tried)
    link.start()
    lifecycle.notify_ready(args.ready_fd)
    return _serve(link, compiler)


def _serve(link: WorkerLink, compiler: Compiler) -> int:
    # No time limit: the link thread puts None at the end, and the parent watch ends a lost process.
    while (job := link.inbox.get()) is not None:
        body, buffers = compiler.run(job, link.set_phase)
        link.post(body, buffers)
        link.set_phase("idle")
    link.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hrxmp worker")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--scratch", required=True, help="private folder; the pool removes it")
    parser.add_argument("--try-device", action="store_true", help="compile a line before hello")
    parser.add_argument("--compiler", default="", help="module:function instead of the real one")
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--parent-fd", type=int, default=-1)
    return parser
