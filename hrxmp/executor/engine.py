"""The executor's object: graph -> graph program -> prepared program -> replay.

One thread of the executor process uses it. It owns no socket and no file: kernels come through
the jit, memory through `Memory`, records go through the tracer when there is one. With tracing
off an execution reads one attribute for it and nothing else.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic_ns

from hrxmp import records
from hrxmp.dtypes import DType
from hrxmp.errors import DeviceError, DeviceFaultError, GraphError, HrxmpError
from hrxmp.executor.counts import EngineStats, GraphCounts
from hrxmp.executor.execution import Array, Compiled, Execution, Run, info
from hrxmp.executor.findings import Sanitizing
from hrxmp.executor.graph_program import GraphProgram, GraphPrograms
from hrxmp.executor.guard import Guard
from hrxmp.executor.jit import Cause, Jit, Wanted
from hrxmp.executor.kernel_table import KernelTable
from hrxmp.executor.lowering import lower
from hrxmp.executor.memory import Memory, Read
from hrxmp.executor.prepared_program import PreparedProgram
from hrxmp.executor.profile import Profile
from hrxmp.executor.trial import Trial
from hrxmp.graph import Graph, Storage
from hrxmp.kernels import build, dispatch
from hrxmp.kernels.device import Device, DeviceInfo
from hrxmp.kernels.keys import KeyComponents, Variant
from hrxmp.kernels.layout import packed_bytes
from hrxmp.kernels.loader import OUT_OF_RESOURCES, device_error, opencl
from hrxmp.kernels.tuned import TunedTable
from hrxmp.trace import Tracer

_PREPARED_KEPT = 64


class Executor:
    """Runs graphs on one device."""

    def __init__(
        self,
        device: Device,
        jit: Jit,
        table: KernelTable,
        guard: Guard,
        tracer: Tracer | None = None,
        sanitizing: Sanitizing | None = None,
        tuned_table: TunedTable | None = None,
    ) -> None:
        self.stats = EngineStats()
        self.totals = GraphCounts()
        self.tracer = tracer
        self._device = device
        self._memory = Memory(device)
        self._jit = jit
        self._table = table
        self._guard = guard
        self._sanitizing = sanitizing or Sanitizing()
        self._traits = build.checkable(device.traits, self._sanitizing.kind)
        self._programs = GraphPrograms()
        self._wanted: dict[Variant, Wanted] = {}
        self._prepared: OrderedDict[tuple[int, str], PreparedProgram] = OrderedDict()
        self._latest: tuple[weakref.ref[Graph], str, PreparedProgram] | None = None
        self._failed = ""
        self._profile: Profile | None = None
        self.tuned_table = tuned_table or TunedTable(None, device.key_fields())

    # -- memory ------------------------------------------------------------------------------

    @property
    def device(self) -> DeviceInfo:
        """The device that graphs run on."""
        return self._device.info

    @property
    def memory(self) -> Memory:
        """The device's memory by storage."""
        return self._memory

    def storage(self, nbytes: int, name: str = "") -> Storage:
        """Memory on the device for as long as the handle lives; its content is undefined."""
        storage = Storage(nbytes, name)
        self._memory.buffer(storage)
        return storage

    def allocate(self, storages: Iterable[Storage], name: str = "") -> None:
        """Memory now for handles that have none yet; `name` says what they are in an error."""
        self._memory.allocate(storages, name)

    def upload(self, array: Array, name: str = "") -> Storage:
        """Device memory with the array's elements, row-major."""
        storage = self.storage(array.nbytes, name)
        self._memory.upload(storage, array)
        return storage

    def upload_weight(
        self, name: str, raw: Array, dtype: DType, shape: tuple[int, ...],
        storage: Storage | None = None, read: Read = lambda _nbytes: None,
    ) -> Storage:  # fmt: skip
        """Device memory with a weight, arranged as the device's kernels want it.

        `raw` holds ggml's bytes (uint8) of `shape`, numpy order; it is read in pieces, and `read`
        is told the bytes of each. `storage` is what `weight_storage` gave for it, if it did.
        """
        nbytes = dtype.row_bytes(math.prod(shape))
        if raw.nbytes != nbytes:
            raise GraphError(f"{name}: {raw.nbytes} bytes, {nbytes} expected")
        storage = storage or self.weight_storage(name, dtype, shape)
        self._memory.upload_weight(storage, dtype, shape, raw, read)
        return storage

    def weight_storage(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Storage:
        """The handle of a weight as `upload_weight` would make it, without memory."""
        if len(shape) != 2:
            return Storage(dtype.row_bytes(math.prod(shape)), name)
        n, k = shape
        layout = dispatch.weight_layout(self._traits, dtype, n, k)
        return Storage(packed_bytes(layout, dtype, n, k), name, layout)

    # -- warmth ------------------------------------------------------------------------------

    def warm(self) -> None:
        """From here on a compile is what `--on-compile` says."""
        self._guard.declare_warm()

    @contextmanager
    def no_compiles(self) -> Iterator[None]:
        """Inside, a compile fails the execution that needs it with CompileForbiddenError."""
        with self._guard.no_compiles():
            yield

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Inside, replays are timed kernel by kernel; slower, and never a benchmark."""
        self._profile = Profile(self._device)
        try:
            yield self._profile
        finally:
            self._profile = None

    def finish(self) -> None:
        """Wait until the device has done what is enqueued: memory must outlive it."""
        with suppress(opencl().Error, DeviceError):
            self._device.queue.finish()

    def annotate(self, label: str) -> None:
        """Put a label of the caller's into the trace."""
        if self.tracer is not None:
            self.tracer.emit(records.Annotation, exec_id=None, label=label)

    def variants(self, graph: Graph) -> list[Variant]:
        """The kernels that a graph needs, in the order of first need; nothing is compiled."""
        program = lower(graph, self._traits, 0)
        return list(dict.fromkeys(command.launch.variant for command in program.commands))

    def components(self, variant: Variant) -> KeyComponents:
        """The components of a kernel's key on this device. Raises HrxmpError: no such kernel."""
        return self._want(variant).components

    def compile(self, variants: Iterable[Variant]) -> Compiled:
        """Have these kernels in memory, and in the store where there is one; waits for all.

        On nobody's behalf: the counts belong to no execution. Kernels that cannot be had do not
        keep the others from being compiled.
        """
        cause = Cause(exec_id=None, counts=GraphCounts())
        asked: list[str] = []
        failed: list[HrxmpError] = []
        for wanted in [self._want(variant) for variant in dict.fromkeys(variants)]:
            with _collected(failed):
                self._jit.ask([wanted], cause)
                asked.append(wanted.key)
        self._jit.expect(asked)
        for key in asked:
            with _collected(failed):
                self._jit.need(key, cause)
        return Compiled(counts=cause.counts, failed=tuple(failed))

    def prefetch(self, *graphs: Graph) -> None:
        """Ask for the kernels of graphs on nobody's behalf, where a pool can compile meanwhile.

        The longest go first, but where workers have the cores of the device: there the first graph.
        """
        if self._jit.asynchronous:
            wanted = (w for g in graphs for w in self._wants(self._program(g, None)).values())
            self._jit.prefetch(wanted, longest_first=not self._traits.is_cpu)

    @property
    def stores(self) -> bool:
        """Whether compiled kernels are kept on disk."""
        return self._jit.stores

    @property
    def guarded(self) -> bool:
        """Whether `--on-compile` or `no_compiles` says that compiles matter."""
        return self._guard.mode != "off"

    def forget_kernels(self) -> None:
        """Forget prepared programs and loaded kernels: the next execution starts from the store."""
        self._prepared.clear()
        self._latest = None
        self._jit.forget()

    def trial(self, graph: Graph) -> Trial:
        """The launches of a graph one by one, for tuning; their kernels are compiled before."""
        return Trial(self._device, self._traits, self._memory, self._table, self._want, graph)

    # -- executing ---------------------------------------------------------------------------

    def execute(
        self,
        graph: Graph,
        inputs: Mapping[str, Array] | None = None,
        *,
        upcoming: Graph | None = None,
    ) -> Execution:
        """Run a graph and return its outputs. Raises HrxmpError; the executor lives on.

        `inputs` has an array for each of the graph's inputs. `upcoming` will run soon: while
        kernels of `graph` are missing, those of `upcoming` are asked for too.
        """
        if self._failed:
            raise DeviceFaultError(f"this executor's device failed before: {self._failed}")
        self.stats.executions += 1
        exec_id = self.stats.executions
        run = Run(cause=Cause(exec_id=exec_id, counts=GraphCounts()), uid=graph.uid)
        begin = monotonic_ns()
        tracer = self.tracer
        if tracer is not None:
            tracer.note(records.GraphBegin, exec_id, {"uid": graph.uid, "nodes": len(graph.nodes)})
        try:
            outputs = self._run(graph, inputs or {}, upcoming, run)
        except BaseException as error:  # also an interrupt: what began must end in the trace
            if isinstance(error, DeviceFaultError):
                self._failed = error.message
            else:
                self.finish()  # the next execution writes its inputs to an idle device
            self._finish(run, begin, error)
            raise
        return Execution(
            exec_id=exec_id,
            outputs=outputs,
            counts=run.cause.counts,
            dur_ns=self._finish(run, begin, None),
            replayed=run.replayed,
        )

    def _run(
        self, graph: Graph, inputs: Mapping[str, Array], upcoming: Graph | None, run: Run
    ) -> dict[str, Array]:
        try:
            return self._outputs(graph, inputs, upcoming, run)
        except opencl().Error as error:  # at whichever call the driver says what a kernel did
            doing = f"it ran graph program {run.program}, holding {self._memory.described()}"
            told = device_error(error, doing)
            if getattr(error, "code", 0) == OUT_OF_RESOURCES and self._answers():
                told = DeviceError(told.message)  # a launch that asks for too much, and no fault
            raise told from error

    def _answers(self) -> bool:
        """Whether the device still does what it is told."""
        try:
            self._device.queue.finish()
        except opencl().Error:
            return False
        return True

    def _outputs(
        self, graph: Graph, inputs: Mapping[str, Array], upcoming: Graph | None, run: Run
    ) -> dict[str, Array]:
        prepared = self._find_prepared(graph, run)
        run.replayed = prepared.ready
        if prepared.ready and self._profile is not None:
            return self._profile.replay(prepared, inputs)
        prepared.write_inputs(inputs)
        if prepared.ready:
            prepared.launch_all()
        else:
            self._first_launch(prepared, upcoming, run.cause)
        outputs = prepared.read_outputs()
        if prepared.findings is not None:
            found = prepared.findings.collect()
            self._sanitizing.tell(found, self._want, self.tracer, run.cause.exec_id)
        return outputs

    def _first_launch(
        self, prepared: PreparedProgram, upcoming: Graph | None, cause: Cause
    ) -> None:
        """Ask for all kernels at once, then launch in order, waiting only where one is missing."""
        program = prepared.program
        wanted = self._wants(program)
        try:
            self._jit.ask(wanted.values(), cause)
            self._jit.expect([item.key for item in wanted.values()])
            if upcoming is not None:
                self.prefetch(upcoming)
            prepared.launch_all()
            for command in program.commands[prepared.bound :]:
                key = wanted[command.launch.variant].key
                self._jit.need(key, cause)
                prepared.add(command, self._table.new_kernel(key))
        except (HrxmpError, opencl().Error):
            self._jit.abandon([item.key for item in wanted.values()])
            raise

    def _program(self, graph: Graph, run: Run | None) -> GraphProgram:
        program = self._programs.find(graph)
        hit = program is not None
        if program is None:
            program = lower(graph, self._traits, self._programs.next_number())
            self._programs.keep(graph, program)
            self.stats.program_builds += 1
        elif run is not None:
            self.stats.program_hits += 1
        if run is not None:
            run.program, run.program_hit = program.program, hit
        return program

    def _find_prepared(self, graph: Graph, run: Run) -> PreparedProgram:
        """The graph's prepared program; no table is asked for that of the execution before."""
        latest, digest = self._latest, graph.digest()
        if latest is not None and latest[0]() is graph and latest[1] is digest:
            prepared = latest[2]
            self.stats.program_hits += 1
            self.stats.prepared_hits += 1
            run.program = prepared.program.program
            run.program_hit = run.prepared_hit = True
            return prepared
        prepared = self._prepared_for(self._program(graph, run), graph, run)
        self._latest = (weakref.ref(graph), digest, prepared) if graph.uid else None
        return prepared

    def _prepared_for(self, program: GraphProgram, graph: Graph, run: Run) -> PreparedProgram:
        key = program.program, graph.memory_key()
        prepared = self._prepared.get(key)
        if prepared is not None:
            self._prepared.move_to_end(key)
            self.stats.prepared_hits += 1
            run.prepared_hit = True
            return prepared
        prepared = PreparedProgram(
            program,
            graph.storages(),
            self._memory,
            self._device,
            sanitized=bool(self._sanitizing.kind),
        )
        self.stats.prepared_builds += 1
        if graph.uid:
            self._prepared[key] = prepared
            if len(self._prepared) > _PREPARED_KEPT:
                self._prepared.popitem(last=False)
        return prepared

    def _wants(self, program: GraphProgram) -> dict[Variant, Wanted]:
        """The kernels of a program in the order of first need."""
        found = {}
        for command in program.commands:
            variant = command.launch.variant
            if variant not in found:
                found[variant] = self._want(variant)
        return found

    def _want(self, variant: Variant) -> Wanted:
        wanted = self._wanted.get(variant)
        if wanted is None:
            components = build.components(self._device, variant, self._sanitizing.kind)
            wanted = Wanted(key=components.digest(), variant=variant, components=components)
            self._wanted[variant] = wanted
        return wanted

    def _finish(self, run: Run, begin: int, error: BaseException | None) -> int:
        run.dur_ns, run.error = monotonic_ns() - begin, info(error)
        if not run.replayed:
            self.totals.add(run.cause.counts)
        self._guard.execution_done(self.stats.executions)
        if self.tracer is not None:
            if run.replayed:  # its counts are zero and stay so: later will do, elsewhere
                self.tracer.note(records.GraphEnd, run.cause.exec_id, run.columns)
            else:
                self.tracer.emit(records.GraphEnd, exec_id=run.cause.exec_id, **run.columns())
        return run.dur_ns


@contextmanager
def _collected(errors: list[HrxmpError]) -> Iterator[None]:
    """Keep an error for later instead of raising it."""
    try:
        yield
    except HrxmpError as error:
        errors.append(error)
