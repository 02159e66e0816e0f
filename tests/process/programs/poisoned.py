"""A bench with everything that tracing is made of poisoned, for `hrxmp-run poisoned.py MODEL`.

From the first execution on, a record, a reading of the trace's clock, its encoder, its lock, its
socket, or any write that is not the result on standard output ends the run with `Poisoned`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import Any, NoReturn

import zmq

import hrxmp
from hrxmp import clock, delivery, records, trace, wire
from hrxmp.workloads import bench
from hrxmp.workloads.main import parser_of


class Poisoned(BaseException):
    """Something of the trace was touched."""


def poison(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise Poisoned


def poison_everything(*, alone: bool) -> None:
    """`alone`: no thread of this process talks to a pool, so that even sockets are poison."""
    record = records.Record
    for name, value in list(vars(records).items()):
        if isinstance(value, type) and issubclass(value, record):
            setattr(records, name, poison)
    trace.Tracer.emit = trace.Tracer.__init__ = poison
    delivery.Delivery.__init__ = poison
    for name in ("_encode", "mono_ns", "wall_ns", "fit"):
        setattr(trace, name, poison)
    sys.stderr.write = poison
    os.write = poison
    if alone:
        clock.HybridLogicalClock.tick = clock.HybridLogicalClock.merge = poison
        wire.Link.send = wire.Link.receive = poison
        zmq.Context.__init__ = zmq.Socket.send = zmq.Socket.send_multipart = poison
        socket.socket.__init__ = poison
        threading.Lock = threading.Thread.start = poison


def main(model: str) -> None:
    executor = hrxmp.connect()
    poison_everything(alone="--sync-jit" in sys.argv)
    flags = ["-m", model, "-p", "0", "-n", "0", "-pg", "16,4", "-r", "2", "--no-warmup"]
    bench.main(parser_of("bench").parse_args([*flags, "-o", "json"]), lambda: executor)


if __name__ == "__main__":
    main(sys.argv[1])
