"""Where the time to the first token goes: `gpu_start.py LABEL=TRACE.jsonl ...`.

Times are from the launcher's start, milliseconds, of the executor's first graph execution; each
trace has a column.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_ROWS = ("until device is open", "weights", "kernels waited for", "kernels loaded", "first token")


def times(path: Path) -> dict[str, float]:
    """The table's rows of a trace."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = sorted(map(json.loads, lines), key=lambda item: item["t_ns"])
    executor = [item for item in records if item["source"] == "executor"]

    def first(event: str) -> dict[str, Any]:
        return next(item for item in executor if item["event"] == event)

    begin, graph, end = first("run-begin"), first("graph-begin"), first("graph-end")
    inside = [item for item in executor if graph["t_ns"] <= item["t_ns"] <= end["t_ns"]]
    waited = sum(item["dur_ns"] for item in inside if item["event"] == "wait-end")
    waited += sum(item["compile_ns"] for item in inside if item["event"] == "compile-end")
    loads = [item for item in inside if item["event"] == "kernel-load"]
    values = (
        begin["t_ns"],
        graph["t_ns"] - begin["t_ns"],
        waited,
        sum(item["load_ns"] + item["launch_ns"] for item in loads),
        end["t_ns"],
    )
    return dict(zip(_ROWS, (value / 1e6 for value in values), strict=True))


def main() -> None:
    tables = {}
    for word in sys.argv[1:]:
        label, _, path = word.partition("=")
        tables[label] = times(Path(path))
    print(f"{'ms':22}" + "".join(f"{label:>12}" for label in tables))
    for row in _ROWS:
        print(f"{row:22}" + "".join(f"{table[row]:12.0f}" for table in tables.values()))


if __name__ == "__main__":
    main()
