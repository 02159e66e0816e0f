"""Matrix products on every device against float64 over gguf's dequantisation of random blocks."""

from __future__ import annotations

import gguf
import msgspec
import numpy as np
import pytest

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels.device import Device
from hrxmp.kernels.layout import pack, packed_bytes
from hrxmp.kernels.mul_mat import WeightSpec, fuses_norm, mul_mat, weight_layout
from tests.device.conftest import Runner

FLOATS = [DType.F32, DType.F16]
QUANTIZED = [dtype for dtype in DType if dtype.quantized]
POISON = np.float32(np.nan)


class Weight(msgspec.Struct, frozen=True):
    """A random weight: its spec, the device's bytes, and its exact values."""

    spec: WeightSpec
    packed: np.ndarray
    exact: np.ndarray


def random_blocks(rng: np.random.Generator, dtype: DType, n: int, k: int) -> np.ndarray:
    """Random ggml rows whose scales are finite and of a weight's usual size."""
    if dtype in FLOATS:
        values = rng.standard_normal((n, k)) / 16
        return values.astype(np.float32 if dtype is DType.F32 else np.float16).view(np.uint8)
    blocks = rng.integers(0, 256, (n, k // dtype.block, dtype.nbytes), dtype=np.uint8)
    halves = {DType.Q6_K: [208]}.get(dtype, [0])
    if dtype in (DType.Q4_1, DType.Q5_1, DType.Q4_K, DType.Q5_K):
        halves = [0, 2]
    for at in halves:
        scales = rng.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def make_weight(
    device: Device, rng: np.random.Generator, dtype: DType, n: int, k: int, layout: str = ""
) -> Weight:
    raw = random_blocks(rng, dtype, n, k)
    layout = layout or weight_layout(device.traits, dtype, n, k)
    packed = pack(layout, dtype, n, k, raw.reshape(-1))
    assert packed.size == packed_bytes(layout, dtype, n, k)
    kind = gguf.GGMLQuantizationType[dtype.label.upper()]
    exact = gguf.quants.dequantize(raw, kind).astype(np.float64).reshape(n, k)
    return Weight(WeightSpec(dtype=dtype, layout=layout, n=n), packed, exact)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 8e-5) -> None:
    """Off by at most `tolerance` of the largest value.

    A block's activations become integers of 16 bits, each off by up to 1.5e-5 of the block's
    largest, evenly spread. Error and value of a sum both grow with the root of its length, which
    leaves a standard deviation of about 1e-5 of the largest sum. The worst of some thousand sums is
    five of those off, and swiglu multiplies two sums: eight.
    """
    scale = np.abs(expected).max()
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= tolerance * scale


def product(
    run: Runner, device: Device, weights: list[Weight], x: np.ndarray, **options: object
) -> np.ndarray:
    m, k = x.shape
    launch = mul_mat(device.traits, weights=tuple(w.spec for w in weights), k=k, m=m, **options)
    columns = weights[0].spec.n
    if options.get("epilogue") != "swiglu":
        columns = sum(w.spec.n for w in weights)
    operands = {"x": x, "y": np.full((m, columns), POISON)}
    operands |= {f"w{i}": w.packed for i, w in enumerate(weights)}
    return run(launch, operands)["y"]


@pytest.mark.parametrize("m", [1, 2, 13])
@pytest.mark.parametrize("dtype", [*FLOATS, *QUANTIZED], ids=lambda d: d.label)
def test_every_dtype(device: Device, run: Runner, dtype: DType, m: int) -> None:
    rng = np.random.default_rng([m, *dtype.label.encode()])
    weight = make_weight(device, rng, dtype, 80, 512)
    x = rng.standard_normal((m, 512)).astype(np.float32)
    x[:, 32:64] *= 300  # activations have outliers
    close(product(run, device, [weight], x), x.astype(np.float64) @ weight.exact.T)


@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_one_row_may_take_the_kernel_of_many(device: Device, run: Runner, epilogue: str) -> None:
    rng = np.random.default_rng(3)
    weights = [make_weight(device, rng, DType.Q4_1, 80, 576) for _ in range(2)]
    x = rng.standard_normal((1, 576)).astype(np.float32)
    found = product(run, device, weights, x, epilogue=epilogue, many=True)
    first, second = (x.astype(np.float64) @ weight.exact.T for weight in weights)
    gated = first / (1 + np.exp(-first)) * second
    close(found, gated if epilogue == "swiglu" else np.hstack([first, second]))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("n", [1, 31, 150])
def test_rows_that_fill_no_group(device: Device, run: Runner, n: int, m: int) -> None:
    rng = np.random.default_rng([n, m])
    weights = [make_weight(device, rng, DType.Q4_1, rows, 96) for rows in (n, 16, n)]
    x = rng.standard_normal((m, 96)).astype(np.float32)
    exact = np.concatenate([w.exact for w in weights])
    close(product(run, device, weights, x), x.astype(np.float64) @ exact.T)


@pytest.mark.parametrize("m", [1, 9])
def test_formats_may_differ(device: Device, run: Runner, m: int) -> None:
    rng = np.random.default_rng(m)
    formats = DType.Q4_K, DType.Q6_K, DType.Q5_0
    weights = [
        make_weight(device, rng, dtype, n, 512)
        for dtype, n in zip(formats, (48, 20, 64), strict=True)
    ]
    x = rng.standard_normal((m, 512)).astype(np.float32)
    exact = np.concatenate([w.exact for w in weights])
    close(product(run, device, weights, x), x.astype(np.float64) @ exact.T)
    with pytest.raises(UnsupportedError, match="only some have blocks"):
        product(run, device, [weights[0], make_weight(device, rng, DType.F32, 16, 512)], x)


@pytest.mark.parametrize("m", [1, 64, 100, 197])
def test_swiglu(device: Device, run: Runner, m: int) -> None:
    rng = np.random.default_rng(m)
    gate, up = (make_weight(device, rng, DType.Q4_1, 176, 576) for _ in range(2))
    x = rng.standard_normal((m, 576)).astype(np.float32)
    g, u = (x.astype(np.float64) @ w.exact.T for w in (gate, up))
    close(product(run, device, [gate, up], x, epilogue="swiglu"), g / (1 + np.exp(-g)) * u)


@pytest.mark.parametrize("m", [1, 11])
def test_residual_strides_offsets(device: Device, run: Runner, m: int) -> None:
    rng = np.random.default_rng(m)
    weight = make_weight(device, rng, DType.Q8_0, 64, 160)
    x = rng.standard_normal((m, 200)).astype(np.float32)
    residual = rng.standard_normal((m, 70)).astype(np.float32)
    launch = mul_mat(
        device.traits,
        weights=(weight.spec,),
        k=160,
        m=m,
        epilogue="add",
        x_stride=200,
        x_offset=24,
        r_stride=70,
        r_offset=5,
        y_stride=90,
        y_offset=7,
    )
    y = np.full((m, 90), 7.5, np.float32)
    operands = {"x": x, "w0": weight.packed, "residual": residual, "y": y}
    result = run(launch, operands)["y"]
    expected = x[:, 24:184].astype(np.float64) @ weight.exact.T + residual[:, 5:69]
    close(result[:, 7:71], expected)
    assert (result[:, :7] == 7.5).all()
    assert (result[:, 71:] == 7.5).all()


def test_norm_is_fused_for_one_row(device: Device, run: Runner) -> None:
    if not fuses_norm(device.traits, 1):
        pytest.skip("this device's products take normalised rows")
    rng = np.random.default_rng(5)
    weight = make_weight(device, rng, DType.Q4_1, 96, 576)
    x = (5 * rng.standard_normal((1, 576))).astype(np.float32)
    norm = rng.uniform(0.5, 2, 576).astype(np.float32)
    launch = mul_mat(device.traits, weights=(weight.spec,), k=576, m=1, norm=True, eps=1e-5)
    y = np.full((1, 96), POISON)
    result = run(launch, {"x": x, "norm_w": norm, "w0": weight.packed, "y": y})["y"]
    exact = x.astype(np.float64)
    exact *= norm / np.sqrt((exact**2).mean() + 1e-5)
    close(result, exact @ weight.exact.T)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.label)
