"""Where the time to the first token goes: `gpu_start.py LABEL=TRACE.jsonl ...`.

Times are from the launcher's start, milliseconds, of the executor's first graph execution; each
trace has a column. The rows add up to the first token. Beside it: the second, and what was compiled
until the first, which is the sum over all processes, most of it meanwhile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]

_ROWS = (
    "start and imports",
    "device found to work",
    "device opened, weights",
    "kernels waited for",
    "kernels loaded",
    "first run, the rest",
    "first token",
    "(second token)",
    "(compiled until the first)",
)


def times(path: Path) -> dict[str, float]:
    """The table's rows of a trace. LookupError when it has no whole execution."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records: Records = sorted(map(json.loads, lines), key=lambda item: item["t_ns"])
    executor = [item for item in records if item["source"] == "executor"]
    begin, graph = (_first(executor, name) for name in ("run-begin", "graph-begin"))
    ends = [item for item in executor if item["event"] == "graph-end"]
    end = _first(ends, "graph-end")
    inside = [item for item in executor if graph["t_ns"] <= item["t_ns"] <= end["t_ns"]]
    waited = sum(item["dur_ns"] for item in inside if item["event"] == "wait-end")
    waited += _compiled(inside)  # in the executor, when nothing else compiles
    loads = [item for item in inside if item["event"] == "kernel-load"]
    loaded = sum(item["load_ns"] + item["launch_ns"] for item in loads)
    opening = begin.get("opening_ns", 0)
    values = (
        begin["t_ns"] - opening,
        opening,
        graph["t_ns"] - begin["t_ns"],
        waited,
        loaded,
        end["t_ns"] - graph["t_ns"] - waited - loaded,
        end["t_ns"],
        ends[1]["t_ns"] if len(ends) > 1 else 0,
        _compiled([item for item in records if item["t_ns"] <= end["t_ns"]]),
    )
    return dict(zip(_ROWS, (value / 1e6 for value in values), strict=True))


def _first(records: Records, event: str) -> dict[str, Any]:
    for item in records:
        if item["event"] == event:
            return item
    raise LookupError(f"no {event}")


def _compiled(records: Records) -> int:
    ends = [item for item in records if item["event"] == "compile-end"]
    return sum(item["compile_ns"] + item["finish_ns"] for item in ends)


def main() -> None:
    tables = {}
    for word in sys.argv[1:]:
        label, _, path = word.partition("=")
        try:
            tables[label] = times(Path(path))
        except (OSError, LookupError) as error:
            print(f"{label}: {error}")
    print(f"{'ms to the first token':27}" + "".join(f"{label:>10}" for label in tables))
    for row in _ROWS:
        print(f"{row:27}" + "".join(f"{table[row]:10.0f}" for table in tables.values()))


if __name__ == "__main__":
    main()
