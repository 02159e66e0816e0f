"""Kernel keys: content only, every component counts, and a miss names exactly what differs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hrxmp.kernels.keys import Difference, KeyComponents, Variant, differences, nearest

BASE = KeyComponents(
    source="a" * 64,
    entry_point="mul_mat",
    params=(("K", 576), ("WTYPE", "q4_1")),
    local_size=(16, 1, 1),
    build_options="-cl-std=CL3.0",
    sanitizer="",
    platform="Intel OpenCL 3.1",
    device="Xeon float16",
    compute_units=2,
    driver="2025.1",
)

CHANGES: list[tuple[str, Any, str, str, str]] = [
    ("source", "b" * 64, "source", "a" * 64, "b" * 64),
    ("entry_point", "other", "entry_point", "mul_mat", "other"),
    ("params", (("K", 577), ("WTYPE", "q4_1")), "params.K", "576", "577"),
    ("params", (("K", 576), ("WTYPE", "q8_0")), "params.WTYPE", "q4_1", "q8_0"),
    ("local_size", (32, 1, 1), "local_size", "16x1x1", "32x1x1"),
    ("build_options", "-O0", "build_options", "-cl-std=CL3.0", "-O0"),
    ("sanitizer", "access", "sanitizer", "", "access"),
    ("platform", "PoCL", "platform", "Intel OpenCL 3.1", "PoCL"),
    ("device", "Epyc", "device", "Xeon float16", "Epyc"),
    ("compute_units", 4, "compute_units", "2", "4"),
    ("driver", "2025.2", "driver", "2025.1", "2025.2"),
]


@pytest.mark.parametrize(("field", "value", "component", "before", "after"), CHANGES)
def test_each_component_changes_the_key_and_is_named(
    field: str, value: Any, component: str, before: str, after: str
) -> None:
    """X21."""
    changed = replace(BASE, **{field: value})
    assert changed.digest() != BASE.digest()
    assert differences(BASE, changed) == (
        Difference(component=component, before=before, after=after),
    )


def test_every_component_is_in_the_list_above() -> None:
    assert {change[0] for change in CHANGES} == set(KeyComponents.__struct_fields__)


def test_nearest_has_the_fewest_differences() -> None:
    near = replace(BASE, driver="0")
    far = replace(near, device="x", platform="y")
    other = replace(BASE, entry_point="softmax")
    found = nearest(BASE, [far, other, near])
    assert found is not None
    assert found[0] == near
    assert [d.component for d in found[1]] == ["driver"]
    assert nearest(BASE, [other]) is None


param = st.one_of(st.integers(-(2**31), 2**31), st.text(max_size=8))
params = st.lists(st.tuples(st.text("ABCXYZ_", min_size=1, max_size=4), param), max_size=4).map(
    tuple
)


@given(params, params)
def test_digests_are_equal_only_for_equal_components(one: Any, two: Any) -> None:
    """Also `1` and `"1"`, and names that run into values; a round trip keeps the key."""
    first, second = replace(BASE, params=one), replace(BASE, params=two)
    assert (first.digest() == second.digest()) == (first == second)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=KeyComponents)
    assert decoded.digest() == first.digest()


def test_a_variant_reads_well() -> None:
    variant = Variant(definition="scale", params=(("K", 4), ("T", "f32")), local_size=(8, 2))
    assert variant.label() == "scale(K=4,T=f32) local 8x2"
    assert variant.defines() == "-DK=4 -DT=f32"
