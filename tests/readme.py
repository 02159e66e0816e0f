"""Writes the README's table of settings from `settings.py`; a test compares the two."""

from __future__ import annotations

from pathlib import Path

from hrxmp.settings import default_text, describe, variable

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- settings: written by `python -m tests.readme`; a test compares -->\n"
END = "<!-- end of settings -->"


def table() -> str:
    """The table's lines."""
    rows = ["| variable | default | what |", "| --- | --- | --- |"]
    for field, _kind, text in describe():
        default = default_text(field)
        rows.append(f"| `{variable(field)}` | {f'`{default}`' if default else ''} | {text} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """The README's text with a fresh table."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table()}{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
