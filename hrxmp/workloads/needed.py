"""Which kernels a traced run needed: the variants of its compile-request records.

Pure reading; nothing is compiled here. A key of the trace is taken only when this device, driver
and version of hrxmp make the same one; otherwise it is refused, with the components that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hrxmp.aggregator import reader
from hrxmp.errors import HrxmpError, UsageError
from hrxmp.kernels import catalog
from hrxmp.kernels.keys import KeyComponents, Param, Variant, differences
from hrxmp.records import CompileRequested, RunBegin

ComponentsOf = Callable[[Variant], KeyComponents]


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel of the trace that cannot be the same here, and why."""

    kernel: str
    key: str
    why: str

    def text(self) -> str:
        """One line."""
        return f"{self.kernel} (key {self.key[:16]}): {self.why}"


def needed(path: str, components_of: ComponentsOf) -> tuple[list[Variant], list[Refused]]:
    """The variants that the runs of a trace asked for, each once, and what is refused of them.

    `path` is a file, or `-` for standard input. Raises UsageError: not readable, no request.
    """
    try:
        with reader.open_stream(path) as stream:
            trace = reader.read(stream)
    except OSError as error:
        raise UsageError(f"the trace {path!r} cannot be read: {error.strerror}") from error
    shared: dict[str, Mapping[str, Param]] = {}
    asked: dict[str, CompileRequested] = {}
    for line in trace.lines:
        if isinstance(line.record, RunBegin):
            shared[line.record.run_id] = line.record.components
        elif isinstance(line.record, CompileRequested):
            asked.setdefault(line.record.key, line.record)
    if not asked:
        raise UsageError(f"the trace {path!r} has no compile-request", remedy="trace with --trace")
    variants, refused = [], []
    for key, record in asked.items():
        variant = _variant(record)
        why = _why_not(record, variant, shared.get(record.run_id, {}), components_of)
        if why:
            refused.append(Refused(kernel=record.kernel, key=key, why=why))
        else:
            variants.append(variant)
    return variants, refused


def _variant(record: CompileRequested) -> Variant:
    return Variant(
        definition=record.kernel,
        params=tuple(record.params.items()),
        local_size=tuple(record.local_size),
    )


def _why_not(
    record: CompileRequested,
    variant: Variant,
    shared: Mapping[str, Param],
    components_of: ComponentsOf,
) -> str:
    """Why the key is another one here; empty when it is the same."""
    try:
        here = components_of(variant)
    except HrxmpError as error:
        return error.message
    if here.digest() == record.key:
        return ""
    there = components(record, shared)
    if there is None or there.digest() != record.key:
        return "the key differs here, and the trace does not say its components"
    changes = differences(there, here)
    return "; ".join(f"{d.component} was {d.before!r}, is {d.after!r} here" for d in changes)


def components(record: CompileRequested, shared: Mapping[str, Param]) -> KeyComponents | None:
    """The components of a traced key, put together again from the request and its run-begin."""
    own: dict[str, Any] = {
        "source": record.source_digest,
        "entry_point": catalog.get(record.kernel).entry_point,
        "params": tuple(record.params.items()),
        "local_size": tuple(record.local_size),
    }
    try:
        return msgspec.convert(own | dict(shared), KeyComponents)
    except msgspec.ValidationError:  # a trace without its run-begin
        return None
