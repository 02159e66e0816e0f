"""Every graph that a model can be asked to run, without its weights: what warm-up enumerates.

Runs in the executor process; allocates nothing on the device. Which kernels a graph needs is the
lowering's and the dispatch's word alone: here the graphs are only counted up, over all numbers of
tokens. Layers whose tensors are alike need the same kernels, so one layer of each kind stands for
all of them. Decode is taken whole and with the smallest and largest cache, for its graph may be
one kernel; so are two other sizes, lest the short cut ever be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from hrxmp.dtypes import DType
from hrxmp.graph import Graph, Storage
from hrxmp.models.generator import capacities
from hrxmp.models.gguf_file import GgufFile, GgufTensor
from hrxmp.models.llama import (
    KvCache,
    LlamaConfig,
    LlamaWeights,
    MakeStorage,
    build_graph,
    check_tensors,
)


def all_graphs(
    file: GgufFile, make_storage: MakeStorage, *, ubatch: int, kv_dtype: DType
) -> Iterator[Graph]:
    """The graphs of every prompt length and of decode, for micro-batches of up to `ubatch` tokens.

    Raises ModelError. The graphs cannot be executed: their storages have no memory.
    """
    config = LlamaConfig.from_gguf(file)
    check_tensors(file, config)
    most = min(ubatch, config.context_length)
    whole = _Model(config, file.tensors, make_storage)
    rows = capacities(config)
    for capacity in rows:
        yield from whole.graphs(1, capacity, kv_dtype)
    taken_whole = {1, min(2, most), most}
    for n_tokens in sorted(taken_whole - {1}):
        yield from whole.graphs(n_tokens, rows[0], kv_dtype)
    short = _Model(*_one_layer_a_kind(config, file), make_storage)
    for n_tokens in set(range(1, most + 1)) - taken_whole:
        yield from short.graphs(n_tokens, rows[0], kv_dtype)


class _Model:
    """Tensors with handles for their memory."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, GgufTensor],
        make_storage: MakeStorage,
    ) -> None:
        self._config = config
        self._weights = LlamaWeights.without_memory(tensors, make_storage)

    def graphs(self, n_tokens: int, capacity: int, kv_dtype: DType) -> Iterator[Graph]:
        """With logits, and as a prompt's earlier micro-batches, without."""
        nbytes = kv_dtype.row_bytes(capacity * self._config.n_kv)
        layers = range(self._config.n_layers)
        cache = KvCache(
            capacity=capacity,
            dtype=kv_dtype,
            keys=tuple(Storage(nbytes) for _ in layers),
            values=tuple(Storage(nbytes) for _ in layers),
        )
        for logits in (True, False):
            yield build_graph(self._config, self._weights, cache, n_tokens, logits=logits)


def _one_layer_a_kind(
    config: LlamaConfig, file: GgufFile
) -> tuple[LlamaConfig, dict[str, GgufTensor]]:
    """A shorter model: one layer for each kind of tensors, and always the last one."""
    last = config.n_layers - 1
    kinds = {tuple(t.dtype for t in _layer(file, i).values()): i for i in range(last)}
    kept = [*sorted(kinds.values()), last]
    tensors = {name: t for name, t in file.tensors.items() if not name.startswith("blk.")}
    for position, layer in enumerate(kept):
        tensors |= {f"blk.{position}.{name}": t for name, t in _layer(file, layer).items()}
    return msgspec.structs.replace(config, n_layers=len(kept)), tensors


def _layer(file: GgufFile, layer: int) -> dict[str, GgufTensor]:
    """A layer's tensors by their names within it, in order of name."""
    prefix = f"blk.{layer}."
    names = sorted(name for name in file.tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): file.tensors[name] for name in names}
