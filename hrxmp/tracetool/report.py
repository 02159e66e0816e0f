"""`hrxmp-trace report`: one HTML page that needs nothing else: verdict, timeline, tables, words."""

from __future__ import annotations

import io
from html import escape

from rich.console import Console

from hrxmp.aggregator.check import Report
from hrxmp.tracetool import summary
from hrxmp.tracetool.explain import explain
from hrxmp.tracetool.view import RunView, ms, title

WIDTH = 1100
ROW = 18
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1140px; color: #222 }
pre { font: 12px/1.35 ui-monospace, monospace; overflow-x: auto; background: #f6f6f6;
      padding: 1em }
.good { color: #176317 } .bad { color: #a31515 }
svg text { font: 11px sans-serif } svg rect:hover { stroke: #000 }
"""


def page(runs: list[RunView], checked: Report) -> str:
    """The page."""
    parts = ["<!doctype html><meta charset=utf-8><title>hrxmp trace</title>"]
    parts.append(f"<style>{STYLE}</style><h1>hrxmp trace</h1>{_verdict(checked)}")
    for run in runs:
        parts.append(f"<h2>Run {escape(run.run_id)}</h2>{timeline(run)}")
        parts.append(f"<pre>{escape(_summary(run))}</pre>")
        parts.append(f"<h3>Explanation</h3><pre>{escape(chr(10).join(explain(run)))}</pre>")
    return "\n".join(parts) + "\n"


def timeline(run: RunView) -> str:
    """Executions, waits and each worker's compiles on one axis of time."""
    rows: dict[str, list[tuple[int, int, str, str]]] = {"executions": [], "waits": []}
    for one in run.executions.values():
        if one.begin and one.end:
            text = f"execution {one.exec_id}: {ms(one.dur_ns)}"
            rows["executions"].append((one.begin.t_ns, one.end.t_ns, "#4a7db5", text))
    for wait in run.waits:
        if wait.end:
            text = f"execution {wait.begin.exec_id} waits for {wait.begin.kernel}"
            rows["waits"].append((wait.begin.t_ns, wait.end.t_ns, "#c2452d", text))
    for wanted in run.requests.values():
        for begin, end in zip(wanted.begins, wanted.ends, strict=False):
            color = "#6f9e4f" if end.outcome == "ok" else "#000"
            text = f"{title(wanted.asked)}: {end.outcome}, {ms(end.compile_ns + end.finish_ns)}"
            rows.setdefault(begin.worker, []).append((begin.t_ns, end.t_ns, color, text))
    spans = [span for row in rows.values() for span in row]
    if not spans:
        return "<p>Nothing to draw.</p>"
    start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
    scale = (WIDTH - 100) / max(stop - start, 1)
    height = ROW * (len(rows) + 1)
    drawn = [_row(index, name, row, start, scale) for index, (name, row) in enumerate(rows.items())]
    axis = f'<text x="100" y="{height - 4}">0</text>'
    axis += f'<text x="{WIDTH}" y="{height - 4}" text-anchor="end">{ms(stop - start)}</text>'
    return f'<svg width="{WIDTH}" height="{height}">{"".join(drawn)}{axis}</svg>'


def _row(
    index: int, name: str, spans: list[tuple[int, int, str, str]], start: int, scale: float
) -> str:
    y = index * ROW
    parts = [f'<text x="0" y="{y + 13}">{escape(name)}</text>']
    for begin, end, color, text in spans:
        x, width = 100 + (begin - start) * scale, max((end - begin) * scale, 1)
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" fill="{color}">'
            f"<title>{escape(text)}</title></rect>"
        )
    return "".join(parts)


def _verdict(checked: Report) -> str:
    if checked.ok:
        return f"<p class=good>{checked.records} records, whole and consistent.</p>"
    items = "".join(f"<li>{escape(one.kind)}: {escape(one.text)}</li>" for one in checked.problems)
    return f"<p class=bad>{len(checked.problems)} problems:</p><ul>{items}</ul>"


def _summary(run: RunView) -> str:
    text = io.StringIO()
    summary.show(run, Console(file=text, width=140, color_system=None))
    return text.getvalue()
