"""Runs a graph on a device that gets lost, for `hrxmp-run lost_device.py WHEN`: first or replay.

The queue becomes one of a context that knows neither the kernels nor the memory, so the driver
refuses each further call, as it does once a kernel has cost it its context.
"""

from __future__ import annotations

import sys

import numpy as np

import hrxmp
from hrxmp import Graph
from hrxmp.errors import HrxmpError
from hrxmp.kernels.loader import opencl


def main(when: str) -> None:
    executor = hrxmp.connect()
    graph = Graph(uid=1)
    graph.output(graph.scale(graph.input("x", (64,)), 2.0), "y")
    values = {"x": np.ones(64, np.float32)}
    for _ in range(2 if when == "replay" else 0):
        executor.execute(graph, values)
    cl, device = opencl(), executor._device
    device.queue = cl.CommandQueue(cl.Context([device.handle]), device.handle)
    try:
        executor.execute(graph, values)
    except HrxmpError as error:
        print(error.message, flush=True)
    executor.execute(graph, values)


if __name__ == "__main__":
    main(sys.argv[1])
