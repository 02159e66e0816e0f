"""A layer in one launch against its five launches, which have tests of their own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from hrxmp.dtypes import DType
from hrxmp.kernels.attention import rope_flash_attn
from hrxmp.kernels.device import Device
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.layer import STATE_BYTES, FusedLayer, fuse_layer
from hrxmp.kernels.mul_mat import mul_mat
from tests.device.conftest import Runner
from tests.device.test_mul_mat import make_weight

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 6, 2, 64
WIDTH, KV_WIDTH = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
CAPACITY = 2304
ROWS = {"q": WIDTH, "k": KV_WIDTH, "v": KV_WIDTH, "o": HIDDEN, "g": FFN, "u": FFN, "d": HIDDEN}
COLUMNS = {"o": WIDTH, "d": FFN}
Arrays = dict[str, np.ndarray]


class Layer(msgspec.Struct):
    """Five launches, the value that each operand of theirs means, and all values."""

    launches: list[Launch]
    values: list[dict[str, str]]
    arrays: Arrays

    def fused(self, device: Device) -> FusedLayer | None:
        numbers = {name: number for number, name in enumerate(self.arrays)}
        slots = [{key: numbers[name] for key, name in value.items()} for value in self.values]
        return fuse_layer(device.traits, self.launches, slots)

    def named(self, slot: int) -> str:
        return list(self.arrays)[slot]


def make_layer(
    device: Device, types: Mapping[str, DType], kv_dtype: DType, **changes: int
) -> Layer:
    rng = np.random.default_rng(7)
    weights = {
        name: make_weight(device, rng, types.get(name, DType.Q4_1), rows, COLUMNS.get(name, HIDDEN))
        for name, rows in ROWS.items()
    }
    specs = {name: weight.spec for name, weight in weights.items()}
    kind = np.float16 if kv_dtype is DType.F16 else np.float32
    arrays = {f"w{name}": weight.packed for name, weight in weights.items()}
    arrays |= {
        "x": rng.standard_normal((1, HIDDEN)).astype(np.float32),
        "norm1": rng.uniform(0.5, 2, HIDDEN).astype(np.float32),
        "norm2": rng.uniform(0.5, 2, HIDDEN).astype(np.float32),
        "positions": np.zeros(1, np.int32),
        "factors": rng.uniform(1, 8, HEAD_DIM // 2).astype(np.float32),
        "k_cache": rng.standard_normal((KV_HEADS, CAPACITY, HEAD_DIM)).astype(kind),
        "v_cache": rng.standard_normal((KV_HEADS, CAPACITY, HEAD_DIM)).astype(kind),
        "qkv": np.full((1, WIDTH + 2 * KV_WIDTH), np.nan, np.float32),
        "attended": np.full((1, WIDTH), np.nan, np.float32),
        "middle": np.full((1, HIDDEN), np.nan, np.float32),
        "gated": np.full((1, FFN), np.nan, np.float32),
        "y": np.full((1, HIDDEN), np.nan, np.float32),
    }
    traits, eps = device.traits, 1e-5
    launches = [
        mul_mat(traits, weights=(specs["q"], specs["k"], specs["v"]), k=HIDDEN, m=1, norm=True,
                eps=eps),
        rope_flash_attn(
            traits, head_dim=HEAD_DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, m=1,
            scale=HEAD_DIM**-0.5, n_dims=HEAD_DIM, mode="norm", freq_base=1e4, freq_scale=1.0,
            kv_dtype=kv_dtype, kv_capacity=CAPACITY, factors=True,
        ),
        mul_mat(traits, weights=(specs["o"],), k=WIDTH, m=1, epilogue="add", **changes),
        mul_mat(traits, weights=(specs["g"], specs["u"]), k=HIDDEN, m=1, norm=True,
                epilogue="swiglu", eps=eps),
        mul_mat(traits, weights=(specs["d"],), k=FFN, m=1, epilogue="add"),
    ]  # fmt: skip
    values = [
        {"x": "x", "norm_w": "norm1", "w0": "wq", "w1": "wk", "w2": "wv", "y": "qkv"},
        {"qkv": "qkv", "positions": "positions", "factors": "factors", "k_cache": "k_cache",
         "v_cache": "v_cache", "y": "attended"},
        {"x": "attended", "w0": "wo", "residual": "x", "y": "middle"},
        {"x": "middle", "norm_w": "norm2", "w0": "wg", "w1": "wu", "y": "gated"},
        {"x": "gated", "w0": "wd", "residual": "middle", "y": "y"},
    ]  # fmt: skip
    return Layer(launches, values, arrays)


def run_apart(run: Runner, layer: Layer, position: int) -> Arrays:
    arrays = layer.arrays | {"positions": np.array([position], np.int32)}
    for launch, names in zip(layer.launches, layer.values, strict=True):
        written = run(launch, {key: arrays[name] for key, name in names.items()})
        arrays |= {names[key]: array for key, array in written.items()}
    return arrays


def run_fused(
    run: Runner, layer: Layer, fused: FusedLayer, position: int, state: np.ndarray
) -> Arrays:
    arrays = layer.arrays | {"positions": np.array([position], np.int32)}
    operands = {key: arrays[layer.named(slot)] for key, slot in fused.slots.items()}
    operands |= {"scratch": np.full(fused.scratch_bytes // 4, np.nan, np.float32), "state": state}
    return run(fused.launch, operands)


MIXED = {"q": DType.Q4_K, "k": DType.Q4_K, "v": DType.Q6_K, "o": DType.Q5_0, "d": DType.Q6_K}


@pytest.mark.parametrize("position", [0, 100, 600, 2303])
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.F16], ids=lambda d: d.label)
@pytest.mark.parametrize("types", [{}, MIXED], ids=["q4_1", "mixed"])
def test_layer_in_one_launch(
    device: Device, run: Runner, types: dict[str, DType], kv_dtype: DType, position: int
) -> None:
    if device.traits.form != "intel-cpu":
        pytest.skip("layers are fused on Intel's CPU runtime")
    layer = make_layer(device, types, kv_dtype)
    fused = layer.fused(device)
    assert fused is not None
    expected = run_apart(run, layer, position)
    state = np.zeros(STATE_BYTES, np.uint8)
    for _ in range(3):
        result = run_fused(run, layer, fused, position, state)
        state = result["state"]
        assert not state.any()
        # Another order of sums rounds some activations of 16 bits the other way.
        largest = np.abs(expected["y"]).max()
        np.testing.assert_allclose(result["y"], expected["y"], rtol=0, atol=2e-4 * largest)
        for cache in ("k_cache", "v_cache"):
            np.testing.assert_allclose(result[cache], expected[cache], rtol=1e-3, atol=1e-6)


def test_zero_bounds_touch_nothing(device: Device, run: Runner) -> None:
    if device.traits.form != "intel-cpu":
        pytest.skip("layers are fused on Intel's CPU runtime")
    fused = make_layer(device, {}, DType.F16).fused(device)
    assert fused is not None
    args = tuple(0 if isinstance(arg, int) else arg for arg in fused.launch.args)
    dry = msgspec.structs.replace(fused.launch, args=args, global_size=(1,))
    page = np.full(4096, 85, np.uint8)
    written = run(dry, {name: page for name in args if isinstance(name, str)})
    assert all((array == page).all() for array in written.values())


def test_what_is_no_layer_stays_apart(device: Device) -> None:
    layer = make_layer(device, {}, DType.F16)
    assert make_layer(device, {}, DType.F16, y_offset=16).fused(device) is None
    layer.values[2]["residual"] = "attended"
    assert layer.fused(device) is None
    assert fuse_layer(device.traits, layer.launches[:4], [{}] * 4) is None
