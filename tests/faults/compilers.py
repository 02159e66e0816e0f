"""Compilers that misbehave on request; `hrxmp-workers --compiler tests.faults.compilers:compile`.

Runs inside a worker process in the place of OpenCL. The variant's parameters steer it: `do` names
what happens, `arg` how long or how much. `only` limits the misbehaviour to first attempts, told
by a file that the first attempt leaves behind. Each call appends a line to the file `log`, so
that a test can count how often a compiler really ran.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hrxmp.errors import CompileRejectedError, CompileSetupError
from hrxmp.kernels.build import Built
from hrxmp.kernels.keys import Variant


def compile(device: str, variant: Variant) -> Any:
    """Do what the variant says, then answer a binary that is made of its label."""
    params = dict(variant.params)
    if params.get("log"):
        with Path(str(params["log"])).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {variant.label()}\n")
    once = params.get("once")
    if not once or not Path(str(once)).exists():
        if once:
            Path(str(once)).touch()
        answer = _ACTS[str(params.get("do", "build"))](str(params.get("arg", "")))
        if answer is not None:
            return answer
    return Built(
        binary=b"binary of " + variant.label().encode(),
        kind="fake",
        log="",
        compile_ns=1_000,
        create_ns=10,
        launch_ns=10,
        read_ns=10,
    )


def _build(_arg: str) -> None:
    pass


def _abort(_arg: str) -> None:
    sys.stderr.write("fatal: the compiler lost its mind\n")
    sys.stderr.flush()
    os.abort()


def _segfault(_arg: str) -> None:
    ctypes.string_at(0)


def _exit(arg: str) -> None:
    os._exit(int(arg or "3"))


def _spin(_arg: str) -> None:
    while True:  # holds on to the interpreter as a driver may
        pass


def _stop(_arg: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _allocate(arg: str) -> None:
    """So many MB: a hundred at once, then slowly, so that a late look still finds it on its way."""
    kept = []
    for count in range(int(arg or "512")):
        kept.append(bytearray(os.urandom(1)) * (1 << 20))
        time.sleep(0.01 if count > 100 else 0)
    threading.Event().wait(60)


def _sleep(arg: str) -> None:
    time.sleep(float(arg))


def _wait_for_file(arg: str) -> None:
    path = Path(arg)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def _reject(arg: str) -> None:
    raise CompileRejectedError("the compiler refused it", log=arg or "line 1: error: no")


def _setup(_arg: str) -> None:
    raise CompileSetupError("the compiler cannot be set up")


def _raise(arg: str) -> None:
    raise RuntimeError(arg or "something else")


def _rubbish(_arg: str) -> object:
    class Rubbish:
        binary = "text instead of bytes"
        kind = None
        log = None
        compile_ns = create_ns = launch_ns = read_ns = "many"

    return Rubbish()


def _large(arg: str) -> Built:
    return Built(
        binary=b"x" * int(arg),
        kind="fake",
        log="",
        compile_ns=1,
        create_ns=1,
        launch_ns=1,
        read_ns=1,
    )


def _chatter(arg: str) -> None:
    """Fill stderr: a pool that does not read it would block the compiler."""
    for _ in range(int(arg or "2000")):
        os.write(2, b"warning: " + b"w" * 500 + b"\n")


_ACTS: dict[str, Any] = {
    "build": _build,
    "abort": _abort,
    "segfault": _segfault,
    "exit": _exit,
    "spin": _spin,
    "stop": _stop,
    "allocate": _allocate,
    "sleep": _sleep,
    "wait_file": _wait_for_file,
    "reject": _reject,
    "setup": _setup,
    "raise": _raise,
    "rubbish": _rubbish,
    "large": _large,
    "chatter": _chatter,
}
