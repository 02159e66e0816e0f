"""A trace as a warm-up list: which of its keys are the same here, and what the others say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hrxmp.errors import UsageError
from hrxmp.kernels import catalog
from hrxmp.kernels.keys import KeyComponents, Variant
from hrxmp.records import OPENING, CompileRequested, Record, RunBegin
from hrxmp.workloads.needed import Refused, needed

VARIANT = Variant(
    definition="rms_norm_weighted", params=(("K", 64), ("WEIGHTED", 1)), local_size=(64, 1)
)
SHARED = {
    "build_options": "-cl-std=CL3.0", "sanitizer": "", "platform": "P", "device": "D",
    "compute_units": 2, "driver": "1.0",
}  # fmt: skip


def components_of(variant: Variant) -> KeyComponents:
    """The keys of this machine."""
    definition = catalog.get(variant.definition)
    return KeyComponents(
        source=catalog.source_digest(definition),
        entry_point=definition.entry_point,
        params=variant.params,
        local_size=variant.local_size,
        **SHARED,  # type: ignore[arg-type]
    )


def line(record: Record) -> bytes:
    return OPENING + msgspec.json.encode(record)[1:] + b"\n"


def common(seq: int) -> dict[str, Any]:
    return {"run_id": "r", "source": "executor", "incarnation": 1, "seq": seq, "t_ns": seq}


def begin(shared: dict[str, Any]) -> bytes:
    texts = dict.fromkeys(("host", "device", "platform", "driver", "device_uuid"), "")
    record = RunBegin(
        **common(0), exec_id=None, **texts, versions={}, options={}, watched=[], cold=[],
        components=shared,
    )  # fmt: skip
    return line(record)


def request(there: KeyComponents, variant: Variant = VARIANT, seq: int = 1) -> bytes:
    record = CompileRequested(
        **common(seq), exec_id=1, request=seq, kernel=variant.definition, key=there.digest(),
        params=dict(variant.params), local_size=list(variant.local_size),
        source_digest=there.source, via="compile", why="first_use", near="", differs=[],
        prefetch=False,
    )  # fmt: skip
    return line(record)


def read(tmp_path: Path, *lines: bytes) -> tuple[list[Variant], list[Refused]]:
    path = tmp_path / "trace"
    path.write_bytes(b"something else\n" + b"".join(lines))
    return needed(str(path), components_of)


def test_the_same_keys_are_taken_once(tmp_path: Path) -> None:
    here = components_of(VARIANT)
    found = read(tmp_path, begin(SHARED), request(here), request(here, seq=2))
    assert found == ([VARIANT], [])


@pytest.mark.parametrize("component", [*SHARED, "source"])
def test_the_component_that_differs_is_named(tmp_path: Path, component: str) -> None:
    """X21, read from a trace."""
    before: Any = 99 if component == "compute_units" else "before"
    there = msgspec.structs.replace(components_of(VARIANT), **{component: before})
    shared = {name: getattr(there, name) for name in SHARED}
    variants, (refused,) = read(tmp_path, begin(shared), request(there))
    assert variants == []
    now = getattr(components_of(VARIANT), component)
    assert refused.why == f"{component} was {str(before)!r}, is {str(now)!r} here"


def test_unknown_kernels_and_parameters_are_refused(tmp_path: Path) -> None:
    here = components_of(VARIANT)
    gone = msgspec.structs.replace(VARIANT, definition="no_such_kernel")
    variants, refused = read(tmp_path, begin(SHARED), request(here, gone))
    assert variants == [] and "no_such_kernel" in refused[0].why


def test_a_trace_without_its_begin_is_told_so(tmp_path: Path) -> None:
    there = msgspec.structs.replace(components_of(VARIANT), driver="2.0")
    _, (refused,) = read(tmp_path, request(there))
    assert "does not say its components" in refused.why


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no compile-request"):
        read(tmp_path, begin(SHARED))
