"""The envelope and the bodies of every wire message; one union a link and direction.

Both ends of a link import this contract and never each other. Frames of a message:
`[identity] envelope body [buffer ...]`; the identity stands on the ROUTER's side only. The
envelope is an array, the body a map whose `kind` is its tag. New fields go last, with defaults;
a message of another `PROTOCOL` is counted, reported and dropped.
"""

from __future__ import annotations

import msgspec

from hrxmp.clock import Hlc
from hrxmp.errors import ErrorInfo
from hrxmp.kernels.keys import KeyComponents, Variant

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 << 20
MAX_BODY_BYTES = 4 << 20


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What every message carries in front of its body."""

    protocol: int
    run_id: str
    exec_id: int | None
    source: str
    incarnation: int
    msg_seq: int
    mono_ns: int
    hlc: Hlc
    cause: tuple[str, int, int] | None = None
    """(source, incarnation, msg_seq) of the message that led to this one."""


class Body(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all bodies."""


# -- on every link ---------------------------------------------------------------------------


class Hello(Body, frozen=True, kw_only=True, tag="hello"):
    """First message of a session; until it is answered nothing else is accepted."""

    role: str
    pid: int
    boot_id: str
    package_version: str
    device_fingerprint: str = ""
    """Workers: digest of the key fields of the device on which their compiler was tried."""
    first_unacked_seq: int = 0
    """Trace sources: the lowest record number that is still kept."""
    trace_endpoint: str = ""
    """Executors to a pool: where this run's records go; empty when tracing is off."""
    run_begin_ns: int = 0
    """Executors to a pool: monotonic zero of the run's `t_ns`."""
    expects_compiles: bool = False
    """Executors to a pool: its store is empty, so workers will be needed at once."""
    resumed: bool = False
    """Trace sources: this life of the source had a session before."""
    floor: Hlc = (0, 0)
    """Trace sources: `floor` and `mark` of the last acknowledgement. From them an aggregator that
    was restarted knows what comes too late."""
    mark: Hlc = (0, 0)


class Welcome(Body, frozen=True, kw_only=True, tag="welcome"):
    """Answer to hello. The receiver merges the envelope's clock before it emits anything."""

    heartbeat_ms: int
    liveness: int
    next_seq: int = 0
    """Trace link: the next record number that the aggregator wants."""
    hold_back_ms: int = 0


class Heartbeat(Body, frozen=True, kw_only=True, tag="heartbeat"):
    """Says what the process is doing, not only that it breathes; carries the clock."""

    state: str
    phase: str = ""
    phase_ns: int = 0
    job_id: int | None = None


class Shutdown(Body, frozen=True, kw_only=True, tag="shutdown"):
    """Please end, and why."""

    reason: str
    grace_ms: int


class Goodbye(Body, frozen=True, kw_only=True, tag="goodbye"):
    """Ends a session cleanly; on the trace link it is acknowledged."""

    reason: str
    last_seq: int = -1


# -- request link: executor <-> pool ---------------------------------------------------------


class CompileRequest(Body, frozen=True, kw_only=True, tag="compile_request"):
    """One executor's wish for one kernel. `device` re-opens the executor's device."""

    request_id: int
    key: str
    variant: Variant
    components: KeyComponents
    device: str
    urgent: bool = False
    """Whether the executor already waits for it, or will at once; prefetches are not."""
    deadline_ms: int = 0
    """Limit of one attempt; 0 is the pool's default."""
    most_workers: int = 0
    """Workers that the device has memory for; 0 when it does not matter (CPUs)."""


class CompileUrgent(Body, frozen=True, kw_only=True, tag="compile_urgent"):
    """The executor now waits for these requests: they go before prefetches."""

    request_ids: tuple[int, ...]


class CompileCancel(Body, frozen=True, kw_only=True, tag="compile_cancel"):
    """Nobody waits for this request any more."""

    request_id: int


class CompileAccepted(Body, frozen=True, kw_only=True, tag="compile_accepted"):
    """The pool has the request; `via` says whether it started a job or joined one in flight."""

    request_id: int
    via: str
    """`compile`, `in_flight`, `disk` or `quarantine`."""


class CompileNoted(Body, frozen=True, kw_only=True, tag="compile_noted"):
    """The executor has put the acceptance of this request on record.

    Until then the pool keeps its own records of the request back: no compile may begin, in the
    order of the trace, before it was asked for. Only runs that are traced send it.
    """

    request_id: int


class CompileStarted(Body, frozen=True, kw_only=True, tag="compile_started"):
    """A worker began the job of this request."""

    request_id: int
    worker: str
    attempt: int
    queue_ns: int


class CompileDone(Body, frozen=True, kw_only=True, tag="compile_done"):
    """The kernel is there; its binary is buffer 0, so that no answer depends on a disk."""

    request_id: int
    worker: str
    attempt: int
    binary_kind: str
    binary_bytes: int
    compile_ns: int
    finish_ns: int
    log: str
    not_stored: str = ""
    """Why the binary is not in the pool's store; empty when it is there."""


