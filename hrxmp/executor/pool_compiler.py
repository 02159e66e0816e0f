"""Asynchronous JIT: binaries from the compile pool, through the compile client's thread."""

from __future__ import annotations

from collections.abc import Callable

from hrxmp.errors import CompileTimeoutError
from hrxmp.executor.compile_client import CompileClient, Ticket
from hrxmp.executor.jit import Binary, Wanted
from hrxmp.kernels.device import Device
from hrxmp.messages import CompileRequest
from hrxmp.settings import Settings

_WORKER_BYTES = 524 << 20
"""What a worker's context takes of an NVIDIA GPU's memory."""
_WORKERS_SHARE = 16
"""Workers may take this fraction of a device's memory: the rest is the model's."""
_SETTLE_S = 2.0
_GRACE_S = 30.0


class PoolCompiler:
    """The jit's compiler when there is a pool. Workers re-open the executor's `device`."""

    synchronous = False

    def __init__(self, client: CompileClient, device: Device, settings: Settings) -> None:
        self._client = client
        self._device = device.spec
        self._most_workers = _most_workers(device)
        # The pool ends each attempt at its deadline; this bound is for a pool that does not.
        self._longest_s = 2 * settings.job_timeout_s + settings.pool_timeout_s + _GRACE_S
        self._tickets: dict[int, Ticket] = {}

    def submit(
        self, request: int, wanted: Wanted, exec_id: int | None, accepted: Callable[[str], None]
    ) -> None:
        """Send the request; returns at once."""
        body = CompileRequest(
            request_id=request,
            key=wanted.key,
            variant=wanted.variant,
            components=wanted.components,
            device=self._device,
            urgent=exec_id is not None,
            most_workers=self._most_workers,
        )
        self._tickets[request] = self._client.request(body, exec_id, accepted)

    def ready(self, request: int) -> bool:
        """Whether the outcome is there. Returns once the pool has taken the request, or not."""
        ticket = self._tickets[request]
        ticket.wait_accepted(self._longest_s)
        return ticket.done

    def result(self, request: int) -> Binary:
        """Wait for the outcome. Raises CompileError."""
        outcome = self._tickets.pop(request).wait(self._longest_s)
        if outcome is None:
            raise CompileTimeoutError(f"the pool gave no answer in {self._longest_s:g} s")
        if outcome.error is not None:
            raise outcome.error
        return Binary(payload=outcome.binary, compile_ns=outcome.compile_ns)

    def urgent(self, requests: list[int]) -> None:
        """These are waited for now, in this order."""
        self._client.urgent(tuple(requests))

    def settle(self, request: int) -> None:
        """Cancel, and wait a moment for the answer that every request gets."""
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            self._client.cancel(request)
            ticket.wait(_SETTLE_S)

    def close(self) -> None:
        """Say goodbye to the pool."""
        self._client.close()


def _most_workers(device: Device) -> int:
    """How many workers the device has memory for; 0 for a CPU, whose memory is the host's."""
    if device.traits.is_cpu:
        return 0
    return max(1, device.info.memory_bytes // _WORKERS_SHARE // _WORKER_BYTES)
