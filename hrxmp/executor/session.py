"""A process's part in a run: its tracer, its device, its link to the pool, its Executor.

Opened once in an executor process. `connect()` hands the same Executor to the workload; outside
`hrxmp-run` it opens one that compiles in this process and traces nothing.
"""

from __future__ import annotations

import os
import platform
import sys
from functools import partial
from pathlib import Path

import msgspec

import hrxmp
from hrxmp import records
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.executor import library_pages, opening
from hrxmp.executor.compile_client import CompileClient
from hrxmp.executor.engine import Executor
from hrxmp.executor.findings import Sanitizing
from hrxmp.executor.guard import Guard
from hrxmp.executor.jit import Jit
from hrxmp.executor.kernel_table import KernelTable
from hrxmp.executor.local_compiler import LocalCompiler
from hrxmp.executor.pool_compiler import PoolCompiler
from hrxmp.executor.reasons import Reasons, Storms
from hrxmp.identity import Identity, fingerprint, new_identity, new_run_id
from hrxmp.kernels import build
from hrxmp.kernels.device import Device, KeyFields, open_device
from hrxmp.kernels.keys import KeyComponents
from hrxmp.kernels.loader import opencl
from hrxmp.kernels.store import Store, open_store
from hrxmp.kernels.tuned import TunedTable, mapping
from hrxmp.settings import Settings
from hrxmp.trace import Tracer, open_tracer

_current: Session | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher told this process of its run."""

    run_id: str
    run_begin_ns: int
    aggregator: str = ""
    pool: str = ""


class Session:
    """Everything that an executor process holds open."""

    def __init__(self, settings: Settings, link: Link) -> None:
        self.settings = settings
        self.link = link
        self.clock = HybridLogicalClock()
        self.identity: Identity = new_identity(link.run_id, "executor")
        self.tracer: Tracer | None = open_tracer(
            settings, self.identity, self.clock, link.aggregator, link.run_begin_ns
        )
        self.store: Store = open_store(settings, say)
        self._compiler: PoolCompiler | LocalCompiler | None = None
        self._reasons: Reasons | None = None
        self._executor: Executor | None = None

    @property
    def executor(self) -> Executor:
        """The Executor; device, pool link and store are opened at the first call."""
        if self._executor is None:
            self._executor = self._open()
        return self._executor

    def close(self, status: str) -> None:
        """End the run's records and the links; `status` is what run-end says."""
        global _current
        if _current is self:
            _current = None
        if self._executor is not None:
            self._executor.finish()
        if self._reasons is not None:
            self._reasons.finish()
        if self.tracer is not None:
            executor = self._executor
            self.tracer.emit(
                records.RunEnd, status=status,
                executions=executor.stats.executions if executor else 0,
                totals=executor.totals.as_dict() if executor else {},
            )  # fmt: skip
        if self._compiler is not None:
            self._compiler.close()
        if self.tracer is not None:
            self.tracer.close()

    def _open(self) -> Executor:
        settings = self.settings
        begin_ns = mono_ns()
        client = self._open_client()  # it connects while the device opens
        opening.prepare(settings, self.store)
        known = {fields_of(item) for item in self.store.components_index()}
        proven = partial(self._proven, client, known)
        device = open_device(settings.device or None, proven=proven, passed_over=say)
        opening_ns = mono_ns() - begin_ns
        guard = Guard(settings.on_compile, settings.warm_after)
        storms = Storms(settings.storm_keys, int(settings.storm_s * 1e9))
        self._reasons = Reasons(self.store, storms, self.tracer, say)
        compiler: PoolCompiler | LocalCompiler
        if client is None:
            compiler = LocalCompiler(device, self.store, self.tracer)
        else:
            compiler = PoolCompiler(client, device, settings)
        self._compiler = compiler
        tuned_table = self._open_tuned(device)
        table = KernelTable(device, settings.sanitizer)
        jit = Jit(table, compiler, self._reasons, guard, self.tracer)
        self._say_begin(device, opening_ns)
        sanitizing = Sanitizing(
            kind=settings.sanitizer, trap=settings.sanitizer_reporting == "trap", say=say
        )
        executor = Executor(device, jit, table, guard, self.tracer, sanitizing, tuned_table)
        if device.traits.is_cpu:  # and open: a GPU's driver may still be loading libraries
            library_pages.give_back()
        return executor

    def _proven(
        self, client: CompileClient | None, known: set[KeyFields], fields: KeyFields
    ) -> bool:
        """Whether a kernel was compiled for such a device, or a worker here has tried one."""
        if fields in known:
            return True
        if client is None or not self.link.pool.startswith("ipc:"):
            return False
        return client.tried(fingerprint(*fields), self.settings.pool_timeout_s)

    def _open_tuned(self, device: Device) -> TunedTable:
        """The device's tuned choices; from here on its dispatch knows them."""
        table = TunedTable(self.store.folder, device.key_fields())
        if self.settings.tuned:
            winners, why = table.load()
            device.traits = msgspec.structs.replace(device.traits, tuned=mapping(winners))
            if why:
                say(f"the tuned choices of this device are ignored: {why}")
        return table

    def _open_client(self) -> CompileClient | None:
        if not self.settings.async_jit:
            return None
        client = CompileClient(
            self.link.pool, self.identity, self.clock, self.settings,
            trace_endpoint=self.link.aggregator if self.tracer is not None else "",
            run_begin_ns=self.link.run_begin_ns,
            expects_compiles=not self.store.entry_count(),
            on_not_stored=self.store.note_trouble,
        )  # fmt: skip
        client.start()
        return client

    def _say_begin(self, device: Device, opening_ns: int) -> None:
        if self.tracer is None:
            return
        info, usual = device.info, Settings().to_environment()
        given = self.settings.to_environment()
        options = {name: value for name, value in given.items() if value != usual[name]}
        self.tracer.emit(
            records.RunBegin, host=platform.node(), device=info.name, platform=info.platform,
            driver=info.driver, device_uuid=info.uuid, versions=_versions(), options=options,
            watched=["requests", "driver-load", "driver-first-launch"],
            cold=_cold_layers(self.store, device.traits.form),
            components=build.shared_components(device, self.settings.sanitizer),
            opening_ns=opening_ns,
        )  # fmt: skip


