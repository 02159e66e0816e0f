"""Graphs for the guard's and the storm's tests, for `hrxmp-run guard_cases.py CASE`.

`api` uses `executor.warm()` and `executor.no_compiles()` and prints what they did as JSON;
`changing N` runs N graphs that differ in one size each; `slow WHERE` puts a compile into the
driver's load or first launch, as some drivers do.
"""

from __future__ import annotations

import json
import sys
from time import process_time_ns
from typing import Any

import numpy as np

import hrxmp
from hrxmp import Executor, Graph
from hrxmp.errors import CompileForbiddenError
from hrxmp.kernels import build

SLOW_NS = 300_000_000


def norm_graph(k: int, uid: int = 0) -> Graph:
    graph = Graph(uid=uid)
    graph.output(graph.rms_norm(graph.input("x", (2, k)), 1e-5), "y")
    return graph


def norm(executor: Executor, k: int) -> Any:
    return executor.execute(norm_graph(k, uid=k), {"x": np.ones((2, k), np.float32)})


def changing(executor: Executor, count: str) -> None:
    for index in range(int(count)):
        norm(executor, 64 + 16 * index)


def api(executor: Executor) -> None:
    """Compiles are refused inside the context only, and the executor lives on."""
    graph, values = norm_graph(64, uid=64), {"x": np.ones((2, 64), np.float32)}
    executor.execute(graph, values)
    told = {"replayed": False, "inside": "", "after": False}
    with executor.no_compiles():
        told["replayed"] = executor.execute(graph, values).replayed
        try:
            norm(executor, 96)
        except CompileForbiddenError as error:
            told["inside"] = str(error)
    told["after"] = bool(norm(executor, 96).counts.compiles)
    executor.warm()
    try:
        norm(executor, 128)
        told["warm"] = "compiled"
    except CompileForbiddenError:
        told["warm"] = "refused"
    sys.stdout.write(json.dumps(told) + "\n")


def slow(executor: Executor, where: str) -> None:
    """A driver that compiles at kernel creation (`load`) or at the first launch (`dry_launch`)."""
    quick = getattr(build, where)

    def compiling(*args: Any) -> Any:
        end = process_time_ns() + SLOW_NS
        while process_time_ns() < end:
            pass
        return quick(*args)

    setattr(build, where, compiling)
    executor.warm()
    norm(executor, 64)


if __name__ == "__main__":
    globals()[sys.argv[1]](hrxmp.connect(), *sys.argv[2:])
