"""A launch: which variant, with which arguments, over which index space. No device, no buffers.

`dispatch` returns launches; the executor's lowering binds their operands to buffers.
"""

from __future__ import annotations

import msgspec

from hrxmp.kernels.choices import Choices
from hrxmp.kernels.keys import Variant


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel launch of an operation.

    `args` are in the kernel's argument order: a string names an operand (a buffer), an int is a
    32-bit int argument, a float a 32-bit float argument. `global_size` is a multiple of the
    variant's local size in each dimension. `writes` names the operands that the kernel writes.
    `flops` and `nbytes` are the arithmetic and the memory traffic of the launch, for profiles;
    `choices` are what could have been chosen instead, for tuning.
    """

    variant: Variant
    args: tuple[str | int | float, ...]
    global_size: tuple[int, ...]
    writes: tuple[str, ...]
    flops: int = 0
    nbytes: int = 0
    choices: Choices | None = None
