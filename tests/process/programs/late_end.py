"""An execution that fails while a kernel that it asked for is still being compiled, and another
one that needs this kernel; for `hrxmp-run late_end.py FOLDER` with a pool of `late_compiler`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import hrxmp
from hrxmp import Graph
from hrxmp.errors import CompileRejectedError

x = np.full(256, 3.0, np.float32)
failing = Graph(uid=1)
failing.output(
    failing.silu(failing.add(failing.input("x", (256,)), failing.input("y", (256,)))), "z"
)
executor = hrxmp.connect()
try:
    executor.execute(failing, {"x": x, "y": x})
except CompileRejectedError:
    (Path(sys.argv[1]) / "go").touch()
graph = Graph(uid=2)
graph.output(graph.silu(graph.input("x", (256,))), "z")
z = executor.execute(graph, {"x": x}).outputs["z"]
print("right" if np.allclose(z, x / (1.0 + np.exp(-x))) else z)
