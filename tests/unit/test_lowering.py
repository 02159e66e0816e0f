"""Lowering: what is fused, what shares memory, what is refused. No device."""

from __future__ import annotations

import msgspec
import pytest

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.executor import arena
from hrxmp.executor.graph_program import GraphProgram, GraphPrograms
from hrxmp.executor.lowering import lower
from hrxmp.graph import Graph, Storage, Tensor
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.layer import LAYERS
from hrxmp.kernels.layout import packed_bytes
from hrxmp.kernels.mul_mat import weight_layout

TRAITS = DeviceTraits(
    form="intel-cpu", is_cpu=True, compute_units=2, simd_width=16, local_mem_bytes=1 << 18,
    base_align_bytes=128, fp16=True, subgroups=True, dot_product=True, max_work_group=8192,
)  # fmt: skip


def names(program: GraphProgram) -> list[str]:
    return [command.launch.variant.definition for command in program.commands]


def weight(graph: Graph, name: str, n: int, k: int, dtype: DType = DType.Q8_0) -> Tensor:
    layout = weight_layout(TRAITS, dtype, n, k)
    return graph.tensor(
        name, (n, k), dtype, Storage(packed_bytes(layout, dtype, n, k), name, layout)
    )


def layer(m: int, dtypes: tuple[DType, ...] = (DType.Q8_0,)) -> Graph:
    """Layers, one for each dtype; 4 heads over 2 KV heads of 32, width 128, as models/llama builds
    them."""
    graph = Graph(uid=m)
    x = graph.input("x", (m, 128))
    positions = graph.input("positions", (m,), DType.I32)
    for dtype in dtypes:
        x = one_layer(graph, x, positions, dtype)
    graph.output(x, "y")
    return graph


def one_layer(graph: Graph, x: Tensor, positions: Tensor, dtype: DType) -> Tensor:
    m = x.shape[0]
    norm = graph.tensor("norm", (128,), DType.F32, Storage(512))
    h = graph.mul(graph.rms_norm(x, 1e-5), norm)
    q = graph.mul_mat(weight(graph, "q", 128, 128, dtype), h).reshape((m, 4, 32))
    k = graph.mul_mat(weight(graph, "k", 64, 128, dtype), h).reshape((m, 2, 32))
    v = graph.mul_mat(weight(graph, "v", 64, 128, dtype), h).reshape((m, 2, 32))
    q, k = (graph.rope(t, positions, n_dims=32) for t in (q, k))
    caches = [
        graph.tensor(n, (2, 64, 32), DType.F32, Storage(64 * 256)).permute((1, 0, 2)) for n in "KV"
    ]
    k, v = (graph.set_rows(c, t, positions) for c, t in zip(caches, (k, v), strict=True))
    attended = graph.flash_attn(q, k, v, positions, scale=0.2)
    x = graph.add(graph.mul_mat(weight(graph, "o", 128, 128, dtype), attended), x)
    h = graph.mul(graph.rms_norm(x, 1e-5), norm)
    gate = graph.mul_mat(weight(graph, "gate", 256, 128, dtype), h)
    up = graph.mul_mat(weight(graph, "up", 256, 128, dtype), h)
    down = graph.mul_mat(weight(graph, "down", 128, 256, dtype), graph.swiglu(gate, up))
    return graph.add(down, x)


def test_a_decode_layer_is_one_launch_where_the_device_has_it() -> None:
    assert names(lower(layer(1), TRAITS, 1)) == ["layer_row"]


Q, F = DType.Q8_0, DType.Q4_0


def test_layers_that_differ_in_memory_only_are_one_launch() -> None:
    program = lower(layer(1, (Q, Q, Q)), TRAITS, 1)
    assert names(program) == ["addresses", "layer_stack"]
    table, stack = program.commands
    assert (table.once, stack.once) == (True, False)
    assert program.own_bytes == (3 * 16 * 8,)
    assert stack.slots["addresses"] == table.slots["table"]
    assert stack.launch.args[6] == 3
    assert stack.launch.flops == 3 * lower(layer(1), TRAITS, 1).commands[0].launch.flops


def test_stacks_end_where_layers_differ() -> None:
    program = lower(layer(1, (Q, Q, F, Q)), TRAITS, 1)
    # The kernel of the first two serves the last as well; the third needs one of its own anyway.
    assert names(program) == ["addresses", "layer_stack", "layer_row", "addresses", "layer_stack"]
    stacks = [c for c in program.commands if c.launch.variant.definition == "layer_stack"]
    assert [command.launch.args[6] for command in stacks] == [2, 1]
    tables = [c.slots["addresses"] for c in program.commands if "addresses" in c.slots]
    assert len(set(tables)) == len(program.own_bytes) == 2


def test_a_stack_has_an_end() -> None:
    program = lower(layer(1, (Q,) * (LAYERS + 2)), TRAITS, 1)
    stacks = [c.launch.args[6] for c in program.commands if not c.once]
    assert stacks == [LAYERS, 2]


def test_a_layer_whose_inside_somebody_reads_stays_apart() -> None:
    graph = layer(1)
    swiglu = next(node for node in graph.nodes if node.op == "swiglu")
    graph.output(swiglu, "inside")
    assert "layer_row" not in names(lower(graph, TRAITS, 1))


