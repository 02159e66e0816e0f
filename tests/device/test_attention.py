"""Attention and rotary positions on every device against float64."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels.attention import flash_attn, fuses_rope, rope_flash_attn, rope_set_rows
from hrxmp.kernels.device import Device
from hrxmp.kernels.launch import Launch
from tests.device.conftest import Runner

KINDS = {DType.F32: np.float32, DType.F16: np.float16}
SHAPES = [(64, 9, 3), (64, 8, 8), (128, 4, 1), (32, 2, 2)]
BASE = 10000.0


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, scale: float
) -> np.ndarray:
    """q [m, heads, d], k and v [kv heads, capacity, d], all float64."""
    shared = q.shape[1] // k.shape[0]
    result = np.empty_like(q)
    for token, position in enumerate(positions):
        for head in range(q.shape[1]):
            keys, values = k[head // shared, : position + 1], v[head // shared, : position + 1]
            scores = keys @ q[token, head] * scale
            weights = np.exp(scores - scores.max())
            result[token, head] = weights / weights.sum() @ values
    return result


def by_rows(cache: np.ndarray) -> np.ndarray:
    """A cache [kv heads, capacity, d] as [capacity, kv heads * d]."""
    return cache.transpose(1, 0, 2).reshape(cache.shape[1], -1)


def rotated(
    x: np.ndarray, positions: np.ndarray, n_dims: int, neox: bool, factors: np.ndarray
) -> np.ndarray:
    """x [m, heads, d] in float64."""
    half = n_dims // 2
    angles = positions[:, None] * BASE ** (-2 * np.arange(half) / n_dims) / factors
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first = slice(0, half) if neox else slice(0, n_dims, 2)
    second = slice(half, n_dims) if neox else slice(1, n_dims, 2)
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., first] * sin + x[..., second] * cos
    return result


def turning_error(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """How far rows of x may be off, [m, 1]: an angle is at most its position, its power, product,
    factor and last use are each rounded to a float, and a pair moves by its length times that."""
    longest = np.sqrt(2) * np.abs(x).max()
    return longest * 2.0**-24 * 4 * np.maximum(positions, 1)[:, None]


@pytest.mark.parametrize("kv_dtype", KINDS, ids=lambda d: d.label)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [(0, 1), (5, 1), (130, 1), (0, 7), (40, 33), (3, 100)], ids=str)
def test_attention(
    device: Device,
    run: Runner,
    kv_dtype: DType,
    shape: tuple[int, int, int],
    rows: tuple[int, int],
) -> None:
    d, heads, kv_heads = shape
    past, m = rows
    rng = np.random.default_rng([d, heads, past, m])
    capacity, stride = 160, heads * d + 48
    q = 3 * rng.standard_normal((m, stride)).astype(np.float32)
    k, v = (rng.standard_normal((kv_heads, capacity, d)).astype(KINDS[kv_dtype]) for _ in "kv")
    positions = (past + np.arange(m)).astype(np.int32)
    k[:, past + m :], v[:, past + m :] = np.nan, np.nan  # rows that nobody may read
    launch = flash_attn(
        device.traits,
        head_dim=d,
        n_heads=heads,
        n_kv_heads=kv_heads,
        m=m,
        scale=d**-0.5,
        kv_dtype=kv_dtype,
        kv_capacity=capacity,
        q_stride=stride,
        q_offset=16,
        y_stride=heads * d + 3,
        y_offset=3,
    )
    y = np.full((m, heads * d + 3), 7.5, np.float32)
    operands = {"q": q, "k_cache": k, "v_cache": v, "positions": positions, "y": y}
    result = run(launch, operands)["y"]
    expected = softmax_attention(
        q[:, 16 : 16 + heads * d].reshape(m, heads, d).astype(np.float64),
        k.astype(np.float64),
        v.astype(np.float64),
        positions,
        d**-0.5,
    )
    np.testing.assert_allclose(result[:, 3:], expected.reshape(m, -1), atol=3e-5)
    assert (result[:, :3] == 7.5).all()


@pytest.mark.parametrize("kv_dtype", KINDS, ids=lambda d: d.label)
@pytest.mark.parametrize("mode", ["norm", "neox"])
@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("n_dims", [64, 48])
def test_rope_set_rows(
    device: Device,
    run: Runner,
    kv_dtype: DType,
    mode: str,
    m: int,
    with_factors: bool,
    n_dims: int,
) -> None:
    rng = np.random.default_rng(m)
    heads, kv_heads, d, capacity = 6, 2, 64, 2100
    widths = heads * d, kv_heads * d
    qkv = rng.standard_normal((m, widths[0] + 2 * widths[1])).astype(np.float32)
    factors = rng.uniform(1, 8, n_dims // 2).astype(np.float32)
    positions = np.array([2047, 0, 5, 1, 900, 2099][:m], np.int32)
    launch = rope_set_rows(
        device.traits,
        head_dim=d,
        n_heads=heads,
        n_kv_heads=kv_heads,
        m=m,
        n_dims=n_dims,
        mode=mode,
        freq_base=BASE,
        freq_scale=1.0,
        kv_dtype=kv_dtype,
        kv_capacity=capacity,
        factors=with_factors,
    )
    cache = np.full((kv_heads, capacity, d), 7.5, KINDS[kv_dtype])
    operands = {"qkv": qkv, "positions": positions, "k_cache": cache, "v_cache": cache}
    if with_factors:
        operands["factors"] = factors
    result = run(launch, operands)
    q, k, v = np.split(qkv.astype(np.float64), [widths[0], widths[0] + widths[1]], axis=1)
    ones = factors.astype(np.float64) if with_factors else np.ones(n_dims // 2)
    expected_q = rotated(q.reshape(m, heads, d), positions, n_dims, mode == "neox", ones)
    expected_k = rotated(k.reshape(m, kv_heads, d), positions, n_dims, mode == "neox", ones)
    step = 1e-3 if kv_dtype is DType.F16 else 0
    allowed = turning_error(qkv, positions)
    assert (np.abs(result["qkv"][:, : widths[0]] - expected_q.reshape(m, -1)) <= allowed).all()
    keys, values = (by_rows(result[name]) for name in ("k_cache", "v_cache"))
    off = np.abs(keys[positions] - expected_k.reshape(m, -1))
    assert (off <= allowed + step * np.abs(expected_k.reshape(m, -1))).all()
    np.testing.assert_allclose(values[positions], v, rtol=step)
    others = np.setdiff1d(np.arange(capacity), positions)
    assert (keys[others] == 7.5).all()
    assert (values[others] == 7.5).all()


@pytest.mark.parametrize("kv_dtype", KINDS, ids=lambda d: d.label)
@pytest.mark.parametrize("mode", ["norm", "neox"])
@pytest.mark.parametrize("position", [0, 15, 300])
def test_rope_flash_attn(
    device: Device, run: Runner, kv_dtype: DType, mode: str, position: int
) -> None:
    if not fuses_rope(device.traits, 1):
        pytest.skip("this device takes rope and attention apart")
    rng = np.random.default_rng(position)
    heads, kv_heads, d, capacity = 10, 2, 64, 320
    qkv = rng.standard_normal((1, (heads + 2 * kv_heads) * d)).astype(np.float32)
    factors = rng.uniform(1, 8, d // 2).astype(np.float32)
    positions = np.array([position], np.int32)
    caches = [rng.standard_normal((kv_heads, capacity, d)).astype(KINDS[kv_dtype]) for _ in "kv"]
    for cache in caches:
        cache[:, position:] = np.nan
    launch = rope_flash_attn(
        device.traits,
        head_dim=d,
        n_heads=heads,
        n_kv_heads=kv_heads,
        m=1,
        scale=d**-0.5,
        n_dims=d,
        mode=mode,
        freq_base=BASE,
        freq_scale=1.0,
        kv_dtype=kv_dtype,
        kv_capacity=capacity,
        factors=True,
    )
    operands = {"qkv": qkv, "positions": positions, "factors": factors}
    operands |= {"k_cache": caches[0], "v_cache": caches[1]}
    result = run(launch, operands | {"y": np.full((1, heads * d), np.nan, np.float32)})
    q, k, v = np.split(qkv.astype(np.float64), [heads * d, (heads + kv_heads) * d], axis=1)
    turned = [
        rotated(x.reshape(1, -1, d), positions, d, mode == "neox", factors.astype(np.float64))
        for x in (q, k)
    ]
    step = 1e-3 if kv_dtype is DType.F16 else 0
    keys, values = (by_rows(result[name])[position] for name in ("k_cache", "v_cache"))
    off = np.abs(keys - turned[1].ravel())
    assert (off <= turning_error(qkv, positions)[0] + step * np.abs(turned[1].ravel())).all()
    np.testing.assert_allclose(values, v.ravel(), rtol=step)
    stored = [result[name].astype(np.float64) for name in ("k_cache", "v_cache")]
    expected = softmax_attention(turned[0], *stored, positions, d**-0.5)
    np.testing.assert_allclose(result["y"].ravel(), expected.ravel(), atol=1e-4)


def launches(device: Device, m: int) -> list[Launch]:
    sizes = {"head_dim": 64, "n_heads": 9, "n_kv_heads": 3, "m": m}
    cache = {"kv_dtype": DType.F16, "kv_capacity": 64}
    rope: dict[str, object] = {"n_dims": 64, "mode": "norm", "freq_base": BASE, "freq_scale": 1.0}
    return [
        flash_attn(device.traits, **sizes, **cache, scale=0.125),
        rope_set_rows(device.traits, **sizes, **cache, **rope),
    ]


@pytest.mark.parametrize("m", [1, 9])
def test_zero_bounds_touch_nothing(device: Device, run: Runner, m: int) -> None:
    for launch in launches(device, m):
        args = tuple(0 if isinstance(arg, int) else arg for arg in launch.args)
        local = launch.variant.local_size
        dry = msgspec.structs.replace(launch, args=args, global_size=local)
        page = np.full(4096, 85, np.uint8)
        operands = {name: page for name in args if isinstance(name, str)}
        assert all((array == page).all() for array in run(dry, operands).values())


def test_length_is_no_parameter(device: Device) -> None:
    for first, second in zip(launches(device, 9), launches(device, 300), strict=True):
        assert first.variant == second.variant


def test_wrong_calls_are_refused(device: Device) -> None:
    sizes = {"m": 1, "scale": 1.0, "kv_capacity": 8}
    with pytest.raises(UnsupportedError, match="evenly"):
        flash_attn(device.traits, head_dim=64, n_heads=9, n_kv_heads=2, kv_dtype=DType.F16, **sizes)
    with pytest.raises(UnsupportedError, match="cache of q8_0"):
        flash_attn(
            device.traits, head_dim=64, n_heads=9, n_kv_heads=3, kv_dtype=DType.Q8_0, **sizes
        )
