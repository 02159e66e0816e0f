"""What `hrxmp-run` runs in the executor process: a command of ours, or the user's script."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hrxmp.errors import HrxmpError
from hrxmp.workloads import arguments

COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "bench": ("time prefill and decode, as llama-bench does", arguments.add_bench_arguments),
    "generate": ("continue a prompt", arguments.add_generate_arguments),
    "tune": ("find the fastest tile sizes on this device", arguments.add_tune_arguments),
    "warm": ("compile ahead what a model or a run needs", arguments.add_warm_arguments),
}
"""Commands that need an executor: help, and what adds their flags."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The command line of one command."""
    text, add = COMMANDS[command]
    parser = argparse.ArgumentParser(
        prog=f"hrxmp-run {command}",
        description=text,
        formatter_class=arguments.HelpFormatter,
    )
    add(parser)
    return parser


def run_workload(argv: list[str], connect: Callable[[], Any]) -> int:
    """Run a command or a script; the exit code. `connect` opens the Executor at first need."""
    command, *rest = argv
    if command not in COMMANDS:
        return _run_script(argv)
    args = parser_of(command).parse_args(rest)
    code: int = import_module(f"hrxmp.workloads.{command}").main(args, connect)
    return code


def _run_script(argv: list[str]) -> int:
    """The script as `__main__`, with its own folder first on the path; it calls hrxmp.connect."""
    path = str(Path(argv[0]).resolve())
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception as error:
        if isinstance(error, HrxmpError):
            raise
        _print_own_frames(error, path)
        return 1
    return 0


def _print_own_frames(error: Exception, path: str) -> None:
    """The traceback from the script's first frame on: what called it is not the user's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames or error.__traceback__))
