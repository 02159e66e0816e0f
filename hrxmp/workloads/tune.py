"""`hrxmp-run tune`: find the fastest tile and local sizes of a model's kernels; keep them.

Runs in the executor process; compiling is the pool's work as in any run. Every option of a kernel
is launched on the model's own memory: one whose result differs from the default's is rejected,
the others are timed in turns with it. An option wins when, timed anew, it beats the default by
clearly more than two runs of the default differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hrxmp.dtypes import DType
from hrxmp.errors import HrxmpError, UsageError
from hrxmp.kernels.choices import Choice, Choices
from hrxmp.kernels.tuned import Winner
from hrxmp.models import files
from hrxmp.models.generator import LlamaModel
from hrxmp.models.gguf_file import GgufFile
from hrxmp.models.llama import LlamaConfig

if TYPE_CHECKING:
    from hrxmp.executor.engine import Executor
    from hrxmp.executor.prepared_program import Bound
    from hrxmp.executor.trial import Trial
    from hrxmp.kernels.launch import Launch

Array = np.ndarray[Any, Any]

_FEW_TOKENS = 64
_MOST_PLACES = 6
"""Commands that are timed together: as many layers' weights as make the caches forget."""
_FIRST_ROUNDS, _FINALISTS = 3, 3
_LEAST_NS = 3_000_000
"""A timing repeats short launches until it takes about this long."""
_LEAST_GAIN = 0.03
_MOST_LOSS = 0.05
"""What an option may lose with few tokens, when it gains with many."""
_TOLERANCE = 1e-4


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """A graph of some tokens, ready to try launches, and the commands of one subject in it."""

    tokens: int
    trial: Trial
    places: list[int]


class Found(msgspec.Struct, kw_only=True):
    """What is known of a kernel's options. `gain` is the best one's, measured anew."""

    kernel: str
    subject: str
    default: dict[str, int]
    best: dict[str, int]
    gain: float = 0.0
    by_tokens: dict[int, float] = {}
    """The gain with so many tokens an execution."""
    noise: float = 0.0
    candidates: int
    rejected: list[str]

    @property
    def line(self) -> str:
        """The kernel in a few words: its formats and sizes."""
        params = dict(p.split("=") for p in self.subject.partition("(")[2][:-1].split(","))
        names = ("W0", "K", "N0", "N1", "N2", "HEAD_DIM", "HEADS", "KV", "EPILOGUE")
        words = [params[name] for name in names if params.get(name, "0") not in ("0", "none")]
        return " ".join([self.kernel, *words])


def main(args: argparse.Namespace, connect: Callable[[], Executor]) -> int:
    """Tune, list or clear; the exit status. Raises HrxmpError."""
    executor = connect()
    table = executor.tuned_table
    if args.clear:
        sys.stdout.write("the tuned choices are removed\n" if table.clear() else "there are none\n")
        return 0
    if args.list:
        winners, why = table.load()
        _print([_listed(item) for item in winners], args.output)
        sys.stderr.write(f"hrxmp: not all of them hold: {why}\n" if why else "")
        return 0
    if not args.model:
        raise UsageError("tune needs a model: -m MODEL")
    if not executor.stores:
        raise UsageError("tune needs a kernel store", remedy="leave --cache, or name a folder")
    found = []
    for item in tune(args, executor):
        found.append(item)
        _say(item)
    tuned = {item.subject for item in found}
    kept = [item for item in table.load()[0] if item.subject not in tuned]
    table.save([*kept, *(_winner(item) for item in found if item.gain)])
    _print(found, args.output)
    return 0


