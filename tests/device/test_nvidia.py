"""The kernels of NVIDIA's form: on such a device as they are, on CPU devices in their plain form.

The tests of the families run again, on devices that claim the form.
"""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from hrxmp.clock import mono_ns
from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.executor import session
from hrxmp.identity import new_run_id
from hrxmp.kernels import build, dispatch
from hrxmp.kernels.device import Device
from hrxmp.kernels.layout import pack
from hrxmp.kernels.mul_mat import mul_mat, weight_layout
from hrxmp.models.generator import LlamaModel
from hrxmp.settings import Settings
from tests.device.conftest import _EXPECTED, Runner, _devices, launch_once
from tests.device.test_attention import (
    softmax_attention,
    test_attention,
    test_rope_flash_attn,
)
from tests.device.test_mul_mat import (
    QUANTIZED,
    close,
    make_weight,
    random_blocks,
    test_every_dtype,
    test_norm_is_fused_for_one_row,
    test_residual_strides_offsets,
    test_row_major_matrices,
    test_rows_that_fill_no_group,
    test_swiglu,
    test_zero_bounds_touch_nothing,
)
from tests.model_files import write_tiny
from tests.reference_llama import ReferenceLlama

__all__ = [
    "test_attention",
    "test_every_dtype",
    "test_norm_is_fused_for_one_row",
    "test_residual_strides_offsets",
    "test_rope_flash_attn",
    "test_row_major_matrices",
    "test_rows_that_fill_no_group",
    "test_swiglu",
    "test_zero_bounds_touch_nothing",
]


# Intel's compiler breaks the plain form of some of these kernels; without optimisation it is right.
INTEL_OPTIONS = "-cl-opt-disable"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """A device that dispatch takes for NVIDIA's."""
    if request.param == "pocl-cpu":
        pytest.skip("PoCL takes minutes to compile groups of 512 items")
    found = _devices().get(request.param)
    if found is None:
        pytest.skip(_EXPECTED[request.param])
    claimed = copy.copy(found)
    claimed.traits = msgspec.structs.replace(found.traits, form="nvidia")
    return claimed


@pytest.fixture
def run(device: Device) -> Runner:
    options = INTEL_OPTIONS if device.info.platform.startswith("Intel") else ""
    return lambda launch, operands: launch_once(device, launch, operands, options)


@pytest.mark.parametrize("length", [30, 511, 800])
def test_a_whole_model_as_one_launch(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """On a CPU one work-group does it all; on a GPU test_llama has all of them.

    From 512 rows on groups share a head: the second decoded token after 511.
    """
    if not device.traits.is_cpu:
        pytest.skip("test_llama runs models on this device as they are")
    monkeypatch.setattr(session, "open_device", lambda *_args, **_options: device)
    monkeypatch.setattr(build, "_OPTIONS", f"{build._OPTIONS} {INTEL_OPTIONS}")
    settings = Settings(async_jit=False, cache=str(tmp_path / "store"))
    opened = session.Session(settings, session.Link(run_id=new_run_id(), run_begin_ns=mono_ns()))
    path = write_tiny(tmp_path / "m.gguf", "q4_k_m", seed=3)
    reference, model = ReferenceLlama(path), LlamaModel.load(opened.executor, path, ubatch=200)
    tokens = np.random.default_rng(1).integers(0, model.config.n_vocab, length).tolist()
    pairs = [(model.prefill(tokens), reference.forward(tokens)[-1])]
    pairs += [(model.decode(token), reference.forward([token])[-1]) for token in (5, 600, 7)]
    for found, expected in pairs:
        assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
    names = [variant.definition for variant in opened.executor.variants(model.graph(1))]
    assert names == ["addresses", "nv_program"]
    opened.close("ok")


@pytest.mark.parametrize("m", [1, 3])
def test_formats_go_together(device: Device, run: Runner, m: int) -> None:
    """Queries and keys of one type, values of another, as llama.cpp's quantiser mixes them."""
    rng = np.random.default_rng(m)
    dtypes = [DType.Q4_K, DType.Q4_K, DType.Q6_K]
    weights = [make_weight(device, rng, dtype, 64, 512) for dtype in dtypes]
    assert dispatch.mixes(device.traits, DType.Q4_K, DType.Q6_K)
    x = rng.standard_normal((m, 512)).astype(np.float32)
    launch = mul_mat(device.traits, weights=tuple(w.spec for w in weights), k=512, m=m)
    operands = {"x": x, "y": np.full((m, 192), np.nan, np.float32)}
    operands |= {f"w{i}": w.packed for i, w in enumerate(weights)}
    exact = np.concatenate([w.exact for w in weights])
    close(run(launch, operands)["y"], x.astype(np.float64) @ exact.T)


@pytest.mark.parametrize("epilogue", ["none", "add", "swiglu"])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=lambda d: d.label)
@pytest.mark.parametrize(("m", "n"), [(5, 144), (200, 144), (130, 4490)])
def test_tensor_cores(
    device: Device, run: Runner, dtype: DType, m: int, n: int, epilogue: str
) -> None:
    """Few columns and many take tiles of their own size."""
    if not dispatch.packs_rows(device.traits, [dtype], 512, m):
        pytest.skip("this device has no tensor cores")
    rng = np.random.default_rng(m)
    sizes = (n, n) if epilogue == "swiglu" else (n,)
    weights = [make_weight(device, rng, dtype, n, 512) for n in sizes]
    x = rng.standard_normal((m, 512)).astype(np.float32)
    norm = rng.uniform(0.5, 2, 512).astype(np.float32)
    packing = dispatch.pack_rows(
        device.traits, k=512, m=m, norm=True, x_stride=512, x_offset=0, eps=1e-5
    )
    rows = np.zeros(m * dispatch.packed_row_bytes(512), np.uint8)
    packed = run(packing, {"x": x, "norm_w": norm, "y": rows})["y"]
    launch = mul_mat(
        device.traits, weights=tuple(w.spec for w in weights), k=512, m=m, packed=True,
        epilogue=epilogue,
    )  # fmt: skip
    residual = rng.standard_normal((m, n)).astype(np.float32)
    operands = {"x": packed, "residual": residual, "y": np.full((m, n), np.nan, np.float32)}
    operands |= {f"w{i}": w.packed for i, w in enumerate(weights)}
    exact = x.astype(np.float64)
    exact *= norm / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
    first, last = exact @ weights[0].exact.T, exact @ weights[-1].exact.T
    gated = first / (1 + np.exp(-np.clip(first, -700, 700))) * last
    expected = {"none": first, "add": first + residual, "swiglu": gated}
    close(run(launch, operands)["y"], expected[epilogue])


