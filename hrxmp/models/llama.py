"""The llama architecture: hyperparameters from a GGUF file, and its graphs.

Runs in the executor process; builds graphs only, touches no device. Tensor names and metadata keys
are GGUF's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A file with tensors that
the graph would not use (biases, experts) is refused: leaving them out would give wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from hrxmp.dtypes import DType
from hrxmp.graph import Graph, Storage, Tensor
from hrxmp.models.gguf_file import GgufFile, GgufTensor

ARCHITECTURES: Final = ("llama",)

_LAYER_LIMIT = 1024


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters. `rope_factors`: whether the file divides rope frequencies one by one."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    context_length: int
    rms_eps: float
    rope_dims: int
    rope_freq_base: float
    rope_freq_scale: float
    rope_factors: bool
    tied: bool

    @property
    def n_kv(self) -> int:
        """Elements of one row of the key (or value) cache."""
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_gguf(cls, file: GgufFile) -> LlamaConfig:
        """Read from metadata and check. Raises ModelError."""
        _check_supported(file)
        n_embd = file.integer("llama.embedding_length")
        n_heads = file.integer("llama.attention.head_count")
        head_dim = file.integer("llama.attention.key_length", n_embd // n_heads)
        config = cls(
            n_layers=file.integer("llama.block_count"),
            n_embd=n_embd,
            n_ff=file.integer("llama.feed_forward_length"),
            n_heads=n_heads,
            n_kv_heads=file.integer("llama.attention.head_count_kv", n_heads),
            head_dim=head_dim,
            n_vocab=_vocabulary(file),
            context_length=file.integer("llama.context_length"),
            rms_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
            rope_dims=file.integer("llama.rope.dimension_count", head_dim),
            rope_freq_base=file.number("llama.rope.freq_base", 10000.0),
            rope_freq_scale=_rope_scale(file),
            rope_factors="rope_freqs.weight" in file.tensors,
            tied="output.weight" not in file.tensors,
        )
        _check_heads(file, config)
        return config


MakeStorage = Callable[[str, DType, tuple[int, ...]], Storage]
"""The handle of a weight, arranged as the device wants it."""


class LlamaWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Where each tensor of the file lies on the device."""

    tensors: Mapping[str, GgufTensor]
    storages: Mapping[str, Storage]

    @classmethod
    def without_memory(
        cls, tensors: Mapping[str, GgufTensor], make_storage: MakeStorage
    ) -> LlamaWeights:
        """Handles only: graphs can be built and lowered, not yet executed."""
        storages = {n: make_storage(n, item.dtype, item.shape) for n, item in tensors.items()}
        return cls(tensors=tensors, storages=storages)

    def tensor(self, graph: Graph, name: str) -> Tensor:
        """The weight as a leaf of `graph`."""
        item = self.tensors[name]
        return graph.tensor(name, item.shape, item.dtype, storage=self.storages[name])


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of past keys and values: per layer [n_kv_heads, capacity, head_dim]."""

    capacity: int
    dtype: DType
    keys: tuple[Storage, ...]
    values: tuple[Storage, ...]


def shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a file of this configuration has, with its shape."""
    q_rows = config.n_heads * config.head_dim
    yield "token_embd.weight", (config.n_vocab, config.n_embd)
    yield "output_norm.weight", (config.n_embd,)
    if not config.tied:
        yield "output.weight", (config.n_vocab, config.n_embd)
    if config.rope_factors:
        yield "rope_freqs.weight", (config.rope_dims // 2,)
    for layer in range(config.n_layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (config.n_embd,)
        yield block + "attn_q.weight", (q_rows, config.n_embd)
        yield block + "attn_k.weight", (config.n_kv, config.n_embd)
        yield block + "attn_v.weight", (config.n_kv, config.n_embd)
        yield block + "attn_output.weight", (config.n_embd, q_rows)
        yield block + "ffn_norm.weight", (config.n_embd,)
        yield block + "ffn_gate.weight", (config.n_ff, config.n_embd)
        yield block + "ffn_up.weight", (config.n_ff, config.n_embd)
        yield block + "ffn_down.weight", (config.n_embd, config.n_ff)


def check_tensors(file: GgufFile, config: LlamaConfig) -> None:
    """Refuse a file whose tensors are not exactly those that the metadata promises."""
    expected = dict(shapes(config))
    for name, shape in expected.items():
        tensor = file.tensor(name, shape)
        if len(shape) == 1 and tensor.dtype is not DType.F32:
            raise file.error(f"has {name!r} as {tensor.dtype.label}, expected f32")
        if tensor.dtype is DType.I32:
            raise file.error(f"has {name!r} as i32, expected a type of weights")
    extra = [name for name in file.tensors if name not in expected]
    if extra:
        raise file.error(
            f"has {len(extra)} tensors that the llama architecture does not use, "
            f"first {extra[0][:80]!r}"
        )


def build_graph(
    config: LlamaConfig,
    weights: LlamaWeights,
    cache: KvCache,
    n_tokens: int,
    *,
    logits: bool = True,
    uid: int = 0,
) -> Graph:
    """The graph that appends `n_tokens` tokens to the cache.

    Inputs: `tokens` and `positions`, i32 [n_tokens]; the position is also the row in the cache.
    Output: `logits` f32 [1, n_vocab] of the last token. Without `logits` it ends as soon as the
    last layer's keys and values are stored.
    """
    return _Builder(config, weights, cache, n_tokens, uid).build(logits)


class _Builder:
    """One graph under construction."""

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, cache: KvCache, n_tokens: int, uid: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.m = n_tokens
        self.graph = Graph(uid=uid)
        self.tokens = self.graph.input("tokens", (n_tokens,), DType.I32)
        self.positions = self.graph.input("positions", (n_tokens,), DType.I32)
        self.factors = self.weight("rope_freqs.weight") if config.rope_factors else None

    def weight(self, name: str) -> Tensor:
        return self.weights.tensor(self.graph, name)

    def build(self, logits: bool) -> Graph:
        table = self.weight("token_embd.weight")
        x = self.graph.get_rows(table, self.tokens, "embeddings")
        last = self.config.n_layers - 1
        for layer in range(last):
            x = self.feed_forward(layer, self.attend(layer, x, *self.project(layer, x)))
        projected = self.project(last, x)
        if logits:
            x = self.feed_forward(last, self.attend(last, x, *projected, only_last=True))
            head = table if self.config.tied else self.weight("output.weight")
            normed = self.norm(x, "output_norm.weight")
            self.graph.output(self.graph.mul_mat(head, normed, "logits"), "logits")
        return self.graph

    def norm(self, x: Tensor, name: str) -> Tensor:
        normed = self.graph.rms_norm(x, self.config.rms_eps)
        return self.graph.mul(normed, self.weight(name))

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [m, heads, d], and the layer's caches with this graph's rows stored."""
        graph, block = self.graph, f"blk.{layer}."
        normed = self.norm(x, block + "attn_norm.weight")
        q = graph.mul_mat(self.weight(block + "attn_q.weight"), normed)
        k = graph.mul_mat(self.weight(block + "attn_k.weight"), normed)
        v = graph.mul_mat(self.weight(block + "attn_v.weight"), normed)
        q = self.rope(q, self.config.n_heads)
        k = self.rope(k, self.config.n_kv_heads)
        v = v.reshape((self.m, self.config.n_kv_heads, self.config.head_dim))
        keys = self.store(f"cache_k.{layer}", self.cache.keys[layer], k)
        values = self.store(f"cache_v.{layer}", self.cache.values[layer], v)
        return q, keys, values

    def rope(self, x: Tensor, heads: int) -> Tensor:
        config = self.config
        return self.graph.rope(
            x.reshape((self.m, heads, config.head_dim)),
            self.positions,
            n_dims=config.rope_dims,
            freq_base=config.rope_freq_base,
            freq_scale=config.rope_freq_scale,
            factors=self.factors,
        )

    def store(self, name: str, storage: Storage, rows: Tensor) -> Tensor:
        shape = (self.config.n_kv_heads, self.cache.capacity, self.config.head_dim)
        cache = self.graph.tensor(name, shape, self.cache.dtype, storage=storage)
        return self.graph.set_rows(cache.permute((1, 0, 2)), rows, self.positions)

    def attend(
        self,
        layer: int,
        x: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        only_last: bool = False,
    ) -> Tensor:
        """x plus the attention's output; of the last row only where no other row is needed."""
        attended = self.graph.flash_attn(
            q, keys, values, self.positions, scale=self.config.head_dim**-0.5
        )
        if only_last and self.m > 1:
            attended, x = self.last_row(attended), self.last_row(x)
        weight = self.weight(f"blk.{layer}.attn_output.weight")
        return self.graph.add(self.graph.mul_mat(weight, attended), x)

    def last_row(self, x: Tensor) -> Tensor:
        return x.view((1, x.shape[1]), offset=(self.m - 1) * x.strides[0])

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        graph, block = self.graph, f"blk.{layer}."
        normed = self.norm(x, block + "ffn_norm.weight")
        gate = graph.mul_mat(self.weight(block + "ffn_gate.weight"), normed)
        up = graph.mul_mat(self.weight(block + "ffn_up.weight"), normed)
        down = graph.mul_mat(self.weight(block + "ffn_down.weight"), graph.swiglu(gate, up))
        return graph.add(down, x)


def _check_supported(file: GgufFile) -> None:
    architecture = file.string("general.architecture")
    if architecture not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise file.error(f"has architecture {architecture!r}; supported are: {names}")
    if file.integer("llama.expert_count", 0, least=0):
        raise file.error("is a mixture of experts; only dense llama models are supported")


def _vocabulary(file: GgufFile) -> int:
    """Rows of the embedding table; what the metadata says about it has to agree."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise file.error("has no two-dimensional tensor 'token_embd.weight'")
    rows = table.shape[0]
    stated = file.integer("llama.vocab_size", rows)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, list) else rows
    if stated != rows or listed != rows:
        raise file.error(
            f"has {rows} embedding rows, {listed} tokens and llama.vocab_size {stated}; "
            "expected one number"
        )
    return rows


def _rope_scale(file: GgufFile) -> float:
    kind = file.string("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise file.error(f"has rope scaling {kind!r}; supported are 'none' and 'linear'")
    if kind == "none":
        return 1.0
    factor = file.number("llama.rope.scaling.factor")
    if factor <= 0:
        raise file.error(f"has llama.rope.scaling.factor {factor}, expected more than 0")
    return 1.0 / factor


def _check_heads(file: GgufFile, config: LlamaConfig) -> None:
    value_length = file.integer("llama.attention.value_length", config.head_dim)
    if value_length != config.head_dim:
        raise file.error(f"has values of length {value_length}, keys of {config.head_dim}")
    if config.n_heads % config.n_kv_heads or config.n_layers > _LAYER_LIMIT:
        raise file.error(
            f"has {config.n_layers} layers with {config.n_heads} heads over {config.n_kv_heads} "
            "KV heads, expected a multiple"
        )
    if config.rope_dims % 2 or config.rope_dims > config.head_dim:
        raise file.error(f"rotates {config.rope_dims} of {config.head_dim} dimensions of a head")
    if not 0 < config.rms_eps < 1 or config.rope_freq_base <= 0:
        raise file.error(f"has rms epsilon {config.rms_eps}, rope base {config.rope_freq_base}")
