"""Attaches to a running aggregator: its lines as they are released, and its status.

For `tail` and `top`. One socket of the calling thread; a stream that ends when the caller stops
taking from it. A restarted aggregator is found again.
"""

from __future__ import annotations

from collections.abc import Iterator

from hrxmp import wire
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.errors import UsageError
from hrxmp.identity import new_identity
from hrxmp.messages import FromAggregator, Lines, StatusReply, StatusRequest, Subscribe

AGAIN_NS = 1_000_000_000
FIRST_NS = 3_000_000_000


class Attached:
    """A subscription."""

    def __init__(self, endpoint: str, curve_dir: str = "") -> None:
        self.endpoint = endpoint
        self.dropped = 0
        """Bytes that this reader was too slow for."""
        self.status: StatusReply | None = None
        """The aggregator's latest answer."""
        self._context = wire.context()
        self._link = wire.Link[FromAggregator](
            wire.dealer(self._context, endpoint, curve_dir, immediate=True),
            FromAggregator,
            new_identity("-", "reader"),
            HybridLogicalClock(),
        )
        self._asked_ns = 0
        self._begin_ns = mono_ns()

    def blocks(self) -> Iterator[bytes]:
        """Blocks of whole lines; an empty one at least every quarter of a second.

        Raises UsageError when nobody answers at first.
        """
        while True:
            now = mono_ns()
            if now - self._asked_ns > AGAIN_NS and self._link.send(Subscribe()):
                self._link.send(StatusRequest())
                self._asked_ns = now
            if self.status is None and now - self._begin_ns > FIRST_NS:
                raise UsageError(f"no aggregator answers at {self.endpoint}")
            self._link.poll(50 if self.status is None else 250)
            while (message := self._link.receive()) is not None:
                if isinstance(message.body, StatusReply):
                    self.status = message.body
                elif isinstance(message.body, Lines) and message.buffers:
                    self.dropped = message.body.dropped
                    yield message.buffers[0]
            yield b""

    def close(self) -> None:
        """Give the socket back."""
        self._link.close()
        self._context.term()