def tune(args: argparse.Namespace, executor: Executor) -> Iterator[Found]:
    """What is found of each kernel that leaves something open, one after the other."""
    executor.annotate("tune")
    file = GgufFile.open(files.resolve(args.model))
    most = min(args.ubatch_size, LlamaConfig.from_gguf(file).context_length)
    model = LlamaModel.load(
        executor, file, context=most, ubatch=most, kv_dtype=DType.from_label(args.cache_type)
    )
    trials = {n: executor.trial(model.graph(n)) for n in sorted({1, min(_FEW_TOKENS, most), most})}
    for tokens, trial in trials.items():
        _check(executor.compile(trial.variants).failed)
        trial.run(_inputs(model, tokens))
    subjects: dict[str, tuple[Choices, list[Size]]] = {}
    for tokens, trial in trials.items():
        for subject, (choices, places) in trial.open().items():
            size = Size(tokens=tokens, trial=trial, places=places[:_MOST_PLACES])
            subjects.setdefault(subject, (choices, []))[1].append(size)
    for choices, sizes in subjects.values():
        found = _unknown(choices)
        if args.kernel is None or args.kernel in found.line:
            _try(executor, choices, sizes, args.rounds, found)
            yield found


def _try(
    executor: Executor, choices: Choices, sizes: list[Size], rounds: int, found: Found
) -> None:
    """Compile, check and time all options; `found` gets what comes out."""
    launches = {
        choice: [size.trial.launches(choices.subject, choice, size.places) for size in sizes]
        for choice in choices.options
    }
    variants = {
        c: {item.variant for group in made for item in group} for c, made in launches.items()
    }
    executor.compile([v for group in variants.values() for v in group])  # all at once
    default = choices.options[0]
    _check(executor.compile(variants[default]).failed)
    right = [default]
    for choice in choices.options[1:]:
        failed = executor.compile(variants[choice]).failed
        why = failed[0].message if failed else _difference(sizes, launches, default, choice)
        if why:
            found.rejected.append(f"{_text(choice)}: {why}")
        else:
            right.append(choice)
    ratios, _ = _compared(sizes, launches, right, _FIRST_ROUNDS)
    best = sorted(right[1:], key=lambda choice: geometric_mean(ratios[choice]))[:_FINALISTS]
    ratios, found.noise = _compared(sizes, launches, [default, *best], rounds)
    for choice in sorted(best, key=lambda choice: geometric_mean(ratios[choice])):
        if _wins(ratios[choice], found.noise):
            found.best = dict(choice)
            found.gain = 1 / geometric_mean(ratios[choice]) - 1
            tokens = [size.tokens for size in sizes]
            found.by_tokens = {
                n: round(1 / ratio - 1, 4) for n, ratio in zip(tokens, ratios[choice], strict=True)
            }
            return


def _difference(
    sizes: list[Size], launches: dict[Choice, list[list[Launch]]], default: Choice, choice: Choice
) -> str:
    """Why an option's result is not the default's; empty when it is."""
    for at, size in enumerate(sizes):
        place = size.places[0]
        wanted = size.trial.result(place, launches[default][at][0])
        given = size.trial.result(place, launches[choice][at][0])
        for one, other in zip(wanted, given, strict=True):
            error = relative_error(one, other)
            if not error <= _TOLERANCE:
                return f"wrong by {error:.1e} with {size.tokens} tokens"
    return ""


def relative_error(wanted: Array, given: Array) -> float:
    """The largest difference as a share of the largest value; infinite where one is not finite."""
    if not (np.isfinite(given) == np.isfinite(wanted)).all():
        return float("inf")
    both = np.isfinite(wanted)
    top = float(np.abs(wanted[both]).max(initial=1e-30))
    return float(np.abs(wanted[both] - given[both]).max(initial=0.0)) / top


def _compared(
    sizes: list[Size],
    launches: dict[Choice, list[list[Launch]]],
    options: list[Choice],
    rounds: int,
) -> tuple[dict[Choice, list[float]], float]:
    """Time of each option over the default's, for each size; and how far two defaults differ."""
    found: dict[Choice, list[float]] = {choice: [] for choice in options}
    noise = 0.0
    for at, size in enumerate(sizes):
        bound = {
            choice: [
                size.trial.bind(place, launch)
                for place, launch in zip(size.places, launches[choice][at], strict=True)
            ]
            for choice in options
        }
        ratios, differ = _rounds(size.trial, bound, options, rounds)
        noise = max(noise, differ)
        for choice in options:
            found[choice].append(ratios[choice])
    return found, noise


