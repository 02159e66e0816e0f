"""What one graph execution is while it runs, and what it gave.

Plain data of the executor's main thread; `Run` becomes the columns of `graph-end`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hrxmp.errors import ErrorInfo, HrxmpError
from hrxmp.executor.counts import GraphCounts
from hrxmp.executor.jit import Cause

Array = np.ndarray[Any, Any]


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """What one graph execution gave, and what it cost."""

    exec_id: int
    outputs: dict[str, Array]
    counts: GraphCounts
    dur_ns: int
    replayed: bool


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What having kernels compiled ahead cost, and those that could not be had."""

    counts: GraphCounts
    failed: tuple[HrxmpError, ...]


class Run(msgspec.Struct, kw_only=True):
    """An execution under way, as its `graph-end` will tell it."""

    cause: Cause
    uid: int
    program: int = 0
    program_hit: bool = False
    prepared_hit: bool = False
    replayed: bool = False
    error: ErrorInfo | None = None
    dur_ns: int = 0

    def columns(self) -> dict[str, Any]:
        """What `graph-end` says."""
        return {
            "uid": self.uid,
            "outcome": "failed" if self.error else "ok",
            "error": self.error,
            "program": self.program,
            "program_hit": self.program_hit,
            "prepared_hit": self.prepared_hit,
            "replayed": self.replayed,
            "dur_ns": self.dur_ns,
            **self.cause.counts.as_dict(),
        }


def info(error: BaseException | None) -> ErrorInfo | None:
    """An error as records have it."""
    if error is None:
        return None
    if isinstance(error, HrxmpError):
        return error.info()
    return ErrorInfo(code=type(error).__name__, message=str(error))
