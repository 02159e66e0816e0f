"""`hrxmp-run bench`: llama-bench's tests on hrxmp, with its flags, names and output formats.

Runs in the executor process. Like llama-bench it feeds random tokens (the beginning-of-sequence
token first where the model wants one) and neither tokenises nor samples; times are host wall
times from the first token handed in to the last logits read. Results go to stdout, progress to
stderr.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hrxmp.dtypes import DType
from hrxmp.executor.counts import GraphCounts
from hrxmp.models import files
from hrxmp.models.generator import LlamaModel
from hrxmp.models.gguf_file import GgufFile
from hrxmp.workloads.arguments import BenchTest, bench_tests
from hrxmp.workloads.formats import DEFAULTS, CacheState, Printer, Row, printer, statistics_of

if TYPE_CHECKING:
    from hrxmp import Execution, Executor

FILE_TYPES: Final = {
    0: "all F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1",
    14: "Q4_K - Small", 15: "Q4_K - Medium", 16: "Q5_K - Small", 17: "Q5_K - Medium", 18: "Q6_K",
}  # fmt: skip
"""general.file_type -> the name that llama.cpp prints."""


class Counted(GraphCounts, kw_only=True):
    """Sums of graph counts over the timed executions of a test."""

    executions: int = 0

    def add_execution(self, execution: Execution) -> None:
        """Add one execution."""
        self.add_counts(execution.counts)

    def add_counts(self, counts: GraphCounts) -> None:
        """Add one execution's counts."""
        self.executions += 1
        self.add(counts)

    @property
    def cache_state(self) -> CacheState:
        """warm: nothing was compiled (a hit in the store is warm); cold: nothing came from it."""
        if not self.compiles + self.joins + self.driver_compiles:
            return "warm"
        return "mixed" if self.disk_hits else "cold"


def main(args: argparse.Namespace, connect: Callable[[], Executor]) -> int:
    """Run all tests; the exit status. Raises HrxmpError on bad flags, models or failures."""
    executor = connect()
    tests = bench_tests(args)
    shown = _shown_columns(tests)
    printers = [printer(args.output, sys.stdout, shown)]
    if args.output_err:
        printers.append(printer(args.output_err, sys.stderr, shown))
    groups = [list(group) for _, group in itertools.groupby(tests, _load_key)]
    # Loaded before anything is printed: a model that cannot be loaded leaves no half output.
    bench = _Bench(executor, groups[0], args, last=len(groups) == 1)
    with _printing(printers):
        for index, group in enumerate(groups):
            if index:
                bench = _Bench(executor, group, args, last=index == len(groups) - 1)
            for row in bench.run():
                for target in printers:
                    target.row(row)
    return 0


