"""Programs that emit records like executors and pools do; started by the trace tests.

`pair` is one executor and `stream` one source that only numbers. Causes travel as clocks over a
pipe, as they do in message envelopes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

from hrxmp.clock import HybridLogicalClock, mono_ns, wall_ns
from hrxmp.identity import new_identity
from hrxmp.records import (
    Annotation,
    CompileBegin,
    CompileEnd,
    CompileRequested,
    GraphBegin,
    GraphEnd,
    RunEnd,
    WaitBegin,
    WaitEnd,
)
from hrxmp.settings import Settings
from hrxmp.trace import Tracer

ZEROS = dict.fromkeys(
    ("disk_hits", "memory_hits", "driver_compiles", "failures", "dur_ns", "program"), 0
)
PATIENCE_S = 150.0
COUNTS = ("requests", "compiles", "joins", "waits", "wait_ns")


def open_source(endpoint: str, run: str, source: str) -> Tracer:
    """A started tracer with a clock of its own, as in a process of its own."""
    tracer = Tracer(
        new_identity(run, source), HybridLogicalClock(), endpoint, Settings(), mono_ns()
    )
    tracer.start(10.0)
    return tracer


def execute(tracer: Tracer, peer: socket.socket, request: int) -> None:
    """One graph execution that waits for one kernel of the other process."""
    exec_id = request
    names = {"request": request, "kernel": f"k{request}"}
    tracer.emit(GraphBegin, exec_id=exec_id, uid=1, nodes=3)
    tracer.emit(
        CompileRequested, exec_id=exec_id, **names, key="0" * 64, params={"K": 576},
        local_size=[16], via="compile", why="first_use", near="", differs=[], prefetch=False,
    )  # fmt: skip
    tracer.emit(WaitBegin, exec_id=exec_id, **names, asked_by=exec_id)
    send(tracer, peer, request)
    receive(tracer, peer)
    tracer.emit(WaitEnd, exec_id=exec_id, **names, asked_by=exec_id, dur_ns=5, outcome="ok")
    counts = dict.fromkeys(COUNTS, 1) | {"joins": 0, "wait_ns": 5} | ZEROS
    tracer.emit(
        GraphEnd, exec_id=exec_id, uid=1, outcome="ok", error=None, program_hit=False,
        prepared_hit=False, replayed=False, **counts,
    )  # fmt: skip


def serve(tracer: Tracer, peer: socket.socket, log: str) -> bool:
    """Compile one kernel, as far as the trace is concerned; False at the end."""
    request = receive(tracer, peer)
    if request < 0:
        return False
    names = {"request": request, "kernel": f"k{request}", "worker": "worker-1", "attempt": 1}
    tracer.emit(CompileBegin, exec_id=request, **names, queue_ns=0)
    tracer.emit(
        CompileEnd, exec_id=request, **names, compiler_started=True, outcome="ok", compile_ns=1,
        finish_ns=1, binary_bytes=1, log=log if request % 10 == 0 else "", log_path="", error=None,
    )  # fmt: skip
    send(tracer, peer, request)
    return True


def send(tracer: Tracer, peer: socket.socket, request: int) -> None:
    """A message whose envelope carries the clock."""
    peer.sendall(json.dumps([request, *tracer.clock.tick(wall_ns())]).encode().ljust(64))


def receive(tracer: Tracer, peer: socket.socket) -> int:
    """The request in a message; merges its clock."""
    data = peer.recv(64, socket.MSG_WAITALL)
    request, wall, counter = json.loads(data)
    tracer.clock.merge((wall, counter), wall_ns())
    return int(request)


def pair(endpoint: str, run: str, descriptor: str, executions: str) -> int:
    """An executor process; its pool is the process at the other end of the descriptor."""
    peer = socket.socket(fileno=int(descriptor))
    tracer = open_source(endpoint, run, "executor")
    for request in range(int(executions)):
        execute(tracer, peer, request)
    send(tracer, peer, -1)
    peer.recv(1)  # until the pool is done
    count = int(executions)
    totals = {"requests": count, "waits": count, "wait_ns": 5 * count}
    tracer.emit(RunEnd, status="ok", executions=count, totals=totals)
    return 0 if tracer.close(PATIENCE_S) else 1


def pool(endpoint: str, run: str, descriptor: str, log_bytes: str) -> int:
    """A pool process: serves the executor, and talks a lot besides."""
    peer = socket.socket(fileno=int(descriptor))
    tracer = open_source(endpoint, run, "pool")
    while serve(tracer, peer, "w" * int(log_bytes)):
        for _ in range(3):
            tracer.emit(Annotation, label="x" * 200)
    finished = tracer.close(PATIENCE_S)
    peer.close()
    return 0 if finished else 1


def stream(endpoint: str, run: str, source: str, count: str) -> int:
    """Emit `count` numbered records from two threads; the last is the number of records."""
    tracer = open_source(endpoint, run, source)

    def half() -> None:
        for index in range(int(count) // 2):
            tracer.emit(Annotation, label=f"{index:06d}" + "y" * (index % 300))

    threads = [threading.Thread(target=half) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0 if tracer.close(PATIENCE_S) else 1


def die(endpoint: str) -> int:
    """Begin an execution, a compile and a wait, make sure that they are out, and be killed."""
    tracer = open_source(endpoint, "r1", "executor")
    names = {"request": 1, "kernel": "k"}
    tracer.emit(GraphBegin, exec_id=7, uid=1, nodes=1)
    tracer.emit(
        CompileRequested, exec_id=7, **names, key="", params={}, local_size=[],
        via="compile", why="first_use", near="", differs=[], prefetch=False,
    )  # fmt: skip
    tracer.emit(CompileBegin, exec_id=7, **names, worker="inline", attempt=1, queue_ns=0)
    tracer.emit(WaitBegin, exec_id=7, **names, asked_by=7)
    while not tracer.flush(1.0):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit({"pair": pair, "pool": pool, "stream": stream, "die": die}[sys.argv[1]](*sys.argv[2:]))
