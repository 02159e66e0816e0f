"""`python -m hrxmp <role>`: how every process of a run is opened; a role is imported when it runs.

The installed scripts `hrxmp-run`, `hrxmp-aggregator`, `hrxmp-workers` and `hrxmp-trace` come
through here too.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable


def main() -> None:
    """Run the role that the first argument names."""
    roles = {
        "run": run,
        "aggregator": aggregator,
        "workers": workers,
        "worker": _worker,
        "executor": _executor,
        "trace": trace,
    }
    role = roles.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if role is None:
        sys.exit(f"usage: python -m hrxmp {{{','.join(roles)}}} ...")
    del sys.argv[1]
    _quiet(role)


def _quiet(role: Callable[[], None]) -> None:
    """Ctrl-C while a role is still being loaded is no error to be traced."""
    try:
        role()
    except KeyboardInterrupt:
        sys.exit(130)


def run() -> None:
    """hrxmp-run"""
    from hrxmp.launcher import main

    _exit(main)


def aggregator() -> None:
    """hrxmp-aggregator"""
    from hrxmp.aggregator.main import main

    _exit(main)


def workers() -> None:
    """hrxmp-workers"""
    from hrxmp.workers.main import main

    _exit(main)


def trace() -> None:
    """hrxmp-trace"""
    from hrxmp.tracetool.main import main

    _exit(main)


def _worker() -> None:
    from hrxmp.workers.worker import main

    _exit(main)


def _executor() -> None:
    import signal

    # Started with Ctrl-C ignored and blocked; what the workload starts shall not inherit the block.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from hrxmp.executor.main import main
    from hrxmp.workloads.main import run_workload

    _exit(lambda argv: main(argv, run_workload))


def _exit(role: Callable[[list[str]], int]) -> None:
    """End with the role's exit code; errors of ours are told without a traceback."""
    from hrxmp.errors import HrxmpError

    try:
        code = role(sys.argv[1:])
    except HrxmpError as error:
        sys.stderr.write(f"hrxmp: error [{error.code}]: {error}\n")
        code = _CODES.get(error.code, 1)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        code = 1
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(f"hrxmp: error [output]: {error.strerror}\n")
        code = 1
    sys.exit(code)


_CODES = {"usage": 2, "setting": 2, "compile-forbidden": 3}
"""Exit codes by error code, 1 for all others; a service manager tells them apart."""


if __name__ == "__main__":
    main()