class _Bench:
    """The tests of one loaded model."""

    def __init__(
        self, executor: Executor, tests: list[BenchTest], args: argparse.Namespace, *, last: bool
    ) -> None:
        self.executor = executor
        self.tests = tests
        self.args = args
        self.last = last
        self.path = files.resolve(tests[0].model)
        self.random = random.Random(1)
        longest = max(test.n_tokens + test.n_depth for test in tests)
        self.model = LlamaModel.load(
            executor,
            self.path,
            context=longest,
            ubatch=max(test.n_ubatch for test in tests),
            kv_dtype=DType.from_label(tests[0].kv_type),
            prompt=_first_prompt(tests[0]),
        )
        self.first_token = first_token(self.model.file)

    def run(self) -> Iterator[Row]:
        """Warm up for every test, then time each: from then on nothing may compile."""
        if not self.args.no_warmup:
            for index, test in enumerate(self.tests):
                self._say(index, "warm-up")
                self._warm_up(test)
        if self.last:
            self.executor.warm()
        for index, test in enumerate(self.tests):
            yield self._measure(index, test)
            if self.args.profile:
                self._profile(test)

    def _measure(self, index: int, test: BenchTest) -> Row:
        started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._prepare(test)
        counted = Counted()
        samples = []
        self.model.on_execution = counted.add_execution
        for repetition in range(self.args.repetitions):
            self._say(index, f"run {repetition + 1}/{self.args.repetitions}")
            self.executor.annotate(f"{test.name} run {repetition + 1}")
            self.model.length = test.n_depth
            begin = time.perf_counter_ns()
            self._prompt(test.n_prompt, test.n_batch)
            self._generate(test.n_gen)
            samples.append(time.perf_counter_ns() - begin)
        self.model.on_execution = None
        return self._row(test, started, samples, counted)

    def _profile(self, test: BenchTest) -> None:
        """One more run of a test, each kernel timed; tables on stderr."""
        from hrxmp.workloads.profile_table import print_profile

        self.model.length = test.n_depth
        with self.executor.profile() as profile:
            begin = time.perf_counter_ns()
            self._prompt(test.n_prompt, test.n_batch)
            self._generate(test.n_gen)
            spent = time.perf_counter_ns() - begin
        host = profile.host
        inside = host.rebind_ns + host.enqueue_ns + host.wait_ns
        print_profile(profile, test.name, max(0, spent - inside))

    def _warm_up(self, test: BenchTest) -> None:
        self._prepare(test)
        self.executor.annotate(f"{test.name} warm-up")
        self._prompt(test.n_prompt, test.n_batch)
        self._generate(min(test.n_gen, 1))

    def _prepare(self, test: BenchTest) -> None:
        """Fill the context to the test's depth; untimed. Its rows stay valid for all samples."""
        self.model.ubatch = test.n_ubatch
        self.model.length = 0
        if test.n_depth:
            self.executor.annotate(f"{test.name} depth")
        self._prompt(test.n_depth, test.n_batch)

    def _prompt(self, count: int, batch: int) -> None:
        for begin in range(0, count, batch):
            tokens = self._tokens(min(batch, count - begin))
            if begin == 0:
                tokens[0] = self._first()
            self.model.prefill(tokens)

    def _generate(self, count: int) -> None:
        token = self._first()
        for _ in range(count):
            self.model.decode(token)
            token = self.random.randrange(self.model.config.n_vocab)

    def _first(self) -> int:
        if self.first_token is not None:
            return self.first_token
        return self.random.randrange(self.model.config.n_vocab)

    def _tokens(self, count: int) -> list[int]:
        return self.random.choices(range(self.model.config.n_vocab), k=count)

    def _say(self, index: int, what: str) -> None:
        if self.args.progress:
            text = f"hrxmp bench: test {index + 1}/{len(self.tests)} {self.tests[index].name}: "
            sys.stderr.write(text + what + "\n")
            sys.stderr.flush()

    def _row(self, test: BenchTest, started: str, samples: list[int], counted: Counted) -> Row:
        columns = provenance(self.executor, self.model.file, self.path)
        columns |= statistics_of(samples, test.n_tokens)
        return Row(
            **columns,
            n_batch=test.n_batch,
            n_ubatch=test.n_ubatch,
            type_k=test.kv_type,
            type_v=test.kv_type,
            n_prompt=test.n_prompt,
            n_gen=test.n_gen,
            n_depth=test.n_depth,
            test_time=started,
            warmup=not self.args.no_warmup,
            compiles=counted.compiles + counted.joins,  # the prefetched ones
            wait_ms=round(counted.wait_ns / 1e6, 3),
            cache_state=counted.cache_state,
        )


def provenance(executor: Executor, file: GgufFile, path: Path) -> dict[str, Any]:
    """The columns that are the same for all tests of a model on a device."""
    import hrxmp

    info = executor.device
    version = getattr(hrxmp, "__version__", "unknown")
    return {
        "build_commit": version,
        "build_number": 0,
        "cpu_info": _processor(),
        "gpu_info": info.name if info.kind == "gpu" else "",
        "backends": "OpenCL",
        "model_filename": str(path),
        "model_type": model_type(file),
        "model_size": file.n_bytes,
        "model_n_params": file.n_params,
        "n_threads": info.compute_units,
        "flash_attn": True,
        "devices": str(info.index),
        "use_mmap": True,
        "platform": info.platform,
        "device": info.name,
        "driver": info.driver,
        "hrxmp_version": version,
    }


def model_type(file: GgufFile) -> str:
    """Architecture, size and type of weights, e.g. `llama 135M Q4_1`."""
    size = file.metadata.get("general.size_label")
    if not isinstance(size, str):
        count = file.n_params
        size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    kind = FILE_TYPES.get(file.integer("general.file_type", -1, least=-1), "unknown type")
    return f"{file.string('general.architecture')} {size} {kind}"


def first_token(file: GgufFile) -> int | None:
    """The beginning-of-sequence token, where the file wants one before each prompt."""
    wanted = file.metadata.get("tokenizer.ggml.add_bos_token", False)
    if not wanted or "tokenizer.ggml.bos_token_id" not in file.metadata:
        return None
    return file.integer("tokenizer.ggml.bos_token_id", least=0)


def _first_prompt(test: BenchTest) -> int:
    """Tokens that the model is given at once, first of all; decode's one when there is no prompt"""
    return min(test.n_depth or test.n_prompt or 1, test.n_batch)


@contextmanager
def _printing(printers: Sequence[Printer]) -> Iterator[None]:
    """Begin the outputs, and end them also after an error, so that what is printed is whole."""
    for target in printers:
        target.begin()
    try:
        yield
    finally:
        for target in printers:
            target.end()


def _load_key(test: BenchTest) -> tuple[str, str]:
    return test.model, test.kv_type


def _shown_columns(tests: list[BenchTest]) -> frozenset[str]:
    """Settings that the table shows: those that vary or are not the default."""
    values = {
        "n_batch": {str(test.n_batch) for test in tests},
        "n_ubatch": {str(test.n_ubatch) for test in tests},
        "type_k": {test.kv_type for test in tests},
        "type_v": {test.kv_type for test in tests},
    }
    return frozenset(name for name, found in values.items() if found != {DEFAULTS[name]})


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
