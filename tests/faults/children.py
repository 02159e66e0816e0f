"""Child programs that misbehave on purpose; started by `supervise.spawn` in a role's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hrxmp import lifecycle


def main() -> None:
    """`python -m tests.faults.children NAME --ready-fd N --parent-fd N`."""
    name, _, ready, _, parent = sys.argv[1:6]
    lifecycle.arm_parent_watch(int(parent), lifecycle.leave_now)
    _CHILDREN[name](int(ready))


def _ready(ready: int) -> None:
    lifecycle.notify_ready(ready)
    time.sleep(60)


def _never_ready(_ready_fd: int) -> None:
    time.sleep(60)


def _dies(_ready_fd: int) -> None:
    sys.stderr.write("no such driver\n")
    sys.exit(7)


def _ignores_terminate(ready: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _ready(ready)


def _leaves_a_grandchild(ready: int) -> None:
    inner = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.DEVNULL
    )
    lifecycle.notify_ready(ready)
    sys.stderr.write(f"{inner.pid}\n")
    sys.stderr.flush()
    time.sleep(0.2)
    os._exit(0)


_CHILDREN = {
    "ready": _ready,
    "never_ready": _never_ready,
    "dies": _dies,
    "ignores_terminate": _ignores_terminate,
    "leaves_a_grandchild": _leaves_a_grandchild,
}

if __name__ == "__main__":
    main()
