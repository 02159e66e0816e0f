"""A llama forward pass in plain numpy float32: what hrxmp's results are checked against.

Weights come through the gguf package's reader and dequantisation, none of hrxmp's own code takes
part. Slow on purpose: every step is written as in the definition.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

Array = NDArray[np.float32]


class ReferenceLlama:
    """A llama model with its KV cache. `kv_dtype` rounds what is stored in the cache."""

    def __init__(self, path: Path, *, kv_dtype: type = np.float32) -> None:
        reader = GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.n_layers = int(self._field("llama.block_count"))
        self.n_heads = int(self._field("llama.attention.head_count"))
        self.n_kv = int(self._field("llama.attention.head_count_kv", self.n_heads))
        self.eps = float(self._field("llama.attention.layer_norm_rms_epsilon"))
        self.freq_base = float(self._field("llama.rope.freq_base", 10000.0))
        self.kv_dtype = kv_dtype
        self.embeddings = self.weight("token_embd.weight")
        self.output = self.weight("output.weight", self.embeddings)
        self.factors = self.weight("rope_freqs.weight", np.ones((), np.float32))
        self.layers = [self._layer(index) for index in range(self.n_layers)]
        self.reset()

    def _field(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def weight(self, name: str, default: Array | None = None) -> Array:
        """A tensor as float32, shape in numpy order."""
        if name not in self._tensors and default is not None:
            return default
        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, np.float32).reshape(tuple(reversed(tensor.shape.tolist())))

    def _layer(self, index: int) -> dict[str, Array]:
        names = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
        names += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
        return {name: self.weight(f"blk.{index}.{name}.weight") for name in names}

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys: list[list[Array]] = [[] for _ in range(self.n_layers)]
        self.values: list[list[Array]] = [[] for _ in range(self.n_layers)]

    def forward(self, tokens: list[int]) -> Array:
        """Logits [len(tokens), n_vocab] after appending `tokens` to the context."""
        x = self.embeddings[tokens]
        first = sum(len(part) for part in self.keys[0])
        positions = np.arange(first, first + len(tokens))
        for index, layer in enumerate(self.layers):
            normed = self.rms_norm(x, layer["attn_norm"])
            x = x + self._attention(index, layer, normed, positions) @ layer["attn_output"].T
            normed = self.rms_norm(x, layer["ffn_norm"])
            gate = normed @ layer["ffn_gate"].T
            hidden = gate / (1 + np.exp(-gate)) * (normed @ layer["ffn_up"].T)
            x = x + hidden @ layer["ffn_down"].T
        return self.rms_norm(x, self.weight("output_norm.weight")) @ self.output.T

    def rms_norm(self, x: Array, weight: Array) -> Array:
        """RMS normalisation of each row, times `weight`."""
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps))
        return x * scale * weight

    def rope(self, x: Array, positions: NDArray[np.int64]) -> Array:
        """Rotate neighbouring pairs of the last axis of x [m, heads, head_dim]."""
        dim = x.shape[-1]
        speeds = self.freq_base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim) / self.factors
        angles = positions[:, None, None] * speeds
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def _attention(
        self, index: int, layer: dict[str, Array], x: Array, positions: NDArray[np.int64]
    ) -> Array:
        m = len(x)
        q = self.rope((x @ layer["attn_q"].T).reshape(m, self.n_heads, -1), positions)
        k = self.rope((x @ layer["attn_k"].T).reshape(m, self.n_kv, -1), positions)
        v = (x @ layer["attn_v"].T).reshape(m, self.n_kv, -1)
        self.keys[index].append(k.astype(self.kv_dtype).astype(np.float32))
        self.values[index].append(v.astype(self.kv_dtype).astype(np.float32))
        group = self.n_heads // self.n_kv
        keys = np.concatenate(self.keys[index]).repeat(group, axis=1)
        values = np.concatenate(self.values[index]).repeat(group, axis=1)
        scores = np.einsum("mhd,nhd->hmn", q, keys) / np.float32(np.sqrt(q.shape[-1]))
        future = np.arange(len(keys))[None, :] > positions[:, None]
        scores[:, future] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hmn,nhd->mhd", weights, values).reshape(m, -1)


def greedy(model: ReferenceLlama, tokens: list[int], count: int) -> tuple[list[int], Array]:
    """`count` greedy tokens after `tokens`, and the logits after the prompt."""
    model.reset()
    first = logits = model.forward(tokens)[-1]
    found: list[int] = []
    while len(found) < count:
        found.append(int(np.argmax(logits)))
        logits = model.forward(found[-1:])[-1]
    return found, first
