"""What a kernel leaves open: tile sizes and local sizes that change its speed, never its result.

Pure data. A family's dispatch function names the options of a launch, the default first, and takes
the one that the device's tuned table names for this subject; without a table it is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from hrxmp.kernels.keys import Params

Choice = tuple[tuple[str, int], ...]
"""Values of specialisation parameters by name; LX, LY, LZ are the local size."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one kernel for one specialisation of everything else."""

    subject: str
    """The definition with the parameters that are not open: what a tuned choice belongs to."""
    options: tuple[Choice, ...]
    """All that are right on the device; the default is the first."""

    def pick(self, tuned: Mapping[str, Choice]) -> dict[str, int]:
        """The tuned option where it is one of them, else the default."""
        wanted = tuned.get(self.subject, self.options[0])
        return dict(wanted if wanted in self.options else self.options[0])


@lru_cache(maxsize=1024)  # each layer of a model asks for the same ones
def choices(
    definition: str,
    params: Params,
    names: str,
    *options: tuple[int, ...],
) -> Choices:
    """Options from rows of values for `names` (words), in order; repeated rows count once."""
    words = names.split()
    rows = tuple(tuple(zip(words, row, strict=True)) for row in dict.fromkeys(options))
    closed = ",".join(f"{name}={value}" for name, value in params)
    return Choices(subject=f"{definition}({closed})", options=rows)
