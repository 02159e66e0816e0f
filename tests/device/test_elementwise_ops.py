"""Every element and row kernel against float64 references: odd sizes, strides, poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import gguf
import numpy as np
import pytest

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels import elementwise_ops as element
from hrxmp.kernels import row_ops as row
from hrxmp.kernels.device import Device
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.layout import pack
from hrxmp.kernels.view import View
from tests.device.conftest import Runner, launch_once

POISON = np.float32(-77.5)
TOLERANCE = 2e-6
"""Relative to the largest reference value: a few float32 roundings."""


def random(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def poisoned(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.full(shape, POISON, dtype)


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    limit = tolerance * max(1.0, float(np.abs(want).max()))
    assert float(np.abs(got.astype(np.float64) - want).max()) <= limit


def strided(view: View, buffer: np.ndarray) -> np.ndarray:
    """The elements of a view of a flat buffer."""
    steps = tuple(stride * buffer.itemsize for stride in view.strides)
    return np.lib.stride_tricks.as_strided(buffer[view.offset :], view.shape, steps)


def assert_poison_around(view: View, buffer: np.ndarray) -> None:
    """Everything outside the view is as it was."""
    rest = buffer.copy()
    strided(view, rest)[...] = POISON
    assert (rest == buffer.dtype.type(POISON)).all()


# -- arithmetic ----------------------------------------------------------------------------------

FUNCTIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_binary_dense(run: Runner, device: Device, op: element.BinaryOp) -> None:
    a, b = random(3, 577), random(3, 577, seed=2) + 3
    launch = element.binary(device.traits, op=op, a=View.dense(a.shape), b=View.dense(b.shape))
    got = run(launch, {"a": a, "b": b, "y": poisoned(3, 577)})
    assert_close(got["y"], FUNCTIONS[op](a.astype(np.float64), b))


@pytest.mark.parametrize("b_shape", [(), (7,), (5, 7), (3, 5, 7), (1, 7), (2, 3, 5, 7)])
def test_binary_repeats_over_leading_axes(
    run: Runner, device: Device, b_shape: tuple[int, ...]
) -> None:
    a, b = random(2, 3, 5, 7), random(*b_shape, seed=2)
    b_view = View.dense(b_shape)
    if b_shape == (1, 7):
        with pytest.raises(UnsupportedError):
            element.binary(device.traits, op="add", a=View.dense(a.shape), b=b_view)
        return
    launch = element.binary(device.traits, op="add", a=View.dense(a.shape), b=b_view)
    got = run(launch, {"a": a, "b": np.atleast_1d(b), "y": poisoned(*a.shape)})
    assert_close(got["y"], a.astype(np.float64) + b)


def test_binary_strided_with_offsets(run: Runner, device: Device) -> None:
    a_view = View(shape=(3, 4, 5), strides=(100, 7, 1), offset=11)
    b_view = View(shape=(3, 4, 5), strides=(2, 60, 7), offset=3)
    y_view = View(shape=(3, 4, 5), strides=(1, 3, 12), offset=5)
    a, b, y = random(400), random(400, seed=2), poisoned(80)
    launch = element.binary(device.traits, op="mul", a=a_view, b=b_view, y=y_view)
    got = run(launch, {"a": a, "b": b, "y": y})["y"]
    want = strided(a_view, a).astype(np.float64) * strided(b_view, b)
    assert_close(strided(y_view, got), want)
    assert_poison_around(y_view, got)


def test_binary_in_place(run: Runner, device: Device) -> None:
    a, b = random(1000), random(1000, seed=2)
    view = View.dense(a.shape)
    launch = element.binary(device.traits, op="add", a=view, b=view)
    args = tuple("a" if arg == "y" else arg for arg in launch.args)
    in_place = Launch(
        variant=launch.variant, args=args, global_size=launch.global_size, writes=("a",)
    )
    assert_close(run(in_place, {"a": a, "b": b})["a"], a.astype(np.float64) + b)


@pytest.mark.parametrize("count", [1, 255, 256, 32_769, 100_003])
def test_scale_with_bias_and_offsets(run: Runner, device: Device, count: int) -> None:
    x, y = random(count + 9), poisoned(count + 20)
    launch = element.scale(
        device.traits, count=count, factor=1.7, bias=-0.3, x_offset=9, y_offset=4
    )
    got = run(launch, {"x": x, "y": y})["y"]
    assert_close(got[4 : 4 + count], x[9:].astype(np.float64) * np.float32(1.7) - np.float32(0.3))
    assert_poison_around(View(shape=(count,), strides=(1,), offset=4), got)


def sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


def test_silu_also_far_out(run: Runner, device: Device) -> None:
    x = np.concatenate([random(1001) * 5, np.array([-1e4, -100, -88, 0, 88, 1e4], np.float32)])
    got = run(element.silu(device.traits, count=x.size), {"x": x, "y": poisoned(x.size)})["y"]
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        want = wide * sigmoid(wide)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize("m", [1, 3])
def test_swiglu_rows_side_by_side(run: Runner, device: Device, m: int) -> None:
    k, stride = 97, 250
    both, y = random(m, stride), poisoned(m, 128)
    launch = element.swiglu(
        device.traits, k=k, m=m, gate_stride=stride, up_stride=stride, up_offset=k, y_stride=128,
        y_offset=13,
    )  # fmt: skip
    got = run(launch, {"gate": both, "up": both, "y": y})["y"]
    gate, up = both[:, :k].astype(np.float64), both[:, k : 2 * k].astype(np.float64)
    assert_close(got[:, 13 : 13 + k], gate * sigmoid(gate) * up)
    assert_poison_around(View(shape=(m, k), strides=(128, 1), offset=13), got.reshape(-1))


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("src", [DType.F32, DType.F16])
@pytest.mark.parametrize("dst", [DType.F32, DType.F16])
def test_cpy_converts_and_transposes(run: Runner, device: Device, src: DType, dst: DType) -> None:
    types = {DType.F32: np.float32, DType.F16: np.float16}
    x_view = View(shape=(5, 6, 9), strides=(1, 50, 5), offset=2)
    y_view = View(shape=(5, 6, 9), strides=(70, 11, 1), offset=7)
    x, y = random(320).astype(types[src]), poisoned(400, dtype=types[dst])
    launch = element.cpy(device.traits, x=x_view, y=y_view, src=src, dst=dst)
    got = run(launch, {"x": x, "y": y})["y"]
    np.testing.assert_array_equal(strided(y_view, got), strided(x_view, x).astype(types[dst]))
    assert_poison_around(y_view, got)


def test_cpy_of_ints_is_exact(run: Runner, device: Device) -> None:
    x = np.array([0, -1, 2**31 - 1, -(2**31), 123456789], np.int32)
    view = View.dense(x.shape)
    launch = element.cpy(device.traits, x=view, y=view, src=DType.I32, dst=DType.I32)
    np.testing.assert_array_equal(run(launch, {"x": x, "y": np.zeros_like(x)})["y"], x)


def test_cpy_between_shapes_when_one_is_dense(run: Runner, device: Device) -> None:
    x = random(4, 6)
    x_view = View(shape=(6, 4), strides=(1, 6))
    launch = element.cpy(device.traits, x=x_view, y=View.dense((24,)))
    got = run(launch, {"x": x, "y": poisoned(24)})["y"]
    np.testing.assert_array_equal(got, x.T.reshape(-1))


# -- norms and reductions ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 33, 576, 2048])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(run: Runner, device: Device, k: int, weighted: bool) -> None:
    m, eps = 3, 1e-5
    x, w = random(m, k + 5) * 3, random(k, seed=2)
    launch = row.rms_norm(
        device.traits, k=k, m=m, eps=eps, weighted=weighted, x_stride=k + 5, x_offset=5,
        y_stride=k + 2, y_offset=1,
    )  # fmt: skip
    operands = {"x": x, "w": w, "y": poisoned(m, k + 2)}
    got = run(launch, operands if weighted else {"x": x, "y": operands["y"]})["y"]
    wide = x[:, 5:].astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps) * (w if weighted else 1)
    assert_close(got[:, 1 : k + 1], want)
    assert_poison_around(View(shape=(m, k), strides=(k + 2, 1), offset=1), got.reshape(-1))


@pytest.mark.parametrize("k", [1, 63, 64, 1000])
@pytest.mark.parametrize("mask_rows", [0, 1, 3])
def test_soft_max(run: Runner, device: Device, k: int, mask_rows: int) -> None:
    m, scale = 6, 0.125
    x, mask = random(m, k) * 100, random(max(mask_rows, 1), k, seed=2)
    mask[:, 1::3] = -np.inf
    launch = row.soft_max(device.traits, k=k, m=m, scale=scale, mask_rows=mask_rows, y_stride=k + 3)
    operands = {"x": x, "y": poisoned(m, k + 3)} | ({"mask": mask} if mask_rows else {})
    got = run(launch, operands)["y"]
    scores = x.astype(np.float64) * scale
    if mask_rows:
        scores += np.tile(mask.astype(np.float64), (m // mask_rows, 1))
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    assert_close(got[:, :k], powers / powers.sum(axis=1, keepdims=True))
    assert_poison_around(View(shape=(m, k), strides=(k + 3, 1)), got.reshape(-1))


@pytest.mark.parametrize("k", [1, 17, 49_152])
def test_argmax_takes_the_first_of_equals(run: Runner, device: Device, k: int) -> None:
    x = np.round(random(4, k) * 2)
    x[1] = -np.inf
    x[2, : k // 2] = np.nan
    y = np.full(6, -5, np.int32)
    got = run(row.argmax(device.traits, k=k, m=4, y_offset=1), {"x": x, "y": y})["y"]
    want = np.argmax(np.where(np.isnan(x), -np.inf, x), axis=1)
    np.testing.assert_array_equal(got, [-5, *want, -5])


# -- rotary embedding ----------------------------------------------------------------------------


def rotated(
    x: np.ndarray, positions: np.ndarray, n_dims: int, mode: str, base: float, scale: float,
    factors: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """x [m, heads, head_dim] turned, in float64."""
    pairs = np.arange(n_dims // 2)
    first = pairs if mode == "neox" else 2 * pairs
    second = first + (n_dims // 2 if mode == "neox" else 1)
    angle = positions[:, None] * scale * base ** (-2.0 * pairs / n_dims) / factors
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    y = x.astype(np.float64)
    u, v = y[..., first], y[..., second]
    turned = y.copy()
    turned[..., first], turned[..., second] = u * cos - v * sin, u * sin + v * cos
    return turned


@pytest.mark.parametrize("mode", ["norm", "neox"])
@pytest.mark.parametrize(("head_dim", "n_dims"), [(64, 64), (64, 48), (80, 80), (6, 2)])
@pytest.mark.parametrize("with_factors", [False, True])
def test_rope(
    run: Runner, device: Device, mode: row.RopeMode, head_dim: int, n_dims: int, with_factors: bool
) -> None:
    heads, positions = 3, np.array([0, 1, 777, 100_000], np.int32)
    m, width, stride = len(positions), heads * head_dim, heads * head_dim + 11
    x, factors = random(m, stride), np.abs(random(n_dims // 2, seed=3)) + 1
    launch = row.rope(
        device.traits, head_dim=head_dim, n_dims=n_dims, n_heads=heads, m=m, mode=mode,
        freq_base=1e5, freq_scale=0.5, factors=with_factors, x_stride=stride, x_offset=4,
        y_stride=width + 1, y_offset=1,
    )  # fmt: skip
    operands = {"x": x, "positions": positions, "y": poisoned(m, width + 1)}
    got = run(launch, operands | ({"factors": factors} if with_factors else {}))["y"]
    ones = np.ones_like(factors)
    source = x[:, 4 : 4 + width].reshape(m, heads, head_dim)
    want = rotated(source, positions, n_dims, mode, 1e5, 0.5, factors if with_factors else ones)
    assert_close(got[:, 1:], want.reshape(m, width))
    assert (got[:, 0] == POISON).all()


def test_rope_in_place(run: Runner, device: Device) -> None:
    x, positions = random(2, 9, 64), np.array([5, 4095], np.int32)
    launch = row.rope(device.traits, head_dim=64, n_dims=32, n_heads=9, m=2)
    args = tuple("x" if arg == "y" else arg for arg in launch.args)
    in_place = Launch(
        variant=launch.variant, args=args, global_size=launch.global_size, writes=("x",)
    )
    got = run(in_place, {"x": x, "positions": positions})["x"]
    assert_close(got, rotated(x, positions, 32, "norm", 10000.0, 1.0, np.ones(16)))


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16])
def test_get_rows(run: Runner, device: Device, dtype: DType) -> None:
    k, table = 65, random(10, 65).astype({DType.F32: np.float32, DType.F16: np.float16}[dtype])
    ids = np.array([9, 0, 3, 3, -1, 10], np.int32)
    launch = row.get_rows(
        device.traits, dtype=dtype, k=k, m=len(ids), table_rows=10, y_stride=70, y_offset=2
    )
    got = run(launch, {"table": table, "ids": ids, "y": poisoned(len(ids), 70)})["y"]
    np.testing.assert_array_equal(got[:4, 2 : k + 2], table[ids[:4]].astype(np.float32))
    assert np.isnan(got[4:, 2 : k + 2]).all()
    assert (got[:, :2] == POISON).all()
    assert (got[:, k + 2 :] == POISON).all()


def blocks(dtype: DType, rows: int, k: int) -> np.ndarray:
    """Random weight blocks with scales of a sane size, as bytes [rows, row bytes]."""
    values = np.random.default_rng(5).standard_normal((rows, k)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[dtype.name]
    try:
        return np.asarray(gguf.quants.quantize(values, kind))
    except NotImplementedError:  # K-quants are only decoded there: random bits, small scales
        raw = np.random.default_rng(6).integers(0, 256, (rows, dtype.row_bytes(k)), np.uint8)
        scales = raw.reshape(rows, -1, dtype.nbytes)
        at = dtype.nbytes - 2 if dtype is DType.Q6_K else 0
        scales[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        if dtype is not DType.Q6_K:
            scales[..., 2:4] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)
        return raw


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.quantized])
def test_get_rows_of_a_quantised_table(run: Runner, device: Device, dtype: DType) -> None:
    rows, k, ids = 37, 512, np.array([36, 0, 15, 16, 36, 37], np.int32)
    raw = blocks(dtype, rows, k)
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype.name])
    table = pack("lane16", dtype, rows, k, raw.reshape(-1))
    launch = row.get_rows(
        device.traits, dtype=dtype, layout="lane16", k=k, m=len(ids), table_rows=rows
    )
    got = run(launch, {"table": table, "ids": ids, "y": poisoned(len(ids), k)})["y"]
    assert_close(got[:-1], want[ids[:-1]].astype(np.float64), 1e-6)
    assert np.isnan(got[-1]).all()


@pytest.mark.parametrize("dst", [DType.F32, DType.F16])
def test_set_rows(run: Runner, device: Device, dst: DType) -> None:
    kind = {DType.F32: np.float32, DType.F16: np.float16}[dst]
    k, x, ids = 40, random(5, 60), np.array([7, 0, 8, -1, 2], np.int32)
    cache = poisoned(8, 100, dtype=kind)
    launch = row.set_rows(
        device.traits, k=k, m=5, dst=dst, cache_rows=8, x_stride=60, x_offset=20,
        cache_stride=100, cache_offset=50,
    )  # fmt: skip
    got = run(launch, {"x": x, "ids": ids, "cache": cache})["cache"]
    want = cache.copy()
    for source, target in ((0, 7), (1, 0), (4, 2)):
        want[target, 50 : 50 + k] = x[source, 20 : 20 + k].astype(kind)
    np.testing.assert_array_equal(got, want)


# -- the dry launch ------------------------------------------------------------------------------


def launches(device: Device) -> list[Launch]:
    """One launch of each definition of the two families."""
    traits, view = device.traits, View.dense((4, 32))
    return [
        element.binary(traits, op="add", a=view, b=view),
        element.scale(traits, count=32, factor=2.0),
        element.swiglu(traits, k=32, m=4),
        element.cpy(traits, x=view, y=view, dst=DType.F16),
        *(row.rms_norm(traits, k=32, m=4, eps=1e-5, weighted=flag) for flag in (False, True)),
        *(row.soft_max(traits, k=32, m=4, mask_rows=rows) for rows in (0, 1)),
        row.argmax(traits, k=32, m=4),
        *(
            row.rope(traits, head_dim=32, n_dims=32, n_heads=1, m=4, factors=flag)
            for flag in (False, True)
        ),
        row.get_rows(traits, dtype=DType.F32, k=32, m=4),
        row.set_rows(traits, k=32, m=4, dst=DType.F32),
    ]


def test_every_definition_is_launched_here(device: Device) -> None:
    known = {item.name for item in (*element.DEFINITIONS, *row.DEFINITIONS)}
    assert {launch.variant.definition for launch in launches(device)} == known


def test_zero_bounds_touch_nothing(device: Device) -> None:
    for launch in launches(device):
        local = launch.variant.local_size
        args = tuple(arg if isinstance(arg, str) else type(arg)(0) for arg in launch.args)
        dry = Launch(variant=launch.variant, args=args, global_size=local, writes=launch.writes)
        names = [arg for arg in args if isinstance(arg, str)]
        operands: Mapping[str, np.ndarray] = {name: poisoned(math.prod(local)) for name in names}
        for name, result in launch_once(device, dry, operands).items():
            assert (result == POISON).all(), f"{launch.variant.label()} wrote {name}"
