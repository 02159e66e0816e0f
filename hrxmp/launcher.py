"""hrxmp-run: starts aggregator, compile pool and executor of one run, watches them, cleans up.

It runs no graph and opens no device. What it starts ends with it, even when it is killed: each
child holds a pipe whose other end only the launcher has. A child that dies is started again
within limits; the executor is the run, and its exit code is the launcher's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hrxmp import lifecycle, records
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.errors import ChildError, UsageError
from hrxmp.identity import new_identity, new_run_id
from hrxmp.scratch import ScratchFolder, parent_folder
from hrxmp.settings import Settings, describe, unknown_variables
from hrxmp.supervise import Child, Exit, Restarter, spawn, without_blas_threads
from hrxmp.workloads.main import COMMANDS, parser_of

_STOP_S = 4.0
_SERVICE_STOP_S = 20.0
"""Half of it before a service is killed: the aggregator may need five seconds for a slow reader,
and what is killed loses records. Nothing that works takes a tenth of a second."""
_FAULT_HINT = "; a kernel outside its buffers ends so on a processor, `--sanitizer access` names it"


def main(argv: list[str]) -> int:
    """Run one command line; the exit code."""
    options, command = split_command(argv)
    settings = checked(Settings.from_environment(os.environ).with_flags(_flags(options)))
    for name in unknown_variables(os.environ):
        _say(f"{name} is no setting of hrxmp; it is ignored")
    if not command:
        _parser().print_help()
        return 0
    tool = _TOOLS.get(command[0])
    if tool is not None:
        from importlib import import_module

        code: int = import_module(tool).main(command[1:], settings)
        return code
    if command[0] in COMMANDS:
        parser_of(command[0]).parse_args(command[1:])  # a wrong flag should start nothing
    elif not Path(command[0]).is_file():
        known = ", ".join([*COMMANDS, *_TOOLS])
        raise UsageError(f"{command[0]!r} is neither a script nor one of {known}")
    folder = ScratchFolder(parent_folder(settings))
    try:
        return Run(settings, command, folder.path).supervise()
    finally:
        folder.remove()


class Run:
    """One run's processes."""

    def __init__(self, settings: Settings, command: list[str], folder: Path) -> None:
        self.run_id = new_run_id()
        self.begin_ns = mono_ns()
        self._settings = msgspec.structs.replace(settings, runtime_dir=str(folder))
        self._command = command
        self._aggregator = settings.aggregator or f"ipc://{folder}/trace"
        self._pool = settings.pool or f"ipc://{folder}/pool"
        self._environ = {**os.environ, **self._settings.to_environment()}
        self._services: dict[str, Child] = {}
        self._restarters: dict[str, Restarter] = {}
        self._due_ns: dict[str, int] = {}
        """Services that are to be started again, and when."""
        self._wake = lifecycle.WakeUp()
        self._signals = lifecycle.StopSignals(self._wake)

    def supervise(self) -> int:
        """Start everything, wait for the executor, stop everything; the exit code."""
        self._signals.install()
        try:
            if self._settings.trace_compile and not self._settings.aggregator:
                self._start("aggregator")
            if self._settings.async_jit and not self._settings.pool:
                self._start("workers")
            executor = self._start_executor()
            try:
                self._watch(executor)
            finally:
                executor.stop(_STOP_S)
            return self._code(executor)
        finally:
            for name in ("workers", "aggregator"):
                if name in self._services:
                    self._services.pop(name).stop(_SERVICE_STOP_S)

    def _start(self, role: str) -> None:
        bind = self._aggregator if role == "aggregator" else self._pool
        args = ["--bind", bind]
        if role == "workers" and self._command[0] in COMMANDS:  # a script may need no kernel
            args.append("--expects-compiles")
        if role == "aggregator" and self._settings.trace_output:
            args += ["--output", self._settings.trace_output]
        self._services[role] = spawn(role, args, name=role, environ=self._environ)
        self._restarters.setdefault(role, Restarter())

    def _start_executor(self) -> Child:
        args = ["--run", self.run_id, "--begin", str(self.begin_ns)]
        if self._settings.trace_compile:
            args += ["--aggregator", self._aggregator]
        if self._settings.async_jit:
            args += ["--pool", self._pool]
        ours = self._command[0] in COMMANDS  # a script may well multiply with numpy
        if ours:
            args.append("--opens-device")
        environ = without_blas_threads(self._environ) if ours else self._environ
        with _interrupts_put_off():
            return spawn(
                "executor", [*args, "--", *self._command], name="executor", environ=environ,
                stdin=sys.stdin.fileno(), stdout=None, new_group=False,
            )  # fmt: skip

    def _watch(self, executor: Child) -> None:
        """Until the executor ends: restart services that die, pass a stop signal on."""
        told = 0
        while executor.poll() is None:
            self._sleep(executor)
            if self._signals.count > told:
                told = self._signals.count  # an executor in our terminal ignores its Ctrl-C
                executor.kill() if told > 1 else executor.terminate()
            for role, child in list(self._services.items()):
                if child.poll() is not None:
                    self._bury(role, child)
            for role in [role for role, due in self._due_ns.items() if due <= mono_ns()]:
                del self._due_ns[role]
                self._start(role)

    def _sleep(self, executor: Child) -> None:
        """Until a process ends, a signal comes, or a service is to be started again."""
        handles = (executor.fd, self._wake.fd, *(c.fd for c in self._services.values()))
        left_ns = min(self._due_ns.values(), default=1 << 62) - mono_ns()
        lifecycle.wait((), handles, max(0, min(1000, left_ns // 1_000_000 + 1)))
        self._wake.clear()

    def _bury(self, role: str, child: Child) -> None:
        """Take leave of a service that died, and say when the next one comes, if one does."""
        restarter = self._restarters[role]
        child.close()
        del self._services[role]
        if not restarter.ended(mono_ns() - child.started_ns):
            _say(f"{role} ended {restarter.failures} times ({child.exit}); going on without it")
            return
        delay_s = restarter.delay_s()
        _say(f"{role} ended ({child.exit}); started again{f' in {delay_s:g} s' * (delay_s > 0)}")
        self._due_ns[role] = mono_ns() + int(delay_s * 1e9)

    def _code(self, executor: Child) -> int:
        end = executor.exit
        if end is None:
            raise ChildError("the executor could not be stopped")
        stopped = self._signals.last if self._signals.count else 0
        if not end.signal:
            return 128 + stopped if stopped and end.code == 128 + signal.SIGTERM else end.code
        self._tell_death(end)
        if stopped and end.signal in (signal.SIGTERM, signal.SIGKILL):
            return 128 + stopped  # as asked, before it could take the request for one
        hint = _FAULT_HINT if end.signal in (signal.SIGSEGV, signal.SIGBUS) else ""
        _say(f"the executor was ended by {end}{hint}")
        return 128 + end.signal

    def _tell_death(self, end: Exit) -> None:
        """The executor could not say run-end itself."""
        from hrxmp.trace import open_tracer

        identity = new_identity(self.run_id, "launcher")
        clock = HybridLogicalClock()
        tracer = open_tracer(self._settings, identity, clock, self._aggregator, self.begin_ns)
        if tracer is not None:
            tracer.emit(records.RunEnd, status=f"signal {end.signal}", executions=-1, totals={})
            tracer.close()


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """A process that is started inside never hears a terminal's Ctrl-C, not even while its
    interpreter starts; this one hears it afterwards. The executor takes the block off again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def split_command(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own options, and the command that follows them."""
    options = _parser().parse_args(argv)
    command: list[str] = options.command
    return options, command


def _flags(options: argparse.Namespace) -> dict[str, object]:
    """The settings that flags give."""
    given = {name: getattr(options, name, None) for name, _kind, _help in describe()}
    return {name: value for name, value in given.items() if value is not None}


def checked(settings: Settings) -> Settings:
    """Settings that a run can start with. UsageError before anything is started."""
    if endpoints := [*filter(None, (settings.aggregator, settings.pool))]:
        from hrxmp.wire import check_endpoint

        for endpoint in endpoints:
            check_endpoint(endpoint, settings.curve_dir)
    if not settings.trace_output:
        return settings
    try:
        with open(settings.trace_output, "ab"):
            pass
    except OSError as error:
        raise UsageError(
            f"the trace cannot be written to {settings.trace_output}: {error.strerror}"
        ) from error
    return msgspec.structs.replace(settings, trace_compile=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hrxmp-run",
        usage="hrxmp-run [options] COMMAND ...",
        description="Run a workload: graphs on a GPU through OpenCL, kernels compiled by a pool.",
        epilog="commands: bench, generate, tune, warm, SCRIPT.py; devices, status, store, keygen; "
        "`hrxmp-run COMMAND --help`. "
        "Each option has a variable HRXMP_*; see the README.",
    )
    add = parser.add_argument
    flag: dict[str, Any] = {"action": "store_const", "default": None}
    add("--trace", dest="trace_compile", const=True, **flag, help="trace compilation on stderr")
    add("--trace-output", dest="trace_output", metavar="PATH", help="trace into a file")
    add("--sync-jit", dest="async_jit", const=False, **flag, help="compile in the executor")
    add("--workers", type=int, metavar="N", help="compile workers (0: as cores allow)")
    add("--device", metavar="SPEC", help="index, name, PCI address or UUID")
    add("--cache", metavar="DIR|off", help="kernel store")
    add("--tuned", choices=("on", "off"), help="use what tune has found (default on)")
    add("--on-compile", choices=("off", "warn", "error"), help="what a compile when warm does")
    add("--warm-after", type=int, metavar="N", help="warm after so many executions")
    add("--aggregator", metavar="ENDPOINT", help="a shared aggregator")
    add("--pool", metavar="ENDPOINT", help="a shared compile pool")
    add("--sanitizer", metavar="KIND", help="access, value or all")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _say(text: str) -> None:
    sys.stderr.write(f"hrxmp-run: {text}\n")
    sys.stderr.flush()


_TOOLS = {
    "devices": "hrxmp.workloads.devices",
    "store": "hrxmp.workloads.store",
    "keygen": "hrxmp.workloads.keygen",
    "status": "hrxmp.workloads.status",
}
"""Commands that need no executor."""
