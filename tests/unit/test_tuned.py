"""The tuned table: whole or ignored with a reason, and only what a kernel offers is ever taken."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hrxmp.dtypes import DType
from hrxmp.errors import StoreError
from hrxmp.kernels.choices import choices
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.dispatch import WeightSpec, flash_attn, mul_mat
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.tuned import MAX_BYTES, TunedTable, Winner, mapping
from hrxmp.workloads.tune import relative_error

DEVICE = ("Platform OpenCL 3.0", "A Processor float16", 2, "1.2.3")
TRAITS = DeviceTraits(
    form="intel-cpu", is_cpu=True, compute_units=2, simd_width=16, local_mem_bytes=256 << 10,
    base_align_bytes=128, fp16=False, subgroups=False, dot_product=True, max_work_group=4096,
)  # fmt: skip
WINNER = Winner(
    kernel="mul_mat_tile", subject="mul_mat_tile(K=64)", default={"TILE": 6}, choice={"TILE": 4},
    gain=0.125,
)  # fmt: skip


def tile(m: int = 100, **traits: Any) -> Launch:
    """A product in tiles."""
    weight = WeightSpec(dtype=DType.Q4_0, layout="lane16", n=256)
    return mul_mat(changed(**traits), weights=(weight,), k=128, m=m)


def attention(**traits: Any) -> Launch:
    """Attention of many rows."""
    return flash_attn(
        changed(**traits), head_dim=64, n_heads=8, n_kv_heads=2, m=100, scale=0.125,
        kv_dtype=DType.F32, kv_capacity=256,
    )  # fmt: skip


def changed(**traits: Any) -> DeviceTraits:
    fields = {name: getattr(TRAITS, name) for name in TRAITS.__struct_fields__}
    return DeviceTraits(**(fields | traits))


def test_a_table_comes_back_private_and_whole(tmp_path: Path) -> None:
    table = TunedTable(tmp_path / "store", DEVICE)
    assert table.load() == ([], "")
    table.save([WINNER])
    file = tmp_path / "store" / table.name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert table.load() == ([WINNER], "")
    first = file.read_bytes()
    table.save([WINNER])
    assert file.read_bytes() == first and os.listdir(tmp_path / "store") == [table.name]
    assert table.clear() and not table.clear()
    assert table.load() == ([], "")


def test_another_device_has_another_table(tmp_path: Path) -> None:
    TunedTable(tmp_path, DEVICE).save([WINNER])
    for other in (("P", *DEVICE[1:]), (*DEVICE[:2], 4, DEVICE[3]), (*DEVICE[:3], "1.2.4")):
        assert TunedTable(tmp_path, other).load() == ([], "")


def _foreign(content: dict[str, Any]) -> None:
    content["device"][3] = "9.9"


def _newer(content: dict[str, Any]) -> None:
    content["version"] = 2
    content["winners"] = "another form"


def _stale(content: dict[str, Any]) -> None:
    content["sources"]["mul_mat_tile"] = "0" * 64


def _gone(content: dict[str, Any]) -> None:
    content["winners"][0]["kernel"] = "no_such_kernel"


def _strange(content: dict[str, Any]) -> None:
    content["winners"][0]["choice"] = {"TILE": "4; rm"}


def _many(content: dict[str, Any]) -> None:
    content["winners"] *= 1001


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_foreign, "another device"),
        (_newer, "its version is 2"),
        (_stale, "other sources now, tune again: mul_mat_tile"),
        (_gone, "no_such_kernel"),
        (_strange, "corrupt"),
        (_many, "more than 1000"),
    ],
)
def test_what_does_not_hold_is_ignored_and_said(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], why: str
) -> None:
    table = TunedTable(tmp_path, DEVICE)
    table.save([WINNER])
    content = json.loads((tmp_path / table.name).read_bytes())
    spoil(content)
    (tmp_path / table.name).write_text(json.dumps(content))
    winners, said = table.load()
    assert winners == [] and why in said


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"{}", b'{"version":1}', b" " * (MAX_BYTES + 1)],
    ids=["empty", "torn", "deep", "bytes", "nothing", "short", "oversize"],
)
def test_a_corrupt_table_is_ignored_and_said(tmp_path: Path, payload: bytes) -> None:
    table = TunedTable(tmp_path, DEVICE)
    table.save([WINNER])
    (tmp_path / table.name).write_bytes(payload)
    winners, why = table.load()
    assert winners == [] and why


def test_nobody_else_may_write_the_table_or_point_it_elsewhere(tmp_path: Path) -> None:
    table = TunedTable(tmp_path, DEVICE)
    table.save([WINNER])
    file = tmp_path / table.name
    file.chmod(0o622)
    assert table.load()[0] == [] and "writable by other users" in table.load()[1]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert table.load()[0] == [] and table.load()[1]
    file.unlink()
    os.mkfifo(file)
    assert table.load()[0] == [] and table.load()[1]


def test_without_a_store_there_is_no_table(tmp_path: Path) -> None:
    table = TunedTable(None, DEVICE)
    assert table.load() == ([], "")
    with pytest.raises(StoreError):
        table.save([WINNER])
    with pytest.raises(StoreError):
        table.clear()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError):
        TunedTable(blocked, DEVICE).save([WINNER])


@pytest.mark.parametrize("make", [tile, attention])
def test_every_option_is_a_variant_of_its_own(make: Callable[..., Launch]) -> None:
    default = make()
    assert default.choices is not None and len(default.choices.options) > 3
    assert (
        default.variant == make(tuned={default.choices.subject: default.choices.options[0]}).variant
    )
    variants = set()
    for option in default.choices.options:
        launch = make(tuned={default.choices.subject: option})
        assert set(option) <= set(launch.variant.params)
        assert launch.choices == default.choices
        assert launch == make(tuned={default.choices.subject: option})
        variants.add(launch.variant)
    assert len(variants) == len(default.choices.options)


def test_an_option_that_the_kernel_does_not_offer_is_not_taken() -> None:
    default = tile()
    assert default.choices is not None
    subject = default.choices.subject
    for wrong in ((("TILE", 10**6),), (), default.choices.options[1][:3]):
        assert tile(tuned={subject: wrong}) == default
    assert tile(tuned={"mul_mat_tile(K=1)": default.choices.options[1]}) == default


def test_less_local_memory_offers_less() -> None:
    few, many = attention(local_mem_bytes=120 << 10).choices, attention().choices
    assert few is not None and many is not None
    assert set(few.options) < set(many.options) and few.options[0] == many.options[0]


def test_the_number_of_rows_changes_no_subject_and_no_option() -> None:
    assert {tile(m).choices for m in (2, 64, 97, 512)} == {tile().choices}


def test_options_keep_their_order_and_are_listed_once() -> None:
    found = choices("k", (("K", 1),), "A B", (1, 2), (3, 4), (1, 2))
    assert found.subject == "k(K=1)"
    assert found.options == ((("A", 1), ("B", 2)), (("A", 3), ("B", 4)))
    assert mapping([WINNER]) == {WINNER.subject: (("TILE", 4),)}


def test_relative_errors() -> None:
    one = np.array([1.0, -4.0, np.inf], np.float32)
    assert relative_error(one, one) == 0.0
    assert relative_error(one, np.array([1.0, -3.0, np.inf], np.float32)) == 0.25
    assert relative_error(one, np.array([1.0, np.nan, np.inf], np.float32)) == float("inf")
    assert relative_error(np.zeros(3), np.ones(3)) > 1.0