def fields_of(item: KeyComponents) -> KeyFields:
    """The device for which a kernel was compiled: it has shown that it can."""
    return item.platform, item.device, item.compute_units, item.driver


def _cold_layers(store: Store, form: str) -> list[str]:
    """Cache layers that hold nothing yet. PoCL's own is private to the process, so always new."""
    cold = [] if store.entry_count() else ["store"]
    folder = store.driver_cache()
    filled = bool(folder) and Path(folder).is_dir() and any(Path(folder).iterdir())
    if form == "pocl-cpu" or (form == "nvidia" and not filled):
        cold.append("driver-cache")
    return cold


def connect() -> Executor:
    """The run's Executor. Outside `hrxmp-run`: one of this process alone, with synchronous JIT."""
    global _current
    if _current is None:
        settings = Settings.from_environment(os.environ)
        settings = msgspec.structs.replace(settings, async_jit=False, trace_compile=False)
        _current = Session(settings, Link(run_id=new_run_id(), run_begin_ns=mono_ns()))
    return _current.executor


def enter(session: Session) -> None:
    """Make `session` the one that `connect` means."""
    global _current
    _current = session


def say(text: str) -> None:
    """One line to the user."""
    sys.stderr.write(f"hrxmp: {text.removeprefix('hrxmp: ')}\n")
    sys.stderr.flush()


def _versions() -> dict[str, str]:
    """As the loaded modules tell it: asking the installed packages took 50 ms of a start."""
    found = {"hrxmp": hrxmp.__version__, "python": platform.python_version()}
    found["pyopencl"] = opencl().VERSION_TEXT
    for package, module in (("pyzmq", "zmq"), ("msgspec", "msgspec"), ("numpy", "numpy")):
        found[package] = sys.modules[module].__version__
    return found
