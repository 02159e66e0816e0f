"""What the device can do at all: bytes a second read, float32 multiply-adds a second.

Plain kernels, written for nothing but the limit: decode is bound by the first, prefill by the
second. Usage: limits.py [--device SPEC]. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from hrxmp.kernels.device import open_device
from hrxmp.kernels.loader import opencl, prepare_loader

SOURCE = """
kernel void read_all(global const float16 *x, global float *y, long n) {
    float16 a = 0, b = 0, c = 0, d = 0;
    long groups = get_num_groups(0), part = n / groups, begin = get_group_id(0) * part;
    for (long i = begin; i + 3 < begin + part; i += 4) {
        a += x[i]; b += x[i + 1]; c += x[i + 2]; d += x[i + 3];
    }
    a += b + c + d;
    y[get_group_id(0)] = a.s0 + a.s1 + a.s2 + a.s3 + a.s4 + a.s5 + a.s6 + a.s7
                       + a.s8 + a.s9 + a.sa + a.sb + a.sc + a.sd + a.se + a.sf;
}
kernel void multiply_add(global float16 *y, float factor, int n) {
    float16 a[12];
    for (int i = 0; i < 12; i++) a[i] = i;
    float16 f = factor;
    for (int k = 0; k < n; k++)
        #pragma unroll
        for (int i = 0; i < 12; i++) a[i] = fma(a[i], f, f);
    for (int i = 1; i < 12; i++) a[0] += a[i];
    y[get_global_id(0)] = a[0];
}
"""
MEGABYTES = (100, 800)
ROUNDS = 15


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    prepare_loader()
    device = open_device(args.device)
    cl = opencl()
    program = cl.Program(device.context, SOURCE).build("-cl-std=CL3.0")
    found: dict[str, object] = {"device": device.info.label}
    for megabytes in MEGABYTES:
        count = megabytes * 1_000_000 // 64
        data = np.ones(count * 16, np.float32)
        x = cl.Buffer(device.context, cl.mem_flags.COPY_HOST_PTR, hostbuf=data)
        groups = 4 * device.info.compute_units
        y = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 64 * groups)
        kernel = cl.Kernel(program, "read_all")
        kernel.set_args(x, y, np.int64(count))
        seconds = timed(lambda k=kernel, g=groups: run(cl, device, k, g))
        found[f"read {megabytes} MB, GB/s"] = round(megabytes / 1e3 / seconds, 1)
    groups, turns = device.info.compute_units, 200_000
    y = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 64 * groups)
    kernel = cl.Kernel(program, "multiply_add")
    kernel.set_args(y, np.float32(0.5), np.int32(turns))
    seconds = timed(lambda: run(cl, device, kernel, groups))
    found["multiply-add, GFLOP/s"] = round(groups * turns * 12 * 16 * 2 / seconds / 1e9, 1)
    print(json.dumps(found))


def run(cl: object, device: object, kernel: object, groups: int) -> None:
    """One launch, waited for."""
    cl.enqueue_nd_range_kernel(device.queue, kernel, (groups,), (1,))  # type: ignore[attr-defined]
    device.queue.finish()  # type: ignore[attr-defined]


def timed(launch: Callable[[], None]) -> float:
    """Median seconds of a launch."""
    launch()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        launch()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
