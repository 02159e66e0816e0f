"""A llama model on a device: weights and KV cache, prefill, decode, generation.

Runs in the executor process, on the executor's public interface only. One sequence at a time; the
cache's length is a run-time value, so going back to an earlier length costs nothing. It samples
and tokenises nothing itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from hrxmp.dtypes import DType
from hrxmp.errors import ModelError, UsageError
from hrxmp.graph import Graph, Storage
from hrxmp.models.gguf_file import GgufFile
from hrxmp.models.llama import KvCache, LlamaConfig, LlamaWeights, build_graph, check_tensors
from hrxmp.models.sampling import Sampler

if TYPE_CHECKING:
    from hrxmp import Execution, Executor

DEFAULT_UBATCH: Final = 512
CAPACITY_STEP: Final = 256
"""Capacities are multiples of this."""

_KEPT_GRAPHS: Final = 16
_RELEASE_BYTES: Final = 16 << 20

Logits = NDArray[np.float32]


class LlamaModel:
    """Weights on the device and the state of one sequence.

    `length` tokens are in the cache; setting it back forgets the rest. `on_execution` sees every
    graph execution, for counting.
    """

    def __init__(
        self,
        executor: Executor,
        file: GgufFile,
        config: LlamaConfig,
        weights: LlamaWeights,
        cache: KvCache,
        *,
        context: int,
        ubatch: int,
    ) -> None:
        self.executor = executor
        self.file = file
        self.config = config
        self.context = context
        self.ubatch = ubatch
        self.length = 0
        self.on_execution: Callable[[Execution], None] | None = None
        self._weights = weights
        self._cache = cache
        self._graphs: OrderedDict[tuple[int, bool], Graph] = OrderedDict()
        self._one = {name: np.zeros(1, np.int32) for name in ("tokens", "positions")}

    @classmethod
    def load(
        cls,
        executor: Executor,
        path: Path | GgufFile,
        *,
        context: int | None = None,
        ubatch: int = DEFAULT_UBATCH,
        kv_dtype: DType = DType.F32,
        prompt: int = 0,
    ) -> LlamaModel:
        """Check the file, upload its weights, allocate the cache.

        `context`: the most tokens of the sequence; None is the model's own. `prompt`: tokens of the
        first prefill. Its kernels, and those of decode, are then compiled while the device opens
        and the weights are uploaded, unless somebody wants to see what compiles. Raises ModelError.
        """
        file = path if isinstance(path, GgufFile) else GgufFile.open(path)
        config = LlamaConfig.from_gguf(file)
        check_tensors(file, config)
        limit = _context(file, config, context)
        weights = LlamaWeights.without_memory(file.tensors, executor.weight_storage)
        cache = _cache(config, _capacity(limit), kv_dtype)
        model = cls(executor, file, config, weights, cache, context=limit, ubatch=ubatch)
        if prompt and not executor.guarded:
            first = model.graph(min(prompt, ubatch), logits=prompt <= ubatch)
            executor.prefetch(first, model.graph(1))
        for storage in (*cache.keys, *cache.values):
            executor.memory.buffer(storage)
        _upload_all(executor, file, weights)
        return model

    def prefill(self, tokens: Sequence[int], *, logits: bool = True) -> Logits | None:
        """Append `tokens` in micro-batches; logits [n_vocab] of the last one when wanted."""
        ids = self._checked(tokens)
        result = None
        for begin in range(0, len(ids), self.ubatch):
            part = ids[begin : begin + self.ubatch]
            wanted = logits and begin + len(part) == len(ids)
            positions = np.arange(self.length, self.length + len(part), dtype=np.int32)
            inputs = {"tokens": part, "positions": positions}
            result = self._execute(self.graph(len(part), logits=wanted), inputs, len(part))
        return result

    def decode(self, token: int) -> Logits:
        """Append one token; the logits [n_vocab] after it."""
        self._check(1, token, token)
        one = self._one  # an execution has read its inputs when it returns
        one["tokens"][0] = token
        one["positions"][0] = self.length
        logits = self._execute(self.graph(1), one, 1)
        if logits is None:
            raise ModelError("a decode execution gave no logits")
        return logits

    def graph(self, n_tokens: int, *, logits: bool = True) -> Graph:
        """The graph for `n_tokens`, built once; the least recently used are forgotten."""
        key = (n_tokens, logits)
        if key not in self._graphs:
            uid = 2 * n_tokens + logits
            self._graphs[key] = build_graph(
                self.config, self._weights, self._cache, n_tokens, logits=logits, uid=uid
            )
            if len(self._graphs) > _KEPT_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _execute(
        self, graph: Graph, inputs: dict[str, NDArray[np.int32]], count: int
    ) -> Logits | None:
        execution = self.executor.execute(
            graph, inputs, upcoming=self.graph(1) if count > 1 else None
        )
        self.length += count
        if self.on_execution:
            self.on_execution(execution)
        logits = execution.outputs.get("logits")
        return None if logits is None else logits.reshape(-1)

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size == 0:
            raise UsageError("the prompt is empty: at least one token is needed")
        self._check(ids.size, int(ids.min()), int(ids.max()))
        return ids.astype(np.int32)

    def _check(self, count: int, least: int, most: int) -> None:
        """Whether `count` more tokens fit, with ids from `least` to `most`."""
        if least < 0 or most >= self.config.n_vocab:
            raise UsageError(f"token ids must lie in 0 to {self.config.n_vocab - 1}")
        if self.length + count > self.context:
            raise ModelError(
                f"{count} tokens after {self.length} are more than the context of "
                f"{self.context} tokens",
                remedy="shorten the prompt, or raise the context up to the model's "
                f"{self.config.context_length}",
            )


def generate(
    model: LlamaModel,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    count: int | None = None,
    ends: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Prefill `prompt` and yield token after token.

    Stops after `count` tokens, before a token in `ends`, or when the context is full. The last
    token is not put into the cache.
    """
    logits = model.prefill(prompt)
    produced = 0
    while logits is not None and (count is None or produced < count):
        token = sampler.choose(logits)
        if token in ends:
            return
        yield token
        produced += 1
        if produced == count or model.length == model.context:
            return
        logits = model.decode(token)


