"""One struct a trace event; common columns first. The trace's contract with its readers.

A record is encoded to JSON once, at its source. msgspec writes the tag first, so the opening
`{"hrxmp":"trace/1",` is spliced on by the aggregator. Records never omit defaults: zeros are
what a reader wants to see. `schema()` is the JSON Schema that is shipped with the package.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hrxmp.errors import ErrorInfo
from hrxmp.kernels.keys import Difference, Param

TRACE_VERSION = "trace/1"
OPENING = b'{"hrxmp":"trace/1",'
MAX_LINE_BYTES = 3072


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Common columns of every record."""

    run_id: str = msgspec.field(name="run")
    source: str
    incarnation: int
    seq: int
    t_ns: int
    """Monotonic nanoseconds since the run began, at the source."""
    exec_id: int | None = msgspec.field(name="exec")
    """The graph execution; an asynchronous event keeps the id of the execution that asked."""


class RunBegin(Record, frozen=True, kw_only=True, tag="run-begin"):
    """A run has its device and can execute graphs."""

    host: str
    device: str
    platform: str
    driver: str
    device_uuid: str
    versions: dict[str, str]
    options: dict[str, str]
    watched: list[str]
    """What the counts cover: `requests`, `driver-load`, `driver-first-launch`."""
    cold: list[str]
    """Cache layers that were empty or off at the start, e.g. `store`, `driver-cache`."""
    components: dict[str, Param] = {}
    """What every kernel key of the run has in common: device, driver, options, sanitizer."""
    opening_ns: int = 0
    """How long it took to find a device that works; before that, processes and imports. A GPU's
    context may still be in the making."""


class RunEnd(Record, frozen=True, kw_only=True, tag="run-end"):
    """The run is over."""

    status: str
    """`ok`, `failed`, or `signal N` when the launcher says it of a dead executor."""
    executions: int
    totals: dict[str, int]


class GraphBegin(Record, frozen=True, kw_only=True, tag="graph-begin"):
    """A graph execution starts."""

    uid: int
    nodes: int


class CompileRequested(Record, frozen=True, kw_only=True, tag="compile-request"):
    """An execution asked for a kernel that was not in memory."""

    request: int
    kernel: str
    key: str
    params: dict[str, Param]
    local_size: list[int]
    source_digest: str = ""
    """SHA-256 of the kernel's source, a component of the key."""
    via: str
    """`compile`, `in_flight`, `disk`, `quarantine`."""
    why: str
    """`first_use`, `differs`, or why a store entry was refused: `corrupt`, `refused: ...`."""
    near: str
    """The nearest known key, or empty."""
    differs: list[Difference]
    prefetch: bool


class CompileBegin(Record, frozen=True, kw_only=True, tag="compile-begin"):
    """A compiler starts on a request."""

    request: int
    kernel: str
    worker: str
    attempt: int
    queue_ns: int


class CompileEnd(Record, frozen=True, kw_only=True, tag="compile-end"):
    """The compiler is done with a request, one way or the other."""

    request: int
    kernel: str
    worker: str
    attempt: int
    compiler_started: bool
    outcome: str
    """`ok`, `rejected`, `crash`, `timeout`, `memory`, `setup`, `cancelled`, `lost`."""
    compile_ns: int
    """The compiler itself."""
    finish_ns: int
    """Forcing the driver to finish: kernel creation, first launch, reading the binary."""
    binary_bytes: int
    log: str
    log_path: str
    error: ErrorInfo | None
    synthetic: bool = False
    """Made up by the aggregator because the source died."""


class CompileProgress(Record, frozen=True, kw_only=True, tag="compile-progress"):
    """A compile is slow and still running."""

    request: int
    kernel: str
    worker: str
    pid: int
    phase: str
    elapsed_ns: int


class KernelLoad(Record, frozen=True, kw_only=True, tag="kernel-load"):
    """A binary was made executable in the executor."""

    request: int
    kernel: str
    key: str
    load_ns: int
    launch_ns: int
    """The first launch, when it was timed; else 0."""
    driver_compiled: bool
    """The driver compiled again: the load or the first launch was as slow as a compile."""


class WaitBegin(Record, frozen=True, kw_only=True, tag="wait-begin"):
    """An execution blocks at a command whose kernel is not there."""

    request: int
    kernel: str
    asked_by: int | None
    """The execution that asked for the kernel."""


class WaitEnd(Record, frozen=True, kw_only=True, tag="wait-end"):
    """The kernel came, or failed."""

    request: int
    kernel: str
    asked_by: int | None
    dur_ns: int
    outcome: str
    synthetic: bool = False
    """Made up by the aggregator because the source died."""


class GraphEnd(Record, frozen=True, kw_only=True, tag="graph-end"):
    """A graph execution is over. Every count is written, zeros too."""

    uid: int
    outcome: str
    error: ErrorInfo | None
    program: int
    program_hit: bool
    prepared_hit: bool
    replayed: bool
    requests: int
    compiles: int
    joins: int
    disk_hits: int
    memory_hits: int
    driver_compiles: int
    failures: int
    waits: int
    wait_ns: int
    dur_ns: int
    synthetic: bool = False
    """Made up by the aggregator because the source died; its counts are not known."""


class WorkerStart(Record, frozen=True, kw_only=True, tag="worker-start"):
    """A compile worker came up."""

    worker: str
    pid: int
    reason: str


class WorkerExit(Record, frozen=True, kw_only=True, tag="worker-exit"):
    """A compile worker is gone."""

    worker: str
    pid: int
    reason: str
    signal: int
    held: list[int]
    """Requests of this run that it was working on."""


class Guard(Record, frozen=True, kw_only=True, tag="guard"):
    """A compile after warm-up, under `--on-compile warn` or `error`."""

    request: int
    kernel: str
    key: str
    action: str
    why: str
    near: str
    differs: list[Difference]
    count: int


class Storm(Record, frozen=True, kw_only=True, tag="storm"):
    """Many keys that differ in one component only, within a short time."""

    kernel: str
    component: str
    count: int
    window_ns: int


class SanitizerFinding(Record, frozen=True, kw_only=True, tag="sanitizer-finding"):
    """A bad access or value that the sanitizer caught."""

    kernel: str
    key: str
    command: int
    binding: str
    index: int
    check: str
    count: int


class Lost(Record, frozen=True, kw_only=True, tag="lost"):
    """Records that will never come."""

    of: str
    first: int
    last: int
    reason: str


class Annotation(Record, frozen=True, kw_only=True, tag="annotation"):
    """A label that the workload chose."""

    label: str


AnyRecord = (
    RunBegin
    | RunEnd
    | GraphBegin
    | CompileRequested
    | CompileBegin
    | CompileEnd
    | CompileProgress
    | KernelLoad
    | WaitBegin
    | WaitEnd
    | GraphEnd
    | WorkerStart
    | WorkerExit
    | Guard
    | Storm
    | SanitizerFinding
    | Lost
    | Annotation
)


def schema() -> dict[str, Any]:
    """JSON Schema of one trace line."""
    (found,), parts = msgspec.json.schema_components([AnyRecord], ref_template="#/$defs/{name}")
    version = {"type": "string", "const": TRACE_VERSION}
    for part in parts.values():
        if "event" in part.get("properties", {}):
            part["properties"] = {"hrxmp": version, **part["properties"]}
            part["properties"]["late"] = {"type": "boolean"}
            part["required"] = ["hrxmp", *part["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "$defs": parts}
