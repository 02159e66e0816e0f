"""The back-end cases of the validation, for `hrxmp-run backend_cases.py CASE ...`.

Prints one JSON object a case: whether the values are right, and what the executor built.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np

import hrxmp
from hrxmp import Executor, Graph

COUNT = 1000


def add_graph(count: int = COUNT, uid: int = 0) -> Graph:
    graph = Graph(uid=uid)
    graph.output(graph.add(graph.input("a", (count,)), graph.input("b", (count,))), "y")
    return graph


def pair(count: int = COUNT, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.random(count, np.float32), random.random(count, np.float32)


def add_f32(executor: Executor) -> bool:
    a, b = pair()
    y = executor.execute(add_graph(uid=1), {"a": a, "b": b}).outputs["y"]
    return bool(np.array_equal(y, a + b))


def scale_f32(executor: Executor) -> bool:
    graph = Graph(uid=1)
    graph.output(graph.scale(graph.input("x", (COUNT,)), 2.5, bias=-0.5), "y")
    x, _ = pair()
    y = executor.execute(graph, {"x": x}).outputs["y"]
    return bool(np.allclose(y, x * np.float32(2.5) - np.float32(0.5), rtol=1e-6, atol=1e-6))


def independent_adds(executor: Executor) -> bool:
    graph = Graph(uid=1)
    values = dict(zip("abcd", (*pair(seed=1), *pair(seed=2)), strict=True))
    leaves = {name: graph.input(name, (COUNT,)) for name in values}
    graph.output(graph.add(leaves["a"], leaves["b"]), "first")
    graph.output(graph.add(leaves["c"], leaves["d"]), "second")
    found = executor.execute(graph, values).outputs
    return bool(
        np.array_equal(found["first"], values["a"] + values["b"])
        and np.array_equal(found["second"], values["c"] + values["d"])
    )


def chained_adds(executor: Executor) -> bool:
    graph = Graph(uid=1)
    a, b = graph.input("a", (COUNT,)), graph.input("b", (COUNT,))
    graph.output(graph.add(graph.add(graph.add(a, b), b), a), "y")
    x, z = pair()
    y = executor.execute(graph, {"a": x, "b": z}).outputs["y"]
    return bool(np.array_equal(y, ((x + z) + z) + x))


def same_uid_same_structure(executor: Executor) -> bool:
    """Two graph objects: one program, two prepared programs, each on its own memory."""
    first, second = add_graph(uid=7), add_graph(uid=7)
    (a, b), (c, d) = pair(seed=1), pair(seed=2)
    y = executor.execute(first, {"a": a, "b": b}).outputs["y"]
    z = executor.execute(second, {"a": c, "b": d}).outputs["y"]
    return bool(np.array_equal(y, a + b) and np.array_equal(z, c + d))


def same_uid_other_structure(executor: Executor) -> bool:
    """Other structure under the same uid: never the old program."""
    (a, b), (c, d) = pair(seed=1), pair(count=77, seed=2)
    y = executor.execute(add_graph(uid=8), {"a": a, "b": b}).outputs["y"]
    z = executor.execute(add_graph(count=77, uid=8), {"a": c, "b": d}).outputs["y"]
    return bool(np.array_equal(y, a + b) and np.array_equal(z, c + d))


CASES: dict[str, Callable[[Executor], bool]] = {
    case.__name__: case
    for case in (
        add_f32,
        scale_f32,
        independent_adds,
        chained_adds,
        same_uid_same_structure,
        same_uid_other_structure,
    )
}


def main(names: list[str]) -> None:
    executor = hrxmp.connect()
    for name in names or CASES:
        before = {key: getattr(executor.stats, key) for key in executor.stats.__struct_fields__}
        right = CASES[name](executor)
        built = {key: getattr(executor.stats, key) - count for key, count in before.items()}
        sys.stdout.write(json.dumps({"case": name, "right": right, **built}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
