"""hrxmp runs compute graphs on a GPU through OpenCL, and says what was compiled, by whom and why.

The public names, resolved when first used: importing this package starts nothing, opens nothing
and reads no environment.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hrxmp.dtypes import DType
    from hrxmp.errors import HrxmpError
    from hrxmp.executor.engine import Executor
    from hrxmp.executor.execution import Execution
    from hrxmp.executor.session import connect
    from hrxmp.graph import Graph, Storage, Tensor
    from hrxmp.settings import Settings

_HOME = {
    "DType": "hrxmp.dtypes",
    "Execution": "hrxmp.executor.execution",
    "Executor": "hrxmp.executor.engine",
    "Graph": "hrxmp.graph",
    "HrxmpError": "hrxmp.errors",
    "Settings": "hrxmp.settings",
    "Storage": "hrxmp.graph",
    "Tensor": "hrxmp.graph",
    "connect": "hrxmp.executor.session",
}

__all__ = [
    "DType",
    "Execution",
    "Executor",
    "Graph",
    "HrxmpError",
    "Settings",
    "Storage",
    "Tensor",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hrxmp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
