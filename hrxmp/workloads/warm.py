"""`hrxmp-run warm`: compile ahead everything that a model, or a traced run, needs.

Runs in the executor process; compiling is the pool's work as in any run. Which kernels a model
needs comes from its graphs through lowering and dispatch, for every number of tokens. At the end
every kernel is taken from the store once more, with compiling forbidden: that is the proof.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import HrxmpError, UsageError
from hrxmp.kernels.keys import Variant
from hrxmp.workloads.needed import Refused, needed

if TYPE_CHECKING:
    from hrxmp.executor.counts import GraphCounts
    from hrxmp.executor.engine import Executor


class Summary(msgspec.Struct, kw_only=True):
    """What the warm-up did. `verified` kernels came from the store at the end, all of them or
    `missing` names the rest."""

    kernels: int
    compiled: int
    stored: int
    failed: list[str]
    refused: list[str]
    seconds: float
    verified: int = 0
    missing: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether everything is there."""
        return self.verified == self.kernels and not (self.failed or self.refused or self.missing)


def main(args: argparse.Namespace, connect: Callable[[], Executor]) -> int:
    """Warm up and verify; 1 when something is missing. Raises HrxmpError."""
    executor = connect()
    if bool(args.model) == bool(args.from_trace):
        raise UsageError("warm needs a model (-m MODEL) or a trace (--from-trace FILE)")
    if not executor.stores:
        raise UsageError("warm needs a kernel store", remedy="leave --cache, or name a folder")
    refused: list[Refused] = []
    if args.from_trace:
        variants, refused = needed(args.from_trace, executor.components)
    else:
        variants = list(_of_models(args, executor))
    summary = _warm(executor, variants, refused)
    _print(summary, args.output)
    return 0 if summary.ok else 1


def _of_models(args: argparse.Namespace, executor: Executor) -> Iterable[Variant]:
    """The kernels of all graphs of the models, in the order of first need."""
    from hrxmp.models import files
    from hrxmp.models.coverage import all_graphs
    from hrxmp.models.gguf_file import GgufFile

    found: dict[Variant, None] = {}
    for model in args.model:
        file = GgufFile.open(files.resolve(model))
        for label in args.cache_type:
            graphs = all_graphs(
                file,
                executor.weight_storage,
                ubatch=args.ubatch_size,
                kv_dtype=DType.from_label(label),
            )
            for graph in graphs:
                found |= dict.fromkeys(executor.variants(graph))
    return found


def _warm(executor: Executor, variants: list[Variant], refused: list[Refused]) -> Summary:
    begin = monotonic_ns()
    executor.annotate("warm-up")
    done = executor.compile(variants)
    summary = Summary(
        kernels=len(variants),
        compiled=done.counts.compiles + done.counts.joins,
        stored=done.counts.disk_hits,
        failed=[_text(error) for error in done.failed],
        refused=[item.text() for item in refused],
        seconds=0.0,
    )
    executor.annotate("warm-up verified")
    executor.forget_kernels()
    with executor.no_compiles():
        again = executor.compile(variants)
    summary.verified = _from_store(again.counts)
    summary.missing = [_text(error) for error in again.failed]
    summary.seconds = round((monotonic_ns() - begin) / 1e9, 3)
    return summary


def _from_store(counts: GraphCounts) -> int:
    return counts.disk_hits - counts.driver_compiles


def _text(error: HrxmpError) -> str:
    return error.message


def _print(summary: Summary, output: str) -> None:
    if output == "json":
        sys.stdout.write(json.dumps(msgspec.to_builtins(summary) | {"ok": summary.ok}) + "\n")
        return
    write = sys.stdout.write
    write(
        f"{summary.kernels} kernels: {summary.compiled} compiled, {summary.stored} were in the "
        f"store, {len(summary.failed)} failed; {summary.seconds:.1f} s\n"
    )
    for title in ("failed", "refused", "missing"):
        for text in getattr(summary, title):
            write(f"  {title}: {text}\n")
    write(f"verified: {summary.verified} of {summary.kernels} come from the store\n")
