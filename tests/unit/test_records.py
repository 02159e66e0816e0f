"""The trace's contract with its readers: columns, zeros, the opening, and the shipped schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

import hrxmp
from hrxmp import records
from hrxmp.errors import ErrorInfo
from hrxmp.kernels.keys import Difference
from hrxmp.record_lines import fit
from hrxmp.tracetool.main import schema_text

COMMON = ["event", "run", "source", "incarnation", "seq", "t_ns", "exec"]
SCHEMA = json.loads(schema_text())
SAMPLES = {
    str: "text", int: 0, bool: False, dict: {}, list: [],
    ErrorInfo | None: ErrorInfo(code="c", message="m"), int | None: None,
}  # fmt: skip


def sample(kind: type[records.Record]) -> records.Record:
    """A record with every field filled, zeros where there are numbers."""
    fields = {}
    for field in msgspec.structs.fields(kind):
        typed = getattr(field.type, "__origin__", field.type)
        fields[field.name] = SAMPLES[typed]
    if kind is records.CompileRequested:
        fields["differs"] = [Difference(component="driver", before="1", after="2")]
        fields["params"] = {"K": 576, "WTYPE": "q4_1"}
    return kind(**fields)


KINDS = list(records.AnyRecord.__args__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_line_has_the_common_columns_first_and_validates(kind: type[records.Record]) -> None:
    made = sample(kind)
    line = records.OPENING + msgspec.json.encode(made)[1:]
    columns = json.loads(line)
    assert list(columns)[1:8] == COMMON
    jsonschema.validate(columns, SCHEMA)
    assert msgspec.json.decode(line, type=records.AnyRecord) == made


def test_zeros_are_written() -> None:
    line = msgspec.json.encode(sample(records.GraphEnd))
    for name in ("requests", "compiles", "waits", "wait_ns", "driver_compiles"):
        assert f'"{name}":0'.encode() in line


def test_the_schema_refuses_a_line_without_a_count() -> None:
    columns = json.loads(records.OPENING + msgspec.json.encode(sample(records.GraphEnd))[1:])
    del columns["requests"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(columns, SCHEMA)


def test_the_shipped_schema_is_the_generated_one() -> None:
    shipped = Path(hrxmp.__file__).parent / "trace-schema.json"
    assert shipped.read_text() == schema_text()


@pytest.mark.parametrize("room", [400, 700, 3000])
def test_a_long_record_is_cut_and_stays_a_record(room: int) -> None:
    made = msgspec.structs.replace(
        sample(records.CompileEnd),
        log='\\"\n' * 5000,
        error=ErrorInfo(code="compile", message="m" * 4000, traceback="\udcff" * 9000),
    )
    line = fit(msgspec.to_builtins(made), room + 250)
    assert len(line) <= room + 250
    back = msgspec.json.decode(line, type=records.AnyRecord)
    assert isinstance(back, records.CompileEnd)
    assert back.log.startswith('\\"\n')
    assert back.error is not None and back.error.code == "compile"


def test_a_record_of_many_differences_is_cut() -> None:
    many = [Difference(component=f"params.{n}", before="1", after="2") for n in range(500)]
    made = msgspec.structs.replace(sample(records.CompileRequested), differs=many)
    back = msgspec.json.decode(fit(msgspec.to_builtins(made), 3000), type=records.AnyRecord)
    assert isinstance(back, records.CompileRequested)
    assert 10 < len(back.differs) < 500