def test_many_rows_stride_over_the_groups(device: Device, run: Runner) -> None:
    rng = np.random.default_rng(1)
    n = 16 * 4 * 2 * device.traits.compute_units * 4 + 37
    weight = make_weight(device, rng, DType.Q6_K, n, 256)
    x = rng.standard_normal((1, 256)).astype(np.float32)
    launch = mul_mat(device.traits, weights=(weight.spec,), k=256, m=1)
    y = np.full((1, n), np.nan, np.float32)
    close(run(launch, {"x": x, "w0": weight.packed, "y": y})["y"], x @ weight.exact.T)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=lambda d: d.label)
def test_get_rows(device: Device, run: Runner, dtype: DType) -> None:
    rng = np.random.default_rng(2)
    n, k = 20, 512
    raw = random_blocks(rng, dtype, n, k)
    layout = weight_layout(device.traits, dtype, n, k)
    table = pack(layout, dtype, n, k, raw.reshape(-1))
    kind = gguf.GGMLQuantizationType[dtype.label.upper()]
    exact = gguf.quants.dequantize(raw, kind).reshape(n, k)
    ids = np.array([3, 19, 0, -1, 20], np.int32)
    launch = dispatch.get_rows(
        device.traits, dtype=dtype, layout=layout, k=k, m=5, table_rows=n, y_stride=k + 4
    )
    y = np.full((5, k + 4), 7.5, np.float32)
    result = run(launch, {"table": table, "ids": ids, "y": y})["y"]
    np.testing.assert_allclose(result[:3, :k], exact[ids[:3]], rtol=1e-6, atol=1e-6)
    assert np.isnan(result[3:, :k]).all()
    assert (result[:, k:] == 7.5).all()


@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.F16], ids=lambda d: d.label)
def test_attention_of_rows_in_any_order(device: Device, run: Runner, kv_dtype: DType) -> None:
    """Positions need not rise; one below zero sees nothing, one beyond the cache all of it."""
    rng = np.random.default_rng(4)
    m, heads, kv_heads, dim, capacity = 70, 4, 2, 64, 150
    positions = rng.integers(0, capacity, m).astype(np.int32)
    positions[[3, 69]], positions[[5, 64]] = -1, capacity + 7
    q = rng.standard_normal((m, heads, dim)).astype(np.float32)
    kind = np.float32 if kv_dtype is DType.F32 else np.float16
    k, v = (rng.standard_normal((kv_heads, capacity, dim)).astype(kind) for _ in "kv")
    launch = dispatch.flash_attn(
        device.traits, head_dim=dim, n_heads=heads, n_kv_heads=kv_heads, m=m, scale=0.2,
        kv_dtype=kv_dtype, kv_capacity=capacity,
    )  # fmt: skip
    assert launch.variant.definition == "nv_flash_tile"
    y = np.full((m, heads * dim), np.nan, np.float32)
    operands = {"q": q.reshape(m, -1), "k_cache": k, "v_cache": v, "positions": positions, "y": y}
    found = run(launch, operands)["y"].reshape(m, heads, dim)
    seen = positions >= 0
    exact = [values.astype(np.float64) for values in (q[seen], k, v)]
    expected = softmax_attention(*exact, np.minimum(positions[seen], capacity - 1), 0.2)
    close(found[seen], expected)
    assert (found[~seen] == 0).all()


def test_odd_calls_are_refused(device: Device) -> None:
    weight = dispatch.WeightSpec(dtype=DType.Q4_K, layout="lane16", n=16)
    with pytest.raises(UnsupportedError, match="must be packed"):
        mul_mat(device.traits, weights=(weight,), k=256, m=1)
    plain = dispatch.WeightSpec(dtype=DType.F32, layout="ggml", n=16)
    with pytest.raises(UnsupportedError, match="with a norm"):
        mul_mat(device.traits, weights=(plain,), k=45, m=1, norm=True)
