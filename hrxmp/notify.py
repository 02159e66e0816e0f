"""What a service manager hears of a daemon: ready, alive, stopping. Silent without one.

Run by the aggregator and the pool. It speaks systemd's `Type=notify` over a datagram socket and
needs no library; the address comes in from whoever read the environment, and no child gets it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Service:
    """This process as a service."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        # The watchdog may be meant for a parent that forgot to take the variables away.
        ours = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        microseconds = environ.get("WATCHDOG_USEC", "") if ours else ""
        self._interval_ns = int(microseconds) * 1000 // 3 if microseconds.isdecimal() else 0
        self._beat_ns = 0

    def ready(self) -> None:
        """The socket is bound: clients may come."""
        self._tell(f"READY=1\nMAINPID={os.getpid()}")

    def stopping(self) -> None:
        """The end has begun."""
        self._tell("STOPPING=1")

    def beat(self, now_ns: int) -> None:
        """The loop turns; sent three times as often as the watchdog asks for."""
        if self._interval_ns and now_ns - self._beat_ns >= self._interval_ns:
            self._beat_ns = now_ns
            self._tell("WATCHDOG=1")

    def _tell(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(text.encode(), address)


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for children: they are no service."""
    return {name: value for name, value in environ.items() if name not in _VARIABLES}