def _context(file: GgufFile, config: LlamaConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.context_length
    if not 0 < wanted <= config.context_length:
        raise file.error(
            f"was trained with a context of {config.context_length} tokens; {wanted} are wanted"
        )
    return wanted


def capacities(config: LlamaConfig) -> list[int]:
    """The smallest and the largest capacity that a cache of this model can have."""
    return sorted({_capacity(1), _capacity(config.context_length)})


def _capacity(context: int) -> int:
    """Rows of the cache: a little more than the context, so that graphs of few shapes exist."""
    return -(-context // CAPACITY_STEP) * CAPACITY_STEP


def _cache(config: LlamaConfig, capacity: int, dtype: DType) -> KvCache:
    """A cache without memory yet."""
    nbytes = dtype.row_bytes(capacity * config.n_kv)
    layers = range(config.n_layers)
    return KvCache(
        capacity=capacity,
        dtype=dtype,
        keys=tuple(Storage(nbytes, f"cache_k.{layer}") for layer in layers),
        values=tuple(Storage(nbytes, f"cache_v.{layer}") for layer in layers),
    )


def _upload_all(executor: Executor, file: GgufFile, weights: LlamaWeights) -> None:
    """Every tensor on the device; the file's pages are given back as it goes."""
    executor.allocate(weights.storages.values(), f"the weights of {file.path.name}")
    held = 0

    def read(nbytes: int) -> None:
        nonlocal held
        held += nbytes
        if held > _RELEASE_BYTES:
            file.release()
            held = 0

    for tensor in file.tensors.values():
        storage = weights.storages[tensor.name]
        executor.upload_weight(tensor.name, tensor.data, tensor.dtype, tensor.shape, storage, read)
    file.release()
