"""What a service manager hears: ready, alive, stopping. Silent without one.

The aggregator's and nobody else's; the address comes in from whoever read the environment.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping


class Service:
    """The notification socket of systemd's `Type=notify`, and its watchdog."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        microseconds = environment.get("WATCHDOG_USEC", "0")
        self._interval_ns = int(microseconds) * 1000 // 3 if microseconds.isdecimal() else 0
        self._beat_ns = 0

    def ready(self) -> None:
        """The socket is bound: clients may come."""
        self._tell("READY=1")

    def stopping(self) -> None:
        """The end has begun."""
        self._tell("STOPPING=1")

    def beat(self, now: int) -> None:
        """The loop turns; sent three times as often as the watchdog asks for."""
        if self._interval_ns and now - self._beat_ns >= self._interval_ns:
            self._beat_ns = now
            self._tell("WATCHDOG=1")

    def _tell(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(text.encode(), address)
