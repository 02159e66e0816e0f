"""The ordering contract at length: many simulated worlds with faults, and controls without rules.

    python benchmarks/trace_order.py [--records N] [--seed FIRST]

Prints one line a kind of world: worlds, records, causal pairs, late and repeated records, broken
promises. Ends with 1 when a promise broke, or when a control did not break one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.trace_simulator import Rules, World

KINDS = {
    "stops": Rules(),
    "kills": Rules(stops=0, aggregator_kills=3),
    "stops and kills": Rules(aggregator_kills=3),
    "skew of 5 s": Rules(skew_ms=5000),
    "half of all batches lost or repeated": Rules(stops=0, loss=0.25, repeats=0.25),
}
CONTROLS = {
    "no watermark": Rules(stops=0, watermark=False),
    "no merge on receive": Rules(stops=0, merge_on_receive=False),
    "no merge of welcome": Rules(stops=0, merge_welcome=False),
    "early acknowledgement": Rules(stops=0, ack_after_write=False, aggregator_kills=3),
}


def many(name: str, rules: Rules, records: int, seed: int) -> int:
    """Worlds of one kind until so many records were written; the number of broken promises."""
    written = pairs = late = repeats = broken = worlds = 0
    while written < records:
        world = World(seed + worlds, sources=8, duration_ms=2000, rules=rules).run()
        worlds += 1
        written += len(world.output)
        pairs += len(world.effects)
        late += sum(is_late for _number, is_late, _clock in world.output)
        repeats += len(world.output) - len({number for number, _late, _clock in world.output})
        verdict = world.verdict()
        broken += len(verdict)
        if verdict and "no " not in name and "early" not in name:
            print(f"    seed {seed + worlds - 1}: {verdict}")
    print(
        f"{name:40s} {worlds:6d} worlds {written:10d} records {pairs:8d} pairs"
        f" {late:8d} late {repeats:7d} repeats {broken:5d} broken",
        flush=True,
    )
    return broken


def main() -> int:
    """Run all kinds and all controls."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("--records", type=int, default=10_000_000)
    line.add_argument("--seed", type=int, default=0)
    options = line.parse_args()
    begin = time.monotonic()
    share = options.records // len(KINDS)
    bad = [name for name, rules in KINDS.items() if many(name, rules, share, options.seed)]
    blind = [name for name, rules in CONTROLS.items() if not many(name, rules, 50_000, 0)]
    print(f"{time.monotonic() - begin:.0f} s; broken: {bad or 'none'}; blind: {blind or 'none'}")
    return 1 if bad or blind else 0


if __name__ == "__main__":
    sys.exit(main())
