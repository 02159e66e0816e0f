"""What warm-up enumerates is what a model's graphs need: all of it, on devices of every kind."""

from __future__ import annotations

import math

import msgspec
import pytest

from hrxmp.dtypes import DType
from hrxmp.executor.lowering import lower
from hrxmp.graph import Graph, Storage
from hrxmp.kernels import dispatch
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.keys import Variant
from hrxmp.kernels.layout import packed_bytes
from hrxmp.models.coverage import all_graphs
from hrxmp.models.generator import capacities
from hrxmp.models.gguf_file import GgufFile
from hrxmp.models.llama import KvCache, LlamaConfig, LlamaWeights, build_graph
from tests.model_files import maker

CPU = DeviceTraits(
    form="intel-cpu", is_cpu=True, compute_units=2, simd_width=16, local_mem_bytes=1 << 18,
    base_align_bytes=128, fp16=True, subgroups=True, dot_product=True, max_work_group=8192,
)  # fmt: skip
DEVICES = {
    "intel-cpu": CPU,
    "tiles": msgspec.structs.replace(CPU, byte_tiles=True),
    "pocl-cpu": msgspec.structs.replace(CPU, form="pocl-cpu", dot_product=False, subgroups=False),
    "nvidia": msgspec.structs.replace(
        CPU, form="nvidia", is_cpu=False, compute_units=132, simd_width=32, fp16=False,
        local_mem_bytes=49152, subgroups=False, dot_product=False, max_work_group=1024,
    ),
    "generic": msgspec.structs.replace(
        CPU, form="generic", is_cpu=False, compute_units=16, simd_width=32, max_work_group=256
    ),
}  # fmt: skip
UBATCH = 70


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """Five layers whose matrices are of two kinds."""
    path = tmp_path_factory.mktemp("coverage") / "model.gguf"
    shape = msgspec.structs.replace(maker().TINY, n_layers=5)
    maker().write_model(path, shape, "q4_k_m", seed=0, tokenizer="bytes")
    return GgufFile.open(path)


def handle(traits: DeviceTraits, name: str, dtype: DType, shape: tuple[int, ...]) -> Storage:
    if len(shape) != 2:
        return Storage(dtype.row_bytes(math.prod(shape)), name)
    layout = dispatch.weight_layout(traits, dtype, *shape)
    return Storage(packed_bytes(layout, dtype, *shape), name, layout)


def variants(graph: Graph, traits: DeviceTraits) -> set[Variant]:
    return {command.launch.variant for command in lower(graph, traits, 0).commands}


def needed(
    file: GgufFile, traits: DeviceTraits, n_tokens: int, kv_dtype: DType, capacity: int = 2048
) -> set[Variant]:
    """What the whole model needs, as a run builds it."""
    config = LlamaConfig.from_gguf(file)
    tensors = file.tensors
    storages = {name: handle(traits, name, t.dtype, t.shape) for name, t in tensors.items()}
    nbytes = kv_dtype.row_bytes(capacity * config.n_kv)
    cache = KvCache(
        capacity=capacity, dtype=kv_dtype,
        keys=tuple(Storage(nbytes) for _ in range(config.n_layers)),
        values=tuple(Storage(nbytes) for _ in range(config.n_layers)),
    )  # fmt: skip
    weights = LlamaWeights(tensors=tensors, storages=storages)
    graphs = (build_graph(config, weights, cache, n_tokens, logits=x) for x in (True, False))
    return set().union(*(variants(graph, traits) for graph in graphs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.F16])
def test_every_length_is_covered(file: GgufFile, device: str, kv_dtype: DType) -> None:
    traits = DEVICES[device]

    def make(name: str, dtype: DType, shape: tuple[int, ...]) -> Storage:
        return handle(traits, name, dtype, shape)

    graphs = list(all_graphs(file, make, ubatch=UBATCH, kv_dtype=kv_dtype))
    covered = set().union(*(variants(graph, traits) for graph in graphs))
    every = set().union(*(needed(file, traits, m, kv_dtype) for m in range(1, UBATCH + 1)))
    for capacity in range(256, 4097, 256):
        every |= needed(file, traits, 1, kv_dtype, capacity)
    assert covered == every  # nothing is missing, and nothing is there for nobody
    assert len(every) > 8


def test_one_layer_stands_for_its_kind(file: GgufFile) -> None:
    """Two kinds and the last layer: most graphs have three layers instead of five."""
    assert capacities(LlamaConfig.from_gguf(file)) == [256, 4096]

    def make(name: str, dtype: DType, shape: tuple[int, ...]) -> Storage:
        return handle(CPU, name, dtype, shape)

    graphs = list(all_graphs(file, make, ubatch=8, kv_dtype=DType.F32))
    assert len(graphs) == 2 * (8 + 1)
    attentions = [sum(node.op == "flash_attn" for node in graph.nodes) for graph in graphs]
    assert attentions[0] == 5 and max(attentions[8:]) == 3
