"""`hrxmp-run generate`: continue a prompt, text streamed to stdout, one line of times to stderr.

Runs in the executor process. With `--ids` stdout carries one JSON array of token ids instead.
Nothing is warmed up: under `--on-compile` the guard is in force from the first execution.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import UsageError
from hrxmp.models import files
from hrxmp.models.generator import LlamaModel, generate
from hrxmp.models.gguf_file import GgufFile
from hrxmp.models.llama import LlamaConfig
from hrxmp.models.sampling import Sampler, SamplingParams
from hrxmp.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hrxmp import Execution, Executor

_NO_LIMIT: Final = -1


class Times(msgspec.Struct, kw_only=True):
    """When what was done, host monotonic ns; and what was compiled meanwhile."""

    begin: int
    loaded: int = 0
    first: int = 0
    done: int = 0
    compiles: int = 0
    wait_ns: int = 0

    def add(self, execution: Execution) -> None:
        """Add one execution's counts."""
        self.compiles += execution.counts.compiles + execution.counts.joins  # the prefetched ones
        self.wait_ns += execution.counts.wait_ns

    def line(self, prompt: int, produced: int) -> str:
        """The summary for stderr."""
        first = (self.first or self.done) - self.loaded
        rest = self.done - self.loaded - first
        later = max(produced - 1, 0)
        return (
            f"hrxmp generate: load {(self.loaded - self.begin) / 1e9:.2f} s, "
            f"prompt {prompt} tokens {first / 1e9:.3f} s ({_rate(prompt, first)} t/s), "
            f"then {later} tokens {rest / 1e9:.3f} s ({_rate(later, rest)} t/s), "
            f"compiles {self.compiles}, waited {self.wait_ns / 1e6:.0f} ms"
        )


def main(args: argparse.Namespace, connect: Callable[[], Executor]) -> int:
    """Generate; the exit status. Raises HrxmpError on bad flags, files and prompts.

    What needs no device comes first: compile workers open theirs meanwhile.
    """
    times = Times(begin=time.perf_counter_ns())
    sampler = Sampler(
        SamplingParams(temperature=args.temp, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    )
    count = _count(args.n_predict)
    file = GgufFile.open(files.resolve(args.model))
    tokenizer = Tokenizer.from_gguf(file)
    prompt = tokenizer.encode(args.prompt)
    if not args.prompt or not prompt:
        raise UsageError("the prompt is empty", remedy="give some text with -p")
    executor = connect()
    model = LlamaModel.load(
        executor,
        file,
        context=args.ctx_size or _context(file, len(prompt), count),
        ubatch=args.ubatch_size,
        kv_dtype=DType.from_label(args.cache_type),
        prompt=len(prompt),
    )
    model.on_execution = times.add
    times.loaded = time.perf_counter_ns()
    executor.warm()
    ends = frozenset[int]() if args.ignore_eos else tokenizer.ends
    tokens = _timed(generate(model, prompt, sampler, count=count, ends=ends), times)
    produced = _print_ids(tokens) if args.ids else _print_text(tokens, tokenizer)
    times.done = time.perf_counter_ns()
    sys.stderr.write(times.line(len(prompt), produced) + "\n")
    return 0


def _count(wanted: int) -> int | None:
    if wanted < _NO_LIMIT:
        raise UsageError(f"-n {wanted}: expected 0 or more, or -1 for no limit")
    return None if wanted == _NO_LIMIT else wanted


def _context(file: GgufFile, prompt: int, count: int | None) -> int:
    """Room for the prompt and what may come, at most what the model was trained for."""
    limit = LlamaConfig.from_gguf(file).context_length
    return limit if count is None else min(prompt + count, limit)


def _timed(tokens: Iterator[int], times: Times) -> Iterator[int]:
    for token in tokens:
        times.first = times.first or time.perf_counter_ns()
        yield token


def _print_ids(tokens: Iterator[int]) -> int:
    ids = list(tokens)
    sys.stdout.write(json.dumps(ids) + "\n")
    sys.stdout.flush()
    return len(ids)


def _print_text(tokens: Iterator[int], tokenizer: Tokenizer) -> int:
    """Write each piece as soon as its characters are whole."""
    stream = tokenizer.stream()
    produced = 0
    for produced, token in enumerate(tokens, 1):  # noqa: B007  # the count is the result
        sys.stdout.write(stream.push(token))
        sys.stdout.flush()
    sys.stdout.write(stream.finish() + "\n")
    sys.stdout.flush()
    return produced


def _rate(count: int, elapsed_ns: int) -> str:
    return f"{count * 1e9 / elapsed_ns:.1f}" if elapsed_ns > 0 else "-"