def test_a_decode_layer_is_five_launches_elsewhere() -> None:
    pocl = msgspec.structs.replace(TRAITS, form="pocl-cpu")
    found = names(lower(layer(1), pocl, 1))
    assert len(found) == 5
    assert not {"binary", "swiglu", "rms_norm_weighted", "cpy", "rope", "set_rows"} & set(found)


def test_a_prefill_layer_normalises_apart_and_fuses_the_rest() -> None:
    found = names(lower(layer(64), TRAITS, 1))
    assert found.count("rms_norm_weighted") == 2 and len(found) <= 8
    assert not {"binary", "swiglu", "cpy", "rope", "set_rows"} & set(found)


def test_a_last_row_takes_the_kernels_of_many_rows_where_the_graph_has_them() -> None:
    graph = Graph(uid=1)
    many = graph.mul_mat(weight(graph, "a", 128, 128), graph.input("x", (64, 128)))
    last = many.view((1, 128), offset=63 * many.strides[0])
    norm = graph.tensor("norm", (128,), DType.F32, Storage(512))
    one = graph.mul_mat(weight(graph, "b", 128, 128), graph.mul(graph.rms_norm(last, 1e-5), norm))
    graph.output(graph.mul_mat(weight(graph, "head", 512, 128), one), "y")
    commands = lower(graph, TRAITS, 1).commands
    first, normed, second, head = (command.launch.variant for command in commands)
    assert first == second
    assert (normed.definition, head.definition) == ("rms_norm_weighted", "mul_mat_vec")


def test_the_number_of_tokens_is_in_no_variant() -> None:
    variants = [
        {command.launch.variant for command in lower(layer(m), TRAITS, 1).commands}
        for m in (65, 100, 511)
    ]
    assert variants[0] == variants[1] == variants[2]


def test_an_output_is_never_overwritten_by_a_later_value() -> None:
    graph = Graph()
    x = graph.input("x", (8,))
    graph.output(graph.scale(x, 2.0), "first")
    y = x
    for _ in range(4):
        y = graph.scale(y, 3.0)
    graph.output(y, "last")
    program = lower(graph, TRAITS, 1)
    kept = {port.slot for port in program.outputs.values()}
    assert len(kept) == 2
    last_writer = {c.slots["y"]: c.node for c in program.commands}
    assert last_writer[program.outputs["first"].slot] == graph.outputs["first"].index


def test_a_value_that_somebody_else_reads_is_not_fused_away() -> None:
    graph = Graph()
    x = graph.input("x", (4, 128))
    product = graph.mul_mat(weight(graph, "w", 128, 128), x)
    graph.output(graph.add(product, x), "sum")
    graph.output(product, "product")
    assert "binary" in names(lower(graph, TRAITS, 1))


def test_a_residual_that_comes_later_is_not_fused() -> None:
    graph = Graph()
    x = graph.input("x", (4, 128))
    product = graph.mul_mat(weight(graph, "w", 128, 128), x)
    late = graph.silu(x)
    graph.output(graph.add(product, late), "sum")
    found = names(lower(graph, TRAITS, 1))
    assert found.index("unary") < found.index("binary")


def test_what_no_kernel_does_is_refused_with_its_node() -> None:
    graph = Graph()
    ids = graph.input("ids", (4,), DType.I32)
    graph.output(graph.scale(ids, 2.0, name="doubled"), "y")
    with pytest.raises(UnsupportedError, match=r'scale "doubled".*must be f32'):
        lower(graph, TRAITS, 1)


def test_an_unknown_op_lists_what_is_supported() -> None:
    graph = Graph()
    x = graph.input("x", (4,))
    Tensor(graph, "conv_9d", DType.F32, (4,), sources=(x,))
    with pytest.raises(UnsupportedError, match="conv_9d.*supported ops are add, mul"):
        lower(graph, TRAITS, 1)


def test_programs_are_found_by_uid_and_structure() -> None:
    programs = GraphPrograms()
    one, same, other = layer(1), layer(1), layer(2)
    other.uid = one.uid
    program = lower(one, TRAITS, programs.next_number())
    programs.keep(one, program)
    assert programs.find(same) is program
    assert programs.find(other) is None
    unnamed = layer(1)
    unnamed.uid = 0
    programs.keep(unnamed, program)
    assert programs.find(unnamed) is None


def test_a_program_is_plain_data() -> None:
    program = lower(layer(1), TRAITS, 1)
    assert msgspec.json.decode(msgspec.json.encode(program), type=GraphProgram) == program


def test_arena_values_that_live_at_once_never_share_a_slot() -> None:
    spans = [(0, 3, 10), (1, 2, 50), (3, 5, 20), (4, 9, 60), (6, 7, 5), (2, 8, 1)]
    values = [arena.Value(nbytes=size, first=first, last=last) for first, last, size in spans]
    plan = arena.plan(values)
    for i, a in enumerate(values):
        assert plan.slot_bytes[plan.slot_of[i]] >= a.nbytes
        for j, b in enumerate(values[:i]):
            if a.first <= b.last and b.first <= a.last:
                assert plan.slot_of[i] != plan.slot_of[j]
    assert len(plan.slot_bytes) < len(values)
