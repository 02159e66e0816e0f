"""Builds a second of the compile pool on a GPU: `python -m benchmarks.gpu_pool [WORKERS ...]`.

Real kernels through real processes, each kernel different and none in a store. Workers are started
by as many first builds, which are not counted; then each worker gets six builds more.
"""

from __future__ import annotations

import argparse
import itertools
import time

from hrxmp.dtypes import DType
from hrxmp.kernels import build, dispatch
from hrxmp.kernels.device import Device, open_device, prepare_loader
from hrxmp.messages import CompileRequest
from tests.process.pool_fixture import outcome, running_pool

_BUILDS_A_WORKER = 6
_rows = itertools.count(1024, 16)


def request(device: Device) -> CompileRequest:
    """A product that nobody has compiled yet."""
    n, k = next(_rows), 2048
    layout = dispatch.weight_layout(device.traits, DType.Q4_K, n, k)
    weight = dispatch.WeightSpec(dtype=DType.Q4_K, layout=layout, n=n)
    variant = dispatch.mul_mat(device.traits, weights=(weight,), k=k, m=1).variant
    parts = build.components(device, variant)
    return CompileRequest(
        request_id=n, key=parts.digest(), variant=variant, components=parts, device=device.spec
    )


def builds_a_second(device: Device, workers: int) -> tuple[float, float]:
    """Seconds until all workers have built once, and builds a second after that."""
    with running_pool(compiler="", workers=workers) as pool:
        client = pool.client()

        def build_all(count: int) -> float:
            begin = time.perf_counter()
            tickets = [client.request(request(device), 1) for _ in range(count)]
            for ticket in tickets:
                if (error := outcome(ticket, 60).error) is not None:
                    raise error
            return time.perf_counter() - begin

        start_s = build_all(workers)
        count = max(12, _BUILDS_A_WORKER * workers)
        rate = count / build_all(count)
        client.close()
    return start_s, rate


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_pool")
    parser.add_argument("--device", help="as of hrxmp-run")
    parser.add_argument("workers", type=int, nargs="*", default=[1, 16])
    args = parser.parse_args()
    prepare_loader()
    device = open_device(args.device)
    alone = 0.0
    for workers in args.workers:
        start_s, rate = builds_a_second(device, workers)
        times = f", {rate / alone:.1f} times" if alone else ""
        label = f"pool, {workers} workers"
        print(f"{label:36} {rate:.1f} builds/s{times}; first builds {start_s:.2f} s", flush=True)
        alone = alone or rate


if __name__ == "__main__":
    main()