def test_row_major_matrices(device: Device, run: Runner, dtype: DType) -> None:
    rng = np.random.default_rng(3)
    weight = make_weight(device, rng, dtype, 37, 45, layout="ggml")
    x = rng.standard_normal((7, 45)).astype(np.float32)
    close(product(run, device, [weight], x), x.astype(np.float64) @ weight.exact.T)


@pytest.mark.parametrize("m", [1, 2])
def test_zero_bounds_touch_nothing(device: Device, run: Runner, m: int) -> None:
    weight = make_weight(device, np.random.default_rng(0), DType.Q4_1, 64, 576)
    launch = mul_mat(device.traits, weights=(weight.spec,), k=576, m=m)
    args = tuple(0 if isinstance(arg, int) else arg for arg in launch.args)
    local = launch.variant.local_size
    dry = msgspec.structs.replace(launch, args=args, global_size=local)
    page = np.full(4096, 85, np.uint8)
    operands = {name: page for name in args if isinstance(name, str)}
    assert (run(dry, operands)["y"] == page).all()


def test_wrong_calls_are_refused(device: Device) -> None:
    spec = WeightSpec(dtype=DType.Q4_1, layout="ggml", n=16)
    with pytest.raises(UnsupportedError, match="must be packed"):
        mul_mat(device.traits, weights=(spec,), k=64, m=1)
    with pytest.raises(UnsupportedError, match="cannot be multiplied"):
        weight_layout(device.traits, DType.Q4_K, 16, 96)
    with pytest.raises(UnsupportedError, match="are not a q4_1 weight"):
        pack("lane16", DType.Q4_1, 16, 64, np.zeros(7, np.uint8))


@pytest.mark.parametrize("dtype", [*FLOATS, *QUANTIZED], ids=lambda d: d.label)
def test_packing_a_large_weight_in_steps_is_the_same(device: Device, dtype: DType) -> None:
    rng = np.random.default_rng(9)
    n, k = 4096 * 2 + 32, 1024
    raw = random_blocks(rng, dtype, n, k).reshape(-1)
    packed = pack("lane16", dtype, n, k, raw)
    half = 4096
    first = pack("lane16", dtype, half, k, raw[: half * dtype.row_bytes(k)])
    rest = pack("lane16", dtype, n - half, k, raw[half * dtype.row_bytes(k) :])
    assert np.array_equal(packed, np.concatenate([first, rest]))
