"""Every kernel definition by name, and its source text with its includes.

Executor and workers read it; it opens files in `kernels/cl/` only, and touches no device. The
definitions stand in the dispatch modules of their families; they are merged on first use, so
that a family may import this module.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import import_module
from pathlib import Path

from hrxmp.errors import HrxmpError
from hrxmp.kernels.definition import Argument, KernelDefinition

__all__ = ["Argument", "KernelDefinition", "catalog", "get", "source_digest", "source_text"]

_FAMILIES = (
    "elementwise_ops",
    "row_ops",
    "mul_mat",
    "attention",
    "layer",
    "addresses",
    "nvidia",
    "nvidia_program",
)
_FOLDER = Path(__file__).parent / "cl"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([A-Za-z0-9_]+\.h)"[ \t]*$')


@cache
def catalog() -> dict[str, KernelDefinition]:
    """All definitions by name. HrxmpError when two families claim one name."""
    merged: dict[str, KernelDefinition] = {}
    for family in _FAMILIES:
        for definition in import_module(f"hrxmp.kernels.{family}").DEFINITIONS:
            if merged.setdefault(definition.name, definition) is not definition:
                raise HrxmpError(f"two kernel definitions are named {definition.name!r}")
    return merged


def get(name: str) -> KernelDefinition:
    """The definition `name`. HrxmpError when there is none."""
    definition = catalog().get(name)
    if definition is None:
        raise HrxmpError(f"no kernel definition is named {name!r}")
    return definition


def source_text(definition: KernelDefinition) -> str:
    """The kernel's text with every include put in its place, once; what the compiler gets."""
    return _text(definition.source)


def source_digest(definition: KernelDefinition) -> str:
    """SHA-256 of `source_text`, lower-case hex."""
    return _digest(definition.source)


def header_text(name: str) -> str:
    """The text of a header by itself."""
    return _text(name)


@cache
def _digest(source: str) -> str:
    return hashlib.sha256(_text(source).encode()).hexdigest()


@cache
def _text(source: str) -> str:
    return "".join(_expanded(source, included=set()))


def _expanded(source: str, *, included: set[str]) -> list[str]:
    """The lines of `source`; #line keeps the compiler's messages at the file's own lines."""
    lines = [f'#line 1 "{source}"\n']
    for number, line in enumerate(_read(source).splitlines(), start=1):
        match = _INCLUDE.match(line)
        if match is None:
            lines.append(line + "\n")
            continue
        header = match.group(1)
        if header not in included:
            included.add(header)
            lines += _expanded(header, included=included)
        lines.append(f'#line {number + 1} "{source}"\n')
    return lines


def _read(source: str) -> str:
    if Path(source).name != source:
        raise HrxmpError(f"kernel source {source!r} is not a plain file name")
    try:
        return (_FOLDER / source).read_text(encoding="utf-8")
    except OSError as error:
        raise HrxmpError(f"kernel source {source!r} cannot be read: {error.strerror}") from error


def __getattr__(name: str) -> dict[str, KernelDefinition]:
    if name == "CATALOG":
        return catalog()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
