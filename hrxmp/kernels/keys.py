"""Variants and kernel keys: which kernel, specialised how, for which device, as digests.

Pure data, no I/O, no device; executor, pool and workers import it. A key is the SHA-256 of a
canonical encoding of named components, all of them content, none of them paths. The components
travel and are stored in the clear beside the key, so that a miss can say what differs.
"""

from __future__ import annotations

import hashlib

import msgspec

Param = int | str
"""Value of one specialisation parameter."""

Params = tuple[tuple[str, Param], ...]
"""Specialisation parameters by name, in the definition's order."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel definition with its specialisation: identity without a device."""

    definition: str
    params: Params
    local_size: tuple[int, ...]

    def defines(self) -> str:
        """The specialisation as compiler options, e.g. `-DK=576 -DWTYPE=q4_1`."""
        return " ".join(f"-D{name}={value}" for name, value in self.params)

    def label(self) -> str:
        """One readable line, e.g. `mul_mat_vec(K=576,N=1536) local 16`."""
        params = ",".join(f"{name}={value}" for name, value in self.params)
        return f"{self.definition}({params}) local {'x'.join(map(str, self.local_size))}"


class KeyComponents(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can change the binary, by name. Two equal ones share one binary."""

    source: str
    """SHA-256 of the kernel's source text with its includes, in order."""
    entry_point: str
    params: Params
    local_size: tuple[int, ...]
    build_options: str
    sanitizer: str
    platform: str
    device: str
    compute_units: int
    driver: str

    def digest(self) -> str:
        """The kernel key: lower-case hex SHA-256 of the canonical encoding."""
        return hashlib.sha256(_encoder.encode(self)).hexdigest()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One component in which two keys differ."""

    component: str
    before: str
    after: str


_encoder = msgspec.json.Encoder(order="deterministic")


def differences(before: KeyComponents, after: KeyComponents) -> tuple[Difference, ...]:
    """The components in which two keys differ; single specialisation parameters by their name."""
    found = []
    for name in KeyComponents.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        if name == "params":
            found += _param_differences(dict(old), dict(new))
        else:
            found.append(Difference(component=name, before=_text(old), after=_text(new)))
    return tuple(found)


def nearest(
    wanted: KeyComponents, known: list[KeyComponents]
) -> tuple[KeyComponents, tuple[Difference, ...]] | None:
    """The known key of the same entry point with the fewest differences, or None."""
    alike = [item for item in known if item.entry_point == wanted.entry_point]
    candidates = [(item, differences(item, wanted)) for item in alike]
    return min(candidates, key=lambda pair: len(pair[1]), default=None)


def _param_differences(old: dict[str, Param], new: dict[str, Param]) -> list[Difference]:
    names = [*old, *(name for name in new if name not in old)]
    return [
        Difference(component=f"params.{n}", before=_text(old.get(n)), after=_text(new.get(n)))
        for n in names
        if old.get(n) != new.get(n)
    ]


def _text(value: object) -> str:
    if value is None:
        return ""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