class CompileFailed(Body, frozen=True, kw_only=True, tag="compile_failed"):
    """The kernel cannot be had; exactly one of done and failed answers each request."""

    request_id: int
    worker: str
    attempt: int
    compiler_started: bool
    outcome: str
    """`rejected`, `crash`, `timeout`, `memory`, `setup`, `cancelled` or `lost`."""
    error: ErrorInfo
    log: str = ""


class DevicesTried(Body, frozen=True, kw_only=True, tag="devices_tried"):
    """Devices on which a worker has compiled and run a line before it said hello.

    An executor need not ask such a device whether it works. Sent after welcome, and again whenever
    it changes.
    """

    fingerprints: tuple[str, ...]
    more: bool
    """Whether workers are trying still."""


class StatusRequest(Body, frozen=True, kw_only=True, tag="status_request"):
    """What is going on? Any peer may ask; no hello is needed."""

    token: int = 0


class StatusJob(msgspec.Struct, frozen=True, kw_only=True):
    """One unfinished job, for status."""

    kernel: str
    key: str
    state: str
    """`queued` or `compiling`."""
    age_ms: int
    worker: str
    phase: str
    runs: tuple[str, ...]
    requests: tuple[tuple[str, int | None, int], ...]
    """(run, execution, request) of everybody who wants it."""
    urgent: bool


class StatusWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process, for status."""

    worker: str
    pid: int
    state: str
    jobs: int
    rss_mb: int


class StatusReply(Body, frozen=True, kw_only=True, tag="status_reply"):
    """A service's state at this moment."""

    token: int
    role: str
    pid: int
    uptime_ms: int
    pending: int
    oldest_ms: int
    jobs: tuple[StatusJob, ...] = ()
    workers: tuple[StatusWorker, ...] = ()
    runs: tuple[str, ...] = ()
    totals: dict[str, int] = {}
    by_run: dict[str, dict[str, int]] = {}
    """The pool's totals of each run that it serves now."""


# -- work link: pool <-> worker --------------------------------------------------------------


class CompileJob(Body, frozen=True, kw_only=True, tag="compile_job"):
    """One kernel to build; the source does not travel, its digest is compared."""

    job_id: int
    attempt: int
    key: str
    variant: Variant
    components: KeyComponents
    device: str


class JobStarted(Body, frozen=True, kw_only=True, tag="job_started"):
    """The worker has the job in hand."""

    job_id: int


class JobDone(Body, frozen=True, kw_only=True, tag="job_done"):
    """The finished binary, in buffer 0."""

    job_id: int
    compile_ns: int
    create_ns: int
    launch_ns: int
    read_ns: int
    binary_kind: str
    log: str
    not_stored: str = ""
    """Why the binary is not in the store; empty when it is there."""


class JobFailed(Body, frozen=True, kw_only=True, tag="job_failed"):
    """The compiler refused, or could not be set up."""

    job_id: int
    compiler_started: bool
    outcome: str
    error: ErrorInfo
    log: str = ""


# -- trace link: sources <-> aggregator ------------------------------------------------------


class Records(Body, frozen=True, kw_only=True, tag="records"):
    """A batch of finished JSON lines, in order, each without its opening and its newline.

    An item is (wall ns, counter, line after `{"hrxmp":"trace/1",`). A batch without items is the
    heartbeat of a trace source.
    """

    first_seq: int
    items: list[tuple[int, int, bytes]]
    mark: Hlc = (0, 0)
    """The source's promise: every record that it has not sent yet is later than this."""
    skipped: int = 0
    """How many numbers right before `first_seq` the source gave up; it says so in `lost`."""
    open: list[int] = []
    """Numbers of the begin records that are without their end after this batch."""


class Ack(Body, frozen=True, kw_only=True, tag="ack"):
    """Every record below `next_seq` is in the aggregator's hands for good."""

    next_seq: int
    again: int = -1
    """Numbers are missing: please send everything from this one on once more."""
    floor: Hlc = (0, 0)
    """Clock of the last record that is written, of all sources."""
    mark: Hlc = (0, 0)
    """The receiver's own promise, as far as it was heard."""
    window_bytes: int = 0
    """So much may be on its way from now on; 0: as before."""
    ended: bool = False
    """The goodbye was heard too: the session is over."""


class Subscribe(Body, frozen=True, kw_only=True, tag="subscribe"):
    """A reader wants to see what is released from now on; said again each second."""


class Lines(Body, frozen=True, kw_only=True, tag="lines"):
    """Whole lines of the trace, in buffer 0; for readers that attached themselves."""

    dropped: int = 0
    """Bytes that this reader has missed so far because it was too slow."""


Common = Heartbeat | Goodbye
ToPool = (
    Hello | Common | CompileRequest | CompileUrgent | CompileCancel | CompileNoted | StatusRequest
)
FromPool = (
    Welcome
    | Heartbeat
    | Shutdown
    | DevicesTried
    | CompileAccepted
    | CompileStarted
    | CompileDone
    | CompileFailed
    | StatusReply
)
ToWorker = Welcome | Heartbeat | CompileJob | Shutdown
FromWorker = Hello | Common | JobStarted | JobDone | JobFailed
ToAggregator = Hello | Common | Records | StatusRequest | Subscribe
FromAggregator = Welcome | Heartbeat | Ack | Shutdown | StatusReply | Lines
