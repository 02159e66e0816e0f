"""Readers that attached to the running aggregator: `hrxmp-trace tail` and `top`.

Part of the aggregator's loop. A reader never slows anything: what it does not take is counted and
left out, and a reader that is not heard of any more is forgotten.
"""

from __future__ import annotations

from typing import Any

from hrxmp.messages import Lines
from hrxmp.wire import Link

FORGET_NS = 5_000_000_000
MOST = 64


class Readers:
    """Who reads along, and how much each has missed."""

    def __init__(self, link: Link[Any]) -> None:
        self._link = link
        self._heard: dict[bytes, int] = {}
        self._dropped: dict[bytes, int] = {}

    def subscribe(self, peer: bytes, now: int) -> None:
        """Add a reader, or note that it is still there."""
        if peer in self._heard or len(self._heard) < MOST:
            self._heard[peer] = now
            self._dropped.setdefault(peer, 0)

    def show(self, data: bytes, now: int) -> None:
        """Pass whole lines on to every reader."""
        for peer in list(self._heard):
            if now - self._heard[peer] > FORGET_NS:
                del self._heard[peer], self._dropped[peer]
            elif not self._link.send(Lines(dropped=self._dropped[peer]), to=peer, buffers=(data,)):
                self._dropped[peer] += len(data)