def _rounds(
    trial: Trial, bound: dict[Choice, list[Bound]], options: list[Choice], rounds: int
) -> tuple[dict[Choice, float], float]:
    """Median ratios to the default that was timed in the same round, and the default's noise."""
    default = options[0]
    trial.time(bound[default])
    repeats = -(-_LEAST_NS // trial.time(bound[default]))
    bound = {choice: launches * repeats for choice, launches in bound.items()}
    for choice in options:
        trial.time(bound[choice])
    ratios: dict[Choice, list[float]] = {choice: [] for choice in options}
    spread = []
    for number in range(rounds):
        first = trial.time(bound[default])
        order = options[1:] if number % 2 else options[:0:-1]
        times = {choice: trial.time(bound[choice]) for choice in order}
        second = trial.time(bound[default])
        usual = (first + second) / 2
        spread.append(abs(first - second) / usual)
        for choice, time in times.items():
            ratios[choice].append(time / usual)
        ratios[default].append(1.0)
    return {choice: median(found) for choice, found in ratios.items()}, median(spread)


def _wins(ratios: list[float], noise: float) -> bool:
    """Whether an option is clearly faster on the whole, and nowhere clearly slower."""
    better = geometric_mean(ratios) < 1 - max(_LEAST_GAIN, noise)
    return better and max(ratios) < 1 + max(_MOST_LOSS, noise)


def _inputs(model: LlamaModel, tokens: int) -> dict[str, Array]:
    """Different tokens in a row from the start."""
    ids = np.random.default_rng(0).integers(0, model.config.n_vocab, tokens)
    return {"tokens": ids.astype(np.int32), "positions": np.arange(tokens, dtype=np.int32)}


def _check(failed: tuple[HrxmpError, ...]) -> None:
    """Without its default a kernel cannot be tuned."""
    if failed:
        raise failed[0]


def _unknown(choices: Choices) -> Found:
    default = dict(choices.options[0])
    return Found(
        kernel=choices.subject.partition("(")[0], subject=choices.subject,
        default=default, best=default, candidates=len(choices.options) - 1, rejected=[],
    )  # fmt: skip


def _winner(item: Found) -> Winner:
    return Winner(
        kernel=item.kernel, subject=item.subject,
        default=item.default, choice=item.best, gain=round(item.gain, 4),
    )  # fmt: skip


def _listed(item: Winner) -> Found:
    return Found(
        kernel=item.kernel, subject=item.subject, default=item.default,
        best=item.choice, gain=item.gain, candidates=0, rejected=[],
    )  # fmt: skip


def _say(item: Found) -> None:
    """Progress, and every option that was rejected."""
    for text in item.rejected:
        sys.stderr.write(f"hrxmp: {item.line}: {text}\n")
    each = ", ".join(f"{gain:.1%} with {n} tokens" for n, gain in item.by_tokens.items())
    won = f"{_text(item.best)} gains {each}" if item.gain else "the default stays"
    sys.stderr.write(f"hrxmp: {item.line}: {won} (noise {item.noise:.1%})\n")
    sys.stderr.flush()


def _print(found: list[Found], output: str) -> None:
    if output == "json":
        sys.stdout.write(json.dumps([msgspec.to_builtins(item) for item in found]) + "\n")
        return
    if not found:
        sys.stdout.write("nothing: no kernel was tuned\n")
        return
    form = "{:36.36} {:>13.13} {:>13.13} {:>5} {:>3} {:>3}\n"
    sys.stdout.write(form.format("kernel", "default", "best", "gain", "of", "bad"))
    for item in found:
        best = "-" if item.best == item.default else _values(item.best)
        gain = f"{item.gain:.0%}" if item.gain else "-"
        row = (item.line, _values(item.default), best, gain)
        sys.stdout.write(form.format(*row, item.candidates or "", len(item.rejected) or "-"))
    names = {item.kernel: "/".join(item.default).lower() for item in found}
    for kernel, words in names.items():
        sys.stdout.write(f"{kernel}: {words}\n")


def _values(choice: dict[str, int]) -> str:
    return "/".join(map(str, choice.values()))


def _text(choice: Choice | dict[str, int]) -> str:
    return " ".join(f"{name.lower()} {value}" for name, value in dict(choice).items())
