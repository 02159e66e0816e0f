"""Every HRXMP_* variable: type, default, unit, help; one frozen Settings.

The environment is read here only, once, by the process that starts a run; flags replace fields;
children get the outcome through `to_environment`. A bad value is an error that names variable,
text and expected form.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from hrxmp.errors import SettingError

OnCompile = Literal["off", "warn", "error"]
Reporting = Literal["report-only", "trap"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a run. Each field's variable is HRXMP_ + its name in upper case."""

    trace_compile: Annotated[bool, "trace compilation as JSON lines on stderr"] = False
    trace_output: Annotated[str, "file for the trace instead of stderr"] = ""
    async_jit: Annotated[bool, "compile in the pool; 0 compiles in the executor"] = True
    workers: Annotated[int, "compile workers; 0 follows cores and device memory"] = 0
    device: Annotated[str, "device SPEC: index, name, PCI address or UUID"] = ""
    cache: Annotated[str, "kernel store folder, or `off`; empty is the user's cache folder"] = ""
    cache_layers: Annotated[str, "read-only store folders under it, separated by colons"] = ""
    cache_limit_mb: Annotated[int, "size bound of the kernel store, MB"] = 1024
    cache_strict: Annotated[bool, "an unusable store is an error instead of a warning"] = False
    tuned: Annotated[bool, "use what `hrxmp-run tune` found; 0 takes the default tiles"] = True
    on_compile: Annotated[OnCompile, "what a compile after warm-up does"] = "off"
    warm_after: Annotated[int, "executions after which the run counts as warm; 0: never"] = 0
    aggregator: Annotated[str, "endpoint of a shared aggregator; empty starts one"] = ""
    pool: Annotated[str, "endpoint of a shared compile pool; empty starts one"] = ""
    runtime_dir: Annotated[str, "folder for sockets; empty makes a private one"] = ""
    curve_dir: Annotated[str, "folder with CURVE keys, needed for tcp endpoints"] = ""
    job_timeout_s: Annotated[float, "deadline of one compile, seconds"] = 120.0
    job_memory_mb: Annotated[int, "memory limit of one compile above its start, MB"] = 4096
    worker_idle_s: Annotated[float, "an idle worker ends after this, seconds"] = 60.0
    worker_jobs: Annotated[int, "a worker is replaced after this many jobs"] = 500
    pool_timeout_s: Annotated[float, "wait for a lost pool to come back, seconds"] = 10.0
    progress_s: Annotated[float, "a compile slower than this is reported, seconds"] = 2.0
    hold_back_ms: Annotated[int, "longest wait for a silent trace source, ms"] = 1000
    spool_mb: Annotated[int, "bound of a source's spool file, MB"] = 256
    sanitizer: Annotated[str, "kernel checks: access, value or all"] = ""
    sanitizer_reporting: Annotated[Reporting, "what a finding does"] = "trap"
    storm_keys: Annotated[int, "keys differing in one component that make a storm"] = 16
    storm_s: Annotated[float, "window in which they count, seconds"] = 10.0
    vendors: Annotated[str, "OpenCL vendors instead of what is found, as OCL_ICD_VENDORS"] = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read HRXMP_* (and GGML_HRX_TRACE_COMPILE); raises SettingError on a bad value."""
        values: dict[str, object] = {}
        legacy = environ.get("GGML_HRX_TRACE_COMPILE", "")
        if legacy:
            values["trace_compile"] = _parse("GGML_HRX_TRACE_COMPILE", legacy, bool)
        vendors = environ.get("OCL_ICD_VENDORS", "")
        if vendors:
            values["vendors"] = vendors
        for field, kind, _help in describe():
            text = environ.get(variable(field), "")
            if text:
                values[field] = _parse(variable(field), text, kind)
        return cls(**values)  # type: ignore[arg-type]

    def with_flags(self, flags: Mapping[str, object]) -> Settings:
        """These settings with some replaced by flags; raises SettingError on a bad value."""
        kinds = {field: kind for field, kind, _help in describe()}
        values = {
            field: _parse("--" + field.replace("_", "-"), _text(value), kinds[field])
            for field, value in flags.items()
        }
        return msgspec.structs.replace(self, **values)

    def to_environment(self) -> dict[str, str]:
        """The variables that make a child read these same settings."""
        return {variable(field): _text(getattr(self, field)) for field, _k, _h in describe()}


def variable(field: str) -> str:
    """The environment variable of a field."""
    return "HRXMP_" + field.upper()


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """HRXMP_* variables that mean nothing: misspelled ones."""
    known = {variable(field) for field in Settings.__struct_fields__}
    return sorted(name for name in environ if name.startswith("HRXMP_") and name not in known)


def describe() -> list[tuple[str, object, str]]:
    """(field, type, help) of every setting, in order; the README's table is made of it."""
    hints = typing.get_type_hints(Settings, include_extras=True)
    rows = []
    for name in Settings.__struct_fields__:
        kind, text = typing.get_args(hints[name])
        rows.append((name, kind, text))
    return rows


def default_text(field: str) -> str:
    """The default of a field as it would stand in an environment file."""
    return _text(getattr(Settings(), field))


def _text(value: object) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _parse(name: str, text: str, kind: object) -> object:
    if kind is str:
        return text
    if kind is bool:
        table = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        if text.lower() not in table:
            raise SettingError(f"{name}={text!r}: expected 1 or 0")
        return table[text.lower()]
    if kind is int or kind is float:
        return _parse_number(name, text, kind)
    choices = typing.get_args(kind)
    if text not in choices:
        raise SettingError(f"{name}={text!r}: expected one of {', '.join(choices)}")
    return text


def _parse_number(name: str, text: str, kind: object) -> int | float:
    try:
        value = int(text) if kind is int else float(text)
    except ValueError:
        form = "a whole number" if kind is int else "a number"
        raise SettingError(f"{name}={text!r}: expected {form}") from None
    if not 0 <= value < 1e12:  # nor "nan", which compares with nothing
        raise SettingError(f"{name}={text!r}: expected 0 or more, below 1e12")
    return value
