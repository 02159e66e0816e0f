"""Runs `scale` with a fault planted in its kernel; for `hrxmp-run --sync-jit planted.py FAULT DIR`.

The kernels' folder is copied and one line of it changed, so that the whole path is the real one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

import hrxmp
from hrxmp import Graph
from hrxmp.kernels import catalog

FAULTS = {
    "none": ("UNARY_scale(x) ((x)", "UNARY_scale(x) ((x)"),
    "read": ("const float v = x[x_offset + i];", "const float v = x[x_offset + i + 7];"),
    "write": (
        "y[y_offset + i] = JOIN(UNARY_, OP)(v);",
        "y[y_offset + i - 3] = JOIN(UNARY_, OP)(v);",
    ),
    "nan": ("y[y_offset + i] = JOIN(UNARY_, OP)(v);", "y[y_offset + i] = i == 12 ? NAN : v;"),
}


def main(fault: str, folder: str) -> None:
    copy = Path(folder) / "cl"
    shutil.copytree(catalog._FOLDER, copy)
    source = copy / "elementwise.cl"
    before, after = FAULTS[fault]
    text = source.read_text()
    assert before in text
    source.write_text(text.replace(before, after))
    catalog._FOLDER = copy
    graph = Graph(uid=1)
    x = graph.input("x", (1000,))
    graph.output(graph.scale(graph.scale(x, 1.0), 2.0), "y")
    executor = hrxmp.connect()
    y = executor.execute(graph, {"x": np.ones(1000, np.float32)}).outputs["y"]
    print("last", y[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
