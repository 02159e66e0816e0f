"""The flags of `bench` and `generate`, and the tests that bench's flags mean.

The launcher parses with this before anything heavy is loaded, so it imports neither numpy nor the
models; the workloads get the parsed arguments in the executor process.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from hrxmp.errors import UsageError

FORMATS: Final = ("md", "json", "jsonl", "csv", "sql")
_CACHE_TYPES: Final = ("f32", "f16")
_MOST_VALUES: Final = 10_000


def test_name(n_prompt: int, n_gen: int, n_depth: int) -> str:
    """llama-bench's name of a test."""
    parts = [f"pp{n_prompt}"] * bool(n_prompt) + [f"tg{n_gen}"] * bool(n_gen)
    return "+".join(parts) + (f" @ d{n_depth}" if n_depth else "")


test_name.__test__ = False  # type: ignore[attr-defined]  # pytest: not a test


class BenchTest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the result: what is run on which model with which settings."""

    model: str
    n_prompt: int
    n_gen: int
    n_depth: int
    n_batch: int
    n_ubatch: int
    kv_type: str

    @property
    def name(self) -> str:
        """llama-bench's name."""
        return test_name(self.n_prompt, self.n_gen, self.n_depth)

    @property
    def n_tokens(self) -> int:
        """Tokens that are timed."""
        return self.n_prompt + self.n_gen


