"""Runs `scale` with a kernel that reads far outside all memory where an element is negative.

For `hrxmp-run --sync-jit kernel_fault.py WHEN FOLDER`: the first execution does so, or the third,
which is a replay. FOLDER gets a copy of the kernels' folder with that one line changed, so that
the whole path is the real one. On a GPU the fault costs the driver's context, which one more
execution meets; on a processor it ends the process. What went well is in the trace before.
"""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import numpy as np

import hrxmp
from hrxmp import Graph
from hrxmp.errors import DeviceError
from hrxmp.kernels import catalog

SOUND = "const float v = x[x_offset + i];"
FAULTY = "const float v = x[x_offset + i + (x[x_offset + i] < 0.0f ? 1L << 44 : 0L)];"
"""64 TiB away: no address of a process, and none of a GPU's."""
COUNT = 1000
FAULT_AT = {"first": 1, "replay": 3}


def plant(folder: Path) -> None:
    """Have the executor read its kernels from a copy with the fault."""
    copy = folder / "cl"
    shutil.copytree(catalog._FOLDER, copy)
    source = copy / "elementwise.cl"
    text = source.read_text()
    if SOUND not in text:
        raise SystemExit("the line to be changed is no longer there")
    source.write_text(text.replace(SOUND, FAULTY))
    catalog._FOLDER = copy


def main(when: str, folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    plant(Path(folder))
    graph = Graph(uid=1)
    x = graph.input("x", (COUNT,))
    graph.output(graph.scale(graph.scale(x, 1.0), 2.0), "y")
    executor = hrxmp.connect()
    sound = {"x": np.ones(COUNT, np.float32)}
    for _ in range(1, FAULT_AT[when]):
        print("last", executor.execute(graph, sound).outputs["y"][-1], flush=True)
    if executor.tracer is not None:
        executor.tracer.flush(60.0)
    try:
        executor.execute(graph, {"x": np.full(COUNT, -1.0, np.float32)})
    except DeviceError as error:
        print("fault", error.code, flush=True)
    executor.execute(graph, sound)


if __name__ == "__main__":
    main(*sys.argv[1:])
