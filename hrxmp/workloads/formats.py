"""Bench results and how they are printed: md, json, jsonl, csv, sql, in llama-bench's dialect.

Runs in the executor process; writes to the stream it is given, row by row, each row flushed, so
that what was measured survives a kill. Field names are llama-bench's where it has them; hrxmp's
own columns come last. It measures nothing.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Sequence
from typing import Final, Literal, TextIO

import msgspec

from hrxmp.workloads.arguments import test_name

CacheState = Literal["cold", "warm", "mixed"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One test's result with its provenance. Times in ns, rates in tokens/s, sizes in bytes."""

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    flash_attn: bool
    devices: str
    use_mmap: bool
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]
    platform: str
    device: str
    driver: str
    hrxmp_version: str
    warmup: bool
    compiles: int
    wait_ms: float
    cache_state: CacheState

    @property
    def test(self) -> str:
        """The test's name: `pp512`, `tg128`, `pp64+tg16`, `tg128 @ d512`."""
        return test_name(self.n_prompt, self.n_gen, self.n_depth)


def statistics_of(samples_ns: Sequence[int], n_tokens: int) -> dict[str, object]:
    """The columns avg_ns to samples_ts of a test of `n_tokens` tokens a sample."""
    rates = [n_tokens * 1e9 / sample for sample in samples_ns]
    several = len(samples_ns) > 1
    return {
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(statistics.stdev(samples_ns)) if several else 0,
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": statistics.stdev(rates) if several else 0.0,
        "samples_ns": tuple(samples_ns),
        "samples_ts": tuple(rates),
    }


class Printer:
    """Writes rows to a stream. `begin` once, `row` for each, `end` once, also after an error."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def begin(self) -> None:
        """Before the first row."""

    def row(self, row: Row) -> None:
        """Write one row and flush it."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last row."""

    def write(self, text: str) -> None:
        """Write whole lines at once."""
        self.stream.write(text)
        self.stream.flush()


class JsonPrinter(Printer):
    """One array of objects."""

    _rows = 0

    def begin(self) -> None:
        self.write("[\n")

    def row(self, row: Row) -> None:
        text = msgspec.json.format(msgspec.json.encode(row), indent=2).decode()
        indented = "\n".join("  " + line for line in text.splitlines())
        self.write((",\n" if self._rows else "") + indented)
        self._rows += 1

    def end(self) -> None:
        self.write("\n]\n" if self._rows else "]\n")


class JsonlPrinter(Printer):
    """One object a line."""

    def row(self, row: Row) -> None:
        self.write(msgspec.json.encode(row).decode() + "\n")


class CsvPrinter(Printer):
    """A header and one line a row; every value quoted, samples as JSON arrays."""

    def begin(self) -> None:
        self._line(Row.__struct_fields__)

    def row(self, row: Row) -> None:
        self._line([_cell(value) for value in msgspec.structs.astuple(row)])

    def _line(self, cells: Sequence[str]) -> None:
        buffer = io.StringIO()
        csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(cells)
        self.write(buffer.getvalue())


class SqlPrinter(Printer):
    """A table and one insert a row, for SQLite."""

    table: Final = "llama_bench"

    def begin(self) -> None:
        kinds = {"int": "INTEGER", "bool": "INTEGER", "float": "REAL"}
        columns = ",\n".join(
            f"  {name} {kinds.get(str(Row.__annotations__[name]), 'TEXT')}"
            for name in Row.__struct_fields__
        )
        self.write(f"CREATE TABLE IF NOT EXISTS {self.table} (\n{columns}\n);\n\n")

    def row(self, row: Row) -> None:
        names = ", ".join(Row.__struct_fields__)
        values = ", ".join(_literal(value) for value in msgspec.structs.astuple(row))
        self.write(f"INSERT INTO {self.table} ({names}) VALUES ({values});\n")


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the table: `width` of its cells; `shown` only where it varies when `optional`."""

    title: str
    width: int
    text: Callable[[Row], str]
    left: bool = False
    optional: bool = False


DEFAULTS: Final = {"n_batch": "2048", "n_ubatch": "512", "type_k": "f32", "type_v": "f32"}
"""Columns that the table leaves out while they have this value."""

COLUMNS: Final = (
    Column(title="model", width=30, text=lambda row: row.model_type, left=True),
    Column(title="size", width=10, text=lambda row: size_text(row.model_size)),
    Column(title="params", width=10, text=lambda row: count_text(row.model_n_params)),
    Column(title="backend", width=10, text=lambda row: row.backends, left=True),
    Column(title="n_batch", width=7, text=lambda row: str(row.n_batch), optional=True),
    Column(title="n_ubatch", width=8, text=lambda row: str(row.n_ubatch), optional=True),
    Column(title="type_k", width=6, text=lambda row: row.type_k, optional=True),
    Column(title="type_v", width=6, text=lambda row: row.type_v, optional=True),
    Column(title="test", width=15, text=lambda row: row.test),
    Column(title="t/s", width=20, text=lambda row: f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}"),
    Column(title="compiles", width=8, text=lambda row: str(row.compiles)),
    Column(title="wait_ms", width=8, text=lambda row: f"{row.wait_ms:.1f}"),
    Column(title="cache_state", width=11, text=lambda row: row.cache_state),
)


class MarkdownPrinter(Printer):
    """llama-bench's table. Which optional columns there are is decided by `shown`."""

    def __init__(self, stream: TextIO, shown: frozenset[str] = frozenset()) -> None:
        super().__init__(stream)
        self._columns = [c for c in COLUMNS if not c.optional or c.title in shown]
        self._last: Row | None = None

    def begin(self) -> None:
        titles = [_pad(column.title, column) for column in self._columns]
        rules = ["-" * c.width if c.left else "-" * (c.width - 1) + ":" for c in self._columns]
        self._line(titles)
        self._line(rules)

    def row(self, row: Row) -> None:
        self._line([_pad(column.text(row), column) for column in self._columns])
        self._last = row

    def end(self) -> None:
        if self._last is not None:
            last = self._last
            self.write(f"\nbuild: hrxmp {last.hrxmp_version}, {last.device}, {last.driver}\n")

    def _line(self, cells: Sequence[str]) -> None:
        self.write("| " + " | ".join(cells) + " |\n")


def printer(form: str, stream: TextIO, shown: frozenset[str] = frozenset()) -> Printer:
    """The printer for one of FORMATS."""
    if form == "md":
        return MarkdownPrinter(stream, shown)
    kinds = {"json": JsonPrinter, "jsonl": JsonlPrinter, "csv": CsvPrinter, "sql": SqlPrinter}
    return kinds[form](stream)


def size_text(nbytes: int) -> str:
    """A file size as llama-bench writes it."""
    mib = nbytes / (1 << 20)
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.2f} MiB"


def count_text(count: int) -> str:
    """A parameter count as llama-bench writes it."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _pad(text: str, column: Column) -> str:
    return text.ljust(column.width) if column.left else text.rjust(column.width)


def _cell(value: object) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, tuple | bool) else str(value)


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float):
        return repr(value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return "'" + text.replace("'", "''") + "'"