class HelpFormatter(argparse.HelpFormatter):
    """Adds a flag's default to its help, where it has one that the help does not say."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "default" in text or action.default in (None, False, argparse.SUPPRESS):
            return text
        return text + " (default %(default)s)"


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """llama-bench's flags; lists with commas, or flags repeated."""
    add = parser.add_argument
    add("-m", "--model", action="extend", type=_words, metavar="MODEL", help="file or known name")
    numbers: dict[str, Any] = {"action": "extend", "type": _numbers, "metavar": "N"}
    add("-p", "--n-prompt", **numbers, help="prompt tokens, a test each (default 512; 0: none)")
    add("-n", "--n-gen", **numbers, help="tokens to generate, a test each (default 128; 0: none)")
    add("-pg", action="append", type=_pair, metavar="P,G", help="P prompt tokens, then G more")
    add("-d", "--n-depth", **numbers, help="tokens already in the context (default 0)")
    add("-b", "--batch-size", **numbers, help="tokens a batch (default 2048)")
    add("-ub", "--ubatch-size", **numbers, help="tokens a graph execution (default 512)")
    types: dict[str, Any] = {"action": "extend", "type": _words, "metavar": "TYPE"}
    add("-ctk", "--cache-type-k", **types, help="type of cached keys: f32 (default) or f16")
    add("-ctv", "--cache-type-v", **types, help="type of cached values: as the keys")
    add("-r", "--repetitions", type=_count, default=5, help="samples a test (default 5)")
    add("--no-warmup", action="store_true", help="time the first run too")
    add("--progress", action="store_true", help="say on stderr what runs")
    add("--profile", action="store_true", help="after each test, time its kernels one by one")
    add("-o", "--output", choices=FORMATS, default="md", help="format on stdout (default md)")
    add("-oe", "--output-err", choices=FORMATS, help="also print to stderr in this format")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of generate."""
    add = parser.add_argument
    add("-m", "--model", required=True, metavar="MODEL", help="file or known name")
    add("-p", "--prompt", required=True, metavar="TEXT", help="text to continue")
    add("-n", "--n-predict", type=int, default=128, metavar="N", help="most tokens (-1: no limit)")
    add("-c", "--ctx-size", type=_count, metavar="N", help="most tokens with the prompt")
    add("-ub", "--ubatch-size", type=_count, default=512, metavar="N", help="tokens an execution")
    add("-ctk", "--cache-type", choices=_CACHE_TYPES, default="f32", help="type of the KV cache")
    add("--temp", type=float, default=0.8, metavar="T", help="temperature (0: greedy)")
    add("--top-k", type=int, default=40, metavar="K", help="keep the K best (0: all)")
    add("--top-p", type=float, default=0.95, metavar="P", help="keep the best of total share P")
    add("-s", "--seed", type=int, metavar="S", help="makes sampling repeatable")
    add("--ignore-eos", action="store_true", help="go on after an end of sequence")
    add("--ids", action="store_true", help="print token ids as one JSON array instead of text")


def add_warm_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of warm."""
    add = parser.add_argument
    add("-m", "--model", action="extend", type=_words, metavar="MODEL", help="file or known name")
    add("--from-trace", metavar="FILE", help="what the runs of this trace needed (-: stdin)")
    add("-ub", "--ubatch-size", type=_count, default=512, metavar="N", help="tokens an execution")
    types: dict[str, Any] = {"nargs": "+", "choices": _CACHE_TYPES, "default": ["f32"]}
    add("-ctk", "--cache-type", **types, help="types of the KV cache (default f32)")
    add("-o", "--output", choices=("text", "json"), default="text", help="summary on stdout")


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of tune."""
    add = parser.add_argument
    add("-m", "--model", metavar="MODEL", help="file or known name, whose kernels are tuned")
    add("-ub", "--ubatch-size", type=_count, default=512, metavar="N", help="tokens an execution")
    add("-ctk", "--cache-type", choices=_CACHE_TYPES, default="f32", help="type of the KV cache")
    add("-k", "--kernel", metavar="TEXT", help="only kernels with this in their line")
    add("-r", "--rounds", type=_count, default=9, metavar="N", help="timings of each finalist")
    add("--list", action="store_true", help="show what was found before, and end")
    add("--clear", action="store_true", help="forget what was found on this device, and end")
    add("-o", "--output", choices=("text", "json"), default="text", help="table on stdout")


def bench_tests(args: argparse.Namespace) -> list[BenchTest]:
    """The tests that the flags ask for, in llama-bench's order."""
    if not args.model:
        raise UsageError("bench needs a model: -m MODEL")
    types = args.cache_type_k or ["f32"]
    _check_types(types, args.cache_type_v or types)
    batches = args.batch_size or [2048]
    ubatches = args.ubatch_size or [512]
    if min(*batches, *ubatches) < 1:
        raise UsageError("-b and -ub must be at least 1")
    pairs = [(n, 0) for n in ([512] if args.n_prompt is None else args.n_prompt)]
    pairs += [(0, n) for n in ([128] if args.n_gen is None else args.n_gen)]
    pairs += args.pg or []
    tests = [
        BenchTest(
            model=model, n_prompt=prompt, n_gen=gen, n_depth=depth, n_batch=batch,
            n_ubatch=min(batch, ubatch), kv_type=kv_type,
        )
        for model, kv_type, depth, batch, ubatch, (prompt, gen) in itertools.product(
            args.model, types, args.n_depth or [0], batches, ubatches, pairs
        )
        if prompt or gen
    ]  # fmt: skip
    if not tests:
        raise UsageError("no test is left: -p, -n and -pg are all 0")
    return tests


def _check_types(keys: list[str], values: list[str]) -> None:
    for name in (*keys, *values):
        if name not in _CACHE_TYPES:
            raise UsageError(f"cache type {name!r}: expected f32 or f16")
    if keys != values:
        raise UsageError("-ctk and -ctv must be equal: keys and values share one type")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected two numbers, e.g. 64,16")
    return int(match[1]), int(match[2])


def _numbers(text: str) -> list[int]:
    """`512`, `128,256`, and llama-bench's ranges `1-8`, `1-9+2`, `16-512*2`."""
    found = [value for part in text.split(",") for value in _range(part)]
    if len(found) > _MOST_VALUES:
        raise argparse.ArgumentTypeError(f"{text!r}: more than {_MOST_VALUES} values")
    return found


def _range(text: str) -> Iterator[int]:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number or a range like 16-512*2")
    value, last = int(match[1]), int(match[2] or match[1])
    times, step = match[3] == "*", int(match[4] or 1)
    if last < value or (step < 1 + times and match[4]) or (times and value == 0):
        raise argparse.ArgumentTypeError(f"{text!r}: the range does not grow")
    for _ in range(_MOST_VALUES + 1):
        if value > last:
            return
        yield value
        value = value * step if times else value + step
