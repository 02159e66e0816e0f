"""Every graph that a model can be asked to run, without its weights: what warm-up enumerates.

Runs in the executor process; allocates nothing on the device. Which kernels a graph needs is the
lowering's and the dispatch's word alone: here the graphs are only counted up, over all numbers of
tokens. Layers whose tensors are alike need the same kernels, so one layer of each kind stands for
all of them; whole graphs of a few sizes are added, lest that ever be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from hrxmp.dtypes import DType
from hrxmp.graph import Graph, Storage
from hrxmp.models.gguf_file import GgufFile, GgufTensor
from hrxmp.models.llama import KvCache, LlamaConfig, LlamaWeights, build_graph, check_tensors

MakeStorage = Callable[[str, DType, tuple[int, ...]], Storage]
"""The handle of a weight, arranged as the device wants it."""

_ROWS = 256
"""Rows of the pretended caches; no kernel depends on how many there are."""


def all_graphs(
    file: GgufFile, make_storage: MakeStorage, *, ubatch: int, kv_dtype: DType
) -> Iterator[Graph]:
    """The graphs of every prompt length and of decode, for micro-batches of up to `ubatch` tokens.

    Raises ModelError. The graphs cannot be executed: their storages have no memory.
    """
    config = LlamaConfig.from_gguf(file)
    check_tensors(file, config)
    most = min(ubatch, config.context_length)
    whole = _Model(config, file.tensors, make_storage, kv_dtype)
    for n_tokens in sorted({1, min(2, most), most}):
        yield from whole.graphs(n_tokens)
    short = _Model(*_one_layer_a_kind(config, file), make_storage, kv_dtype)
    for n_tokens in range(1, most + 1):
        yield from short.graphs(n_tokens)


class _Model:
    """Tensors with handles for their memory."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, GgufTensor],
        make_storage: MakeStorage,
        kv_dtype: DType,
    ) -> None:
        self._config = config
        storages = {n: make_storage(n, item.dtype, item.shape) for n, item in tensors.items()}
        self._weights = LlamaWeights(tensors=tensors, storages=storages)
        nbytes = kv_dtype.row_bytes(_ROWS * config.n_kv)
        layers = range(config.n_layers)
        self._cache = KvCache(
            capacity=_ROWS,
            dtype=kv_dtype,
            keys=tuple(Storage(nbytes) for _ in layers),
            values=tuple(Storage(nbytes) for _ in layers),
        )

    def graphs(self, n_tokens: int) -> Iterator[Graph]:
        """With logits, and as a prompt's earlier micro-batches, without."""
        for logits in (True, False):
            yield build_graph(self._config, self._weights, self._cache, n_tokens, logits=logits)


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
