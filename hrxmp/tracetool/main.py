"""hrxmp-trace: reads traces for people and scripts. A command-line surface; starts nothing.

    hrxmp-trace check|extract|summary|explain|export|report FILE|-
    hrxmp-trace diff A B
    hrxmp-trace schema
    hrxmp-trace tail|top ENDPOINT

Every reader takes mixed output (`2> log`) and finds the records in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator

import msgspec
from rich.console import Console

from hrxmp import records
from hrxmp.aggregator import check as checker
from hrxmp.aggregator import reader
from hrxmp.errors import HrxmpError, UsageError
from hrxmp.settings import Settings
from hrxmp.tracetool import diff, explain, export, live, report, summary, tail, top
from hrxmp.tracetool.view import RunView, views

TRACES = "http://127.0.0.1:4318/v1/traces"
"""Where a collector of this host listens by default."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(prog="hrxmp-trace", description="Read a trace of hrxmp.")
    commands = line.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_function, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == "diff":
            command.add_argument("before", metavar="A")
            command.add_argument("file", metavar="B")
        elif name in ("tail", "top", "forward"):
            command.add_argument("endpoint", nargs="?", default="", metavar="ENDPOINT")
        elif name != "schema":
            command.add_argument("file", metavar="FILE", help="a file, or - for standard input")
        if name in ("summary", "explain", "export", "report", "diff"):
            command.add_argument("--run", default="", help="only this run (its beginning will do)")
        if name == "export":
            command.add_argument("--format", choices=("chrome", "csv", "otlp"), default="chrome")
            command.add_argument("--to", default=TRACES, metavar="URL", help="OTLP/HTTP collector")
        if name == "tail":
            _add_filters(command)
        if name == "forward":
            command.add_argument("--to", default=TRACES, metavar="URL", help="OTLP/HTTP collector")
        if name == "check":
            command.add_argument("--quiet", action="store_true", help="problems only")
    return line


