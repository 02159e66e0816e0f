"""What sanitized kernels found: a buffer that all commands of a prepared program report to.

Used by the executor's main thread, only in sanitized runs. The kernels count bad accesses and bad
values for each of their bindings; here the counts are fetched, named and cleared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hrxmp import records
from hrxmp.errors import SanitizerError
from hrxmp.executor.graph_program import Command
from hrxmp.executor.jit import Wanted
from hrxmp.kernels import catalog
from hrxmp.kernels.device import Device
from hrxmp.kernels.instrument import COMMAND_INTS, FINDING_INTS, ZONE_BYTES
from hrxmp.kernels.keys import Variant
from hrxmp.kernels.loader import opencl
from hrxmp.trace import Tracer

if TYPE_CHECKING:
    import pyopencl as cl

CHECKS = ("access", "value")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One binding of one command that was accessed, or written, badly.

    `index` is that of the first bad element, counted in the elements of that access from the
    binding's first byte on; `count` says how many there were.
    """

    variant: Variant
    command: int
    binding: str
    check: str
    index: int
    count: int

    def text(self) -> str:
        """One line."""
        what = "accesses outside of" if self.check == "access" else "NaN or infinite values in"
        return (
            f"command {self.command} {self.variant.label()}: {self.count} {what} {self.binding!r}, "
            f"first at element {self.index}"
        )


class Sanitizing(msgspec.Struct, frozen=True, kw_only=True):
    """Which checks kernels carry (none when empty), and what a finding does."""

    kind: str = ""
    trap: bool = True
    """Whether a finding fails its execution."""
    say: Callable[[str], None] = print

    def tell(
        self,
        found: list[Finding],
        want: Callable[[Variant], Wanted],
        tracer: Tracer | None,
        exec_id: int | None,
    ) -> None:
        """Put findings on record and say them. SanitizerError when they are to fail."""
        for item in found:
            wanted = want(item.variant)
            if tracer is not None:
                tracer.emit(
                    records.SanitizerFinding, exec_id=exec_id, kernel=wanted.kernel,
                    key=wanted.key, command=item.command, binding=item.binding, index=item.index,
                    check=item.check, count=item.count,
                )  # fmt: skip
            self.say(f"sanitizer: execution {exec_id}, {item.text()}")
        if found and self.trap:
            raise SanitizerError(f"{found[0].text()} (key {want(found[0].variant).key[:16]})")


class Findings:
    """The findings of one prepared program's commands."""

    def __init__(self, device: Device, commands: tuple[Command, ...]) -> None:
        self._cl = opencl()
        self._device = device
        self._commands = commands
        self._nbytes = len(commands) * COMMAND_INTS * 4
        self._memory: cl.Buffer = self._cl.Buffer(
            device.context, self._cl.mem_flags.READ_WRITE, ZONE_BYTES + self._nbytes
        )
        self._clear()

    def arguments(self, command: Command, position: int) -> tuple[Any, ...]:
        """What a sanitized kernel takes after its own arguments."""
        sizes = [np.uint64(command.nbytes[operand]) for operand in self._operands(command)]
        return (self._memory, position, *sizes)

    def collect(self) -> list[Finding]:
        """Everything found since the last time, in the order of the commands."""
        counts = np.empty(
            (len(self._commands), COMMAND_INTS // FINDING_INTS, FINDING_INTS), np.int32
        )
        self._cl.enqueue_copy(
            self._device.queue, counts, self._memory, src_offset=ZONE_BYTES, is_blocking=True
        )
        if not counts.any():
            return []
        self._clear()
        return [
            self._finding(int(position), int(slot), counts[position, slot])
            for position, slot in np.argwhere(counts[:, :, 0])
        ]

    def _finding(self, position: int, slot: int, values: np.ndarray[Any, Any]) -> Finding:
        variant = self._commands[position].launch.variant
        arguments = catalog.get(variant.definition).args
        names = [argument.name for argument in arguments if argument.kind == "buffer"]
        return Finding(
            variant=variant,
            command=position,
            binding=names[slot // 2],
            check=CHECKS[slot % 2],
            index=int(values[1:3].view(np.int64)[0]),
            count=int(values[0]),
        )

    def _operands(self, command: Command) -> list[str]:
        """The operands in the order of the kernel's buffers."""
        return [argument for argument in command.launch.args if isinstance(argument, str)]

    def _clear(self) -> None:
        """No counts; and zeros where bad accesses go, so that what they read is no finding too."""
        self._cl.enqueue_fill_buffer(
            self._device.queue, self._memory, np.int32(0), 0, ZONE_BYTES + self._nbytes
        )
