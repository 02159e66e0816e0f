"""The workload of the systemd test: a new kernel each turn, a line a turn into a named pipe.

`hrxmp-run service_loop.py PIPE STOP FIRST`: goes on until the file STOP exists. A compile that
failed with a typed error is told as such; a wrong number ends it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import hrxmp
from hrxmp.errors import CompileError


def turn(executor: hrxmp.Executor, width: int) -> bool:
    """Execute a graph whose kernel nobody used yet; whether its numbers are right."""
    graph = hrxmp.Graph(uid=0)
    graph.output(graph.rms_norm(graph.input("x", (3, width)), 1e-5), "y")
    x = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    y = executor.execute(graph, {"x": x}).outputs["y"]
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    return bool(np.allclose(y, expected, rtol=1e-4, atol=1e-5))


def main(pipe: str, stop: str, first: int) -> None:
    executor = hrxmp.connect()
    with open(pipe, "w", buffering=1) as out:
        width = first
        while not Path(stop).exists():
            try:
                if not turn(executor, width):
                    sys.exit(f"wrong numbers at width {width}")
                out.write("ok\n")
            except CompileError as error:
                out.write(f"{error.code}\n")
            width += 1


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
