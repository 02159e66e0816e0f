"""A decode program as one launch on NVIDIA's devices: what its key depends on, and what not."""

from __future__ import annotations

import pytest

from hrxmp.dtypes import DType
from hrxmp.kernels import addresses, dispatch, nvidia, nvidia_program
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.launch import Launch

TRAITS = DeviceTraits(
    form="nvidia",
    is_cpu=False,
    compute_units=132,
    simd_width=32,
    local_mem_bytes=49152,
    base_align_bytes=512,
    fp16=False,
    subgroups=False,
    dot_product=False,
    max_work_group=1024,
)

Commands = tuple[list[Launch], list[dict[str, int]]]


def weight(dtype: DType, n: int) -> dispatch.WeightSpec:
    return dispatch.WeightSpec(dtype=dtype, layout=nvidia.weight_layout(dtype), n=n)


def commands(layers: int, capacity: int = 2048, eps: float = 1e-5) -> Commands:
    """Embedding, then of each layer qkv, attention and output; each layer has its own weights."""
    launches: list[Launch] = []
    slots: list[dict[str, int]] = []
    fresh = iter(range(100, 10_000))

    def add(launch: Launch, **fixed: int) -> None:
        names = dict.fromkeys(arg for arg in launch.args if isinstance(arg, str))
        launches.append(launch)
        slots.append({name: fixed.get(name, -1) for name in names})
        for name in names:
            if slots[-1][name] < 0:
                slots[-1][name] = next(fresh)

    table = dispatch.get_rows(TRAITS, dtype=DType.Q6_K, layout="planes", k=2048, m=1)
    add(table, ids=0, y=1)
    for _ in range(layers):
        qkv = (weight(DType.Q4_K, 2048), weight(DType.Q4_K, 512), weight(DType.Q6_K, 512))
        add(dispatch.mul_mat(TRAITS, weights=qkv, k=2048, m=1, norm=True, eps=eps), x=1, y=2)
        attention = dispatch.rope_flash_attn(
            TRAITS, head_dim=64, n_heads=32, n_kv_heads=8, m=1, scale=0.125, n_dims=64,
            mode="norm", freq_base=5e5, freq_scale=1.0, kv_dtype=DType.F16, kv_capacity=capacity,
        )  # fmt: skip
        add(attention, qkv=2, positions=3, y=4)
        output = dispatch.mul_mat(
            TRAITS, weights=(weight(DType.Q4_K, 2048),), k=2048, m=1, epilogue="add"
        )
        add(output, x=4, residual=1, y=1)
    return launches, slots


def fused(*args: object, **options: object) -> addresses.FusedProgram:
    found = nvidia_program.fuse(TRAITS, *commands(*args, **options))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_all_commands_become_one_launch_on_every_multiprocessor() -> None:
    program = fused(16)
    params = dict(program.launch.variant.params)
    assert params["COMMANDS"] == 1 + 3 * 16
    assert program.launch.global_size == (132 * program.launch.variant.local_size[0],)
    steps = [params[f"S{n}"] for n in range(nvidia_program.STEPS)]
    assert len([step for step in steps if step != "idle"]) == 4
    assert len(str(params["PLAN"]).split(",")) == 16 * (1 + 3 * 16)


@pytest.mark.parametrize("capacity", [2048, 4096, 512])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_what_changes_from_run_to_run_is_in_no_key(capacity: int, eps: float) -> None:
    """Also where a capacity equals some other size: 2048 is the row's length too."""
    program = fused(2, capacity=capacity, eps=eps)
    assert program.launch.variant == fused(2).launch.variant
    assert capacity in program.launch.args
    assert eps in program.launch.args


def test_every_buffer_is_in_the_table_once() -> None:
    _, slots = commands(16)
    wanted = {slot for held in slots for slot in held.values()}
    program = fused(16)
    listed = [slot for _, held in program.first for slot in held.values()]
    assert sorted(listed) == sorted(wanted)
    partials = 4 * 32 * (132 // 32) * (64 + 2)  # of each chunk of each head
    assert program.table_bytes == 8 * len(wanted) + partials
    assert [launch.args[:2] for launch, _ in program.first] == [
        (min(60, len(wanted) - at), at) for at in range(0, len(wanted), 60)
    ]


def test_what_does_not_fit_is_left_alone() -> None:
    launches, slots = commands(1)
    other = dispatch.silu(TRAITS, count=2048)
    assert nvidia_program.fuse(TRAITS, [*launches, other], [*slots, {"x": 1, "y": 5}]) is None
    assert nvidia_program.fuse(TRAITS, launches[:2], slots[:2]) is None  # no attention
    plain = dispatch.WeightSpec(dtype=DType.Q4_K, layout="ggml", n=2048)
    rows = dispatch.mul_mat(TRAITS, weights=(plain,), k=2048, m=2)
    assert nvidia_program.fuse(TRAITS, [*launches, rows], [*slots, slots[-1]]) is None
