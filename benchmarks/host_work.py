"""Host work a token: `python benchmarks/host_work.py [--model smollm2-135m] [--rounds 5]`.

From the end of a decode execution on the device to the first launch of the next one: logits are
copied, inputs written; tokens are given, and nothing is sampled. Beside it what the launches take
to enqueue, and the whole token. Medians of 128 tokens, in this process, without a trace.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import Any

from hrxmp.clock import mono_ns
from hrxmp.executor.prepared_program import PreparedProgram
from hrxmp.executor.session import Link, Session
from hrxmp.identity import new_run_id
from hrxmp.models.files import resolve
from hrxmp.models.generator import LlamaModel
from hrxmp.settings import Settings

_TOKENS = 128


class Marks:
    """When launches begin and end, and when the device is done, of each execution."""

    def __init__(self, queue: Any) -> None:
        self.launched: list[tuple[int, int]] = []
        self.done: list[int] = []
        launch_all, finish = PreparedProgram.launch_all, type(queue).finish

        def marked_launch(program: PreparedProgram) -> None:
            begin = perf_counter_ns()
            launch_all(program)
            self.launched.append((begin, perf_counter_ns()))

        def marked_finish(which: Any) -> None:
            finish(which)
            self.done.append(perf_counter_ns())

        PreparedProgram.launch_all = marked_launch  # type: ignore[method-assign]
        type(queue).finish = marked_finish

    def row(self) -> str:
        """The medians since the last row, microseconds."""
        starts = [begin for begin, _ in self.launched]
        outside = median(b - a for a, b in zip(self.done, starts[1:], strict=False)) / 1e3
        enqueue = median(end - begin for begin, end in self.launched) / 1e3
        token = median(b - a for a, b in pairwise(starts)) / 1e3
        self.launched.clear()
        self.done.clear()
        return f"| {outside:.1f} | {outside / token:.1%} | {enqueue:.1f} | {token:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="host_work")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(async_jit=False, cache=folder)
        opened = Session(settings, Link(run_id=new_run_id(), run_begin_ns=mono_ns()))
        model = LlamaModel.load(opened.executor, resolve(args.model), context=512)
        model.prefill([1, 2, 3])
        model.decode(1)
        marks = Marks(opened.executor._device.queue)
        print("| outside the launches, us | of a token | enqueue, us | a token, us |")
        print("| ---: | ---: | ---: | ---: |")
        for _ in range(args.rounds):
            model.length = 3
            for token in range(_TOKENS):
                model.decode(token)
            print(marks.row(), flush=True)
        opened.close("ok")


if __name__ == "__main__":
    main()
