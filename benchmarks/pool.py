"""What the compile pool itself costs: `python -m benchmarks.pool`. One JSON object on stdout.

A compiler that does nothing stands in for OpenCL, so every figure is the pool's own: first answer
of a cold pool, round trip with a warm worker, jobs a second, joins, disk hits, status while busy.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hrxmp.kernels.entry import StoreEntry
from hrxmp.kernels.store import Store
from tests.process.pool_fixture import make_request, outcome, running_pool

ROUNDS = 300


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure() -> dict[str, float]:
    """All figures, times in milliseconds unless the name says otherwise."""
    figures: dict[str, float] = {}
    with running_pool(workers=2) as pool:
        client = pool.client()

        def once(n: int) -> None:
            assert outcome(client.request(make_request(n=n), 1)).error is None

        figures["first_answer_of_a_cold_pool_ms"] = seconds(lambda: once(-1)) * 1e3
        trips = [seconds(lambda n=n: once(n)) for n in range(ROUNDS)]
        figures["round_trip_p50_ms"] = statistics.median(trips) * 1e3
        figures["round_trip_p99_ms"] = sorted(trips)[int(ROUNDS * 0.99)] * 1e3
        hits = [seconds(lambda n=n: once(n)) for n in range(ROUNDS)]
        figures["pool_disk_hit_p50_ms"] = statistics.median(hits) * 1e3

        def many() -> None:
            tickets = [client.request(make_request(m=n), 1) for n in range(1000)]
            assert all(outcome(ticket).error is None for ticket in tickets)

        figures["jobs_per_second"] = 1000 / seconds(many)
        slow = client.request(make_request(do="sleep", arg="3"), 1)
        pool.until(lambda reply: reply.pending == 1)
        answers = [pool.status()[1] for _ in range(50)]
        figures["status_while_compiling_max_ms"] = max(answers) * 1e3
        outcome(slow)
        client.close()
        figures |= _store(Path(pool.settings.cache))
    return {name: round(value, 3) for name, value in figures.items()}


def _store(folder: Path) -> dict[str, float]:
    store, requests = Store(folder), [make_request(n=n) for n in range(ROUNDS)]
    reads = []
    for request in requests:
        start = time.perf_counter()
        assert isinstance(store.get(request.key, request.components), StoreEntry)
        reads.append(time.perf_counter() - start)
    first = seconds(store.components_index)
    return {
        "store_get_p50_us": statistics.median(reads) * 1e6,
        "store_entries": float(store.entry_count()),
        "store_index_first_ms": first * 1e3,
        "store_index_again_ms": seconds(store.components_index) * 1e3,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
    sys.exit(0)