def _add_filters(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run", default="*", metavar="GLOB")
    command.add_argument("--kernel", default="*", metavar="GLOB")
    command.add_argument("--event", nargs="*", default=[], metavar="NAME")
    command.add_argument("--failures", action="store_true", help="only what went wrong")
    command.add_argument("--waits-over", type=float, default=-1.0, metavar="MS")
    command.add_argument("--json", action="store_true", help="JSON lines also on a terminal")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = parser().parse_args(argv)
    try:
        return COMMANDS[options.command][0](options)
    except HrxmpError as error:
        sys.stderr.write(f"hrxmp-trace: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _check(options: argparse.Namespace) -> int:
    report_ = checker.check(_read(options.file))
    out = sys.stdout
    for problem in report_.problems:
        where = f"line {problem.number}: " if problem.number else ""
        out.write(f"PROBLEM {problem.kind}: {where}{problem.text}\n")
    if options.quiet:
        return 0 if report_.ok else 1
    for note in report_.notes:
        out.write(f"note {note.kind}: {note.text}\n")
    out.write(
        f"{report_.records} records of {report_.runs} runs in order, {report_.executions} "
        f"executions, {report_.requests} requests, {report_.waits} waits; "
        f"{report_.late} late, {report_.repeats} repeats removed, {report_.other} other lines\n"
    )
    out.write("the trace is whole and consistent\n" if report_.ok else "the trace is NOT right\n")
    return 0 if report_.ok else 1


def _extract(options: argparse.Namespace) -> int:
    with _open(options.file) as stream:
        for raw in reader.extract(stream):
            sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()
    return 0


def _summary(options: argparse.Namespace) -> int:
    console = Console()
    for run in _runs(options):
        summary.show(run, console)
    return 0


def _explain(options: argparse.Namespace) -> int:
    for run in _runs(options):
        for line in explain.explain(run):
            sys.stdout.write(line + "\n")
    return 0


def _diff(options: argparse.Namespace) -> int:
    (before, *more), (after, *others) = (
        views(_read(path), options.run) for path in (options.before, options.file)
    )
    if more or others:
        raise UsageError("more than one run in a file", remedy="name one with --run")
    lines, width = list(diff.diff(before, after)), Console().width
    for line in (*lines, diff.timing(before, after)):
        sys.stdout.write("\n".join(folded(line, width)) + "\n")
    return 1 if lines else 0


def folded(line: str, width: int) -> list[str]:
    """A line as lines of at most `width`, parted at spaces, all but the first indented."""
    return textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False)


def _export(options: argparse.Namespace) -> int:
    runs = _runs(options)
    if options.format == "otlp":
        return _send((line.record for run in runs for line in run.lines), options.to)
    write = export.chrome if options.format == "chrome" else export.table
    write(runs, sys.stdout)
    return 0


def _send(lines: Iterable[records.Record], url: str) -> int:
    try:
        from hrxmp.tracetool import otlp
    except ImportError as error:
        raise UsageError(
            "OpenTelemetry's SDK is not installed", remedy="install hrxmp with the extra `otlp`"
        ) from error
    sent, failed = otlp.send(lines, url)
    sys.stdout.write(f"{sent} spans sent to {url}, {failed} refused\n")
    return 1 if failed else 0


def _report(options: argparse.Namespace) -> int:
    trace = _read(options.file)
    sys.stdout.write(report.page(views(trace, options.run), checker.check(trace)))
    return 0


def _schema(_options: argparse.Namespace) -> int:
    sys.stdout.write(schema_text())
    return 0


def _tail(options: argparse.Namespace) -> int:
    filters = tail.Filters(
        run=options.run,
        kernel=options.kernel,
        events=frozenset(options.event),
        failures=options.failures,
        waits_over_ms=options.waits_over,
    )
    pretty = sys.stdout.isatty() and not options.json
    console = Console()
    attached = _attach(options)
    try:
        for line in tail.tail(attached.blocks(), filters):
            if pretty:
                tail.show(line, console)
            else:
                sys.stdout.buffer.write(line.raw + b"\n")
                sys.stdout.buffer.flush()
    finally:
        attached.close()
    return 0


def _forward(options: argparse.Namespace) -> int:
    """Until interrupted; what is open then is ended and sent too."""
    attached = _attach(options)

    def lines() -> Iterator[records.Record]:
        try:
            for line in tail.tail(attached.blocks(), tail.Filters()):
                yield line.record
        except KeyboardInterrupt:
            return

    try:
        return _send(lines(), options.to)
    finally:
        attached.close()


def _top(options: argparse.Namespace) -> int:
    attached = _attach(options)
    try:
        top.run(attached, Console())
    finally:
        attached.close()
    return 0


def _attach(options: argparse.Namespace) -> live.Attached:
    settings = Settings.from_environment(os.environ)
    endpoint = options.endpoint or settings.aggregator
    if not endpoint:
        raise UsageError("no endpoint", remedy="name one, or set HRXMP_AGGREGATOR")
    return live.Attached(endpoint, settings.curve_dir)


def schema_text() -> str:
    """The JSON Schema of a line, as shipped in `trace-schema.json`."""
    return msgspec.json.format(msgspec.json.encode(records.schema())).decode() + "\n"


def _runs(options: argparse.Namespace) -> list[RunView]:
    return views(_read(options.file), options.run)


def _read(path: str) -> reader.Trace:
    with _open(path) as stream:
        return reader.read(stream)


def _open(path: str) -> reader.Stream:
    try:
        return reader.open_stream(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "check": (_check, "prove that a trace is whole and consistent; exit code 1 when it is not"),
    "extract": (_extract, "print only the records of mixed output"),
    "summary": (_summary, "tables: compiles by kernel, the slowest, executions that waited"),
    "explain": (_explain, "each stall in words: who waited, on what, asked for by whom, why"),
    "diff": (_diff, "compare keys and counts of two traces; exit code 1 when they differ"),
    "export": (_export, "for other tools: Chrome trace JSON (Perfetto reads it), CSV, or OTLP"),
    "report": (_report, "one HTML page: verdict, timeline, tables, explanation"),
    "tail": (_tail, "the live trace of a running aggregator, through filters"),
    "top": (_top, "a live table of the runs of an aggregator"),
    "forward": (_forward, "send the live trace to an OpenTelemetry collector as spans"),
    "schema": (_schema, "the JSON Schema of a trace line"),
}


if __name__ == "__main__":
    sys.exit(main())
