"""The workload of the chaos test: tokens that must stay the same, and a new kernel each turn.

`hrxmp-run chaos_loop.py MODEL FIRST`: prints one line a turn until its standard input ends, then
one JSON object. A compile that failed with a typed error is counted and its turn repeated with
another kernel; a wrong number, a wrong token or any other error ends it.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import hrxmp
from hrxmp import Executor, Graph
from hrxmp.errors import CompileError
from hrxmp.models.generator import LlamaModel

PROMPT = [3, 14, 15, 92, 65]
TOKENS = 8


def tokens(model: LlamaModel) -> list[int]:
    """Greedy tokens after the prompt, from an empty sequence."""
    model.length = 0
    found = [int(np.argmax(model.prefill(PROMPT)))]
    while len(found) < TOKENS:
        found.append(int(np.argmax(model.decode(found[-1]))))
    return found


def new_kernel(executor: Executor, width: int) -> bool:
    """RMS norm over a width that nobody used yet in this process; whether it is right."""
    graph = Graph(uid=0)
    graph.output(graph.rms_norm(graph.input("x", (3, width)), 1e-5), "y")
    x = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    y = executor.execute(graph, {"x": x}).outputs["y"]
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-5)
    return bool(np.allclose(y, expected, rtol=1e-4, atol=1e-5))


def main(model_path: str, first: int) -> None:
    executor = hrxmp.connect()
    failures: Counter[str] = Counter()
    turns, width, reference, model = 0, first, None, None
    before = len(os.listdir("/proc/self/fd"))
    while not select.select([sys.stdin], [], [], 0)[0]:
        width += 1
        try:
            if model is None:
                model = LlamaModel.load(executor, Path(model_path), context=64)
            found = tokens(model)
            right = new_kernel(executor, width)
        except CompileError as error:
            failures[error.code] += 1
            continue
        reference = reference or found
        if found != reference or not right:
            sys.exit(f"wrong at turn {turns}: {found} {reference} {right}")
        turns += 1
        print(f"turn {turns}", flush=True)
    after = len(os.listdir("/proc/self/fd"))
    result = {
        "turns": turns,
        "tokens": reference,
        "failures": failures,
        "descriptors": after - before,
    }
    print(json.dumps(result), flush=True)


main(sys.argv[1], int(sys.argv[2]))
