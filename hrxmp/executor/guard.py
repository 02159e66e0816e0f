"""The guard: what a compile does once the run is warm (`--on-compile off|warn|error`).

Pure logic of the executor's main thread: it counts executions and keeps the flag; whoever
compiles asks it. In `error` a compile fails the execution; in `warn` each graph gets one record
and one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hrxmp.settings import OnCompile


class Guard:
    """Whether the run is warm, and what that means for a compile."""

    def __init__(self, mode: OnCompile, warm_after: int = 0) -> None:
        self.mode = mode
        self.warm = False
        self._warm_after = warm_after

    @property
    def action(self) -> OnCompile:
        """What a compile now leads to."""
        return self.mode if self.warm else "off"

    def declare_warm(self) -> None:
        """From here on nothing should compile."""
        self.warm = True

    def execution_done(self, executions: int) -> None:
        """Called after each execution, with the number of executions so far."""
        if self._warm_after and executions >= self._warm_after:
            self.warm = True

    @contextmanager
    def no_compiles(self) -> Iterator[None]:
        """Inside, a compile is an error, whatever the mode."""
        before = self.mode, self.warm
        self.mode, self.warm = "error", True
        try:
            yield
        finally:
            self.mode, self.warm = before
