#!/usr/bin/env python3
"""Write a GGUF with random weights in Llama-3.2-1B's shape, for speed and accuracy runs.

    make_llama_1b.py OUT.gguf [--mix q4_k_m|ud-q4_k_xl|TYPE] [--layers N] [--tiny] [--seed S]

Quantised blocks are drawn directly as random bytes, with scales such that every weight has mean 0
and standard deviation 0.02; the full file takes seconds. The same seed gives the same bytes. The
mixes follow llama.cpp's quantiser (`q4_k_m`) and, in spirit, the dynamic quants that also use Q5_K
(`ud-q4_k_xl`); TYPE (f32, f16, q4_0, .. q6_k) uses one type for all matrices.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from numpy.typing import NDArray

Type = GGMLQuantizationType
Bytes = NDArray[np.uint8]

DEVIATION = 0.02
CHUNK_BLOCKS = 1 << 16


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a llama model."""

    n_layers: int = 16
    n_embd: int = 2048
    n_ff: int = 8192
    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 64
    n_vocab: int = 128256
    context: int = 131072
    freq_base: float = 500000.0
    rms_eps: float = 1e-5
    tied: bool = True
    factors: bool = True


TINY = Shape(
    n_layers=2, n_embd=256, n_ff=512, n_heads=4, n_kv_heads=2, n_vocab=1280, context=4096
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--mix", default="q4_k_m", help="q4_k_m, ud-q4_k_xl, or one type")
    parser.add_argument("--layers", type=int, help="layers (default 16, tiny 2)")
    parser.add_argument("--tiny", action="store_true", help="2 layers of 256, for tests")
    parser.add_argument("--tokenizer", choices=("none", "bytes"), default="none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = TINY if args.tiny else Shape()
    if args.layers:
        shape = msgspec.structs.replace(shape, n_layers=args.layers)
    write_model(args.out, shape, args.mix, seed=args.seed, tokenizer=args.tokenizer)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.2f} MiB")


def write_model(
    path: Path,
    shape: Shape,
    mix: str,
    *,
    seed: int = 0,
    tokenizer: str = "none",
    claimed: Shape | None = None,
) -> None:
    """Write the model; tensors are drawn one after the other, none is kept.

    `claimed` is what the metadata says instead of `shape`, for tests of inconsistent files.
    """
    types = dict(tensor_types(shape, mix))
    writer = GGUFWriter(path, "llama")
    _add_metadata(writer, claimed or shape, mix)
    _add_tokenizer(writer, shape, tokenizer)
    sizes = dict(tensor_shapes(shape))
    for name, dims in sizes.items():
        # The writer turns a shape in bytes into one in elements by itself.
        block, nbytes = GGML_QUANT_SIZES[types[name]]
        row = dims[-1] // block * nbytes
        writer.add_tensor_info(
            name, (*dims[:-1], row), np.dtype(np.uint8), math.prod(dims[:-1]) * row, types[name]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for index, (name, dims) in enumerate(sizes.items()):
        # One generator a tensor: its bytes do not depend on the tensors before it.
        random = np.random.Generator(np.random.SFC64([seed, index]))
        writer.write_tensor_data(_values(random, name, dims, types[name], shape))
    writer.close()


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor with its shape in numpy order."""
    q_rows, kv_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.n_vocab, shape.n_embd)
    yield "output_norm.weight", (shape.n_embd,)
    if not shape.tied:
        yield "output.weight", (shape.n_vocab, shape.n_embd)
    if shape.factors:
        yield "rope_freqs.weight", (shape.head_dim // 2,)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (shape.n_embd,)
        yield block + "attn_q.weight", (q_rows, shape.n_embd)
        yield block + "attn_k.weight", (kv_rows, shape.n_embd)
        yield block + "attn_v.weight", (kv_rows, shape.n_embd)
        yield block + "attn_output.weight", (shape.n_embd, q_rows)
        yield block + "ffn_norm.weight", (shape.n_embd,)
        yield block + "ffn_gate.weight", (shape.n_ff, shape.n_embd)
        yield block + "ffn_up.weight", (shape.n_ff, shape.n_embd)
        yield block + "ffn_down.weight", (shape.n_embd, shape.n_ff)


def tensor_types(shape: Shape, mix: str) -> Iterator[tuple[str, Type]]:
    """The type of every tensor under a mix; vectors are always F32."""
    choose = _chooser(mix)
    for name, dims in tensor_shapes(shape):
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        kind = name.split(".")[-2]
        yield name, Type.F32 if len(dims) == 1 else choose(kind, layer, shape.n_layers)


def more_bits(layer: int, n_layers: int) -> bool:
    """The layers to which llama.cpp's quantiser gives more bits: both ends, every third between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _chooser(mix: str) -> Callable[[str, int, int], Type]:
    if mix == "q4_k_m":
        return _q4_k_m
    if mix == "ud-q4_k_xl":
        return _ud_q4_k_xl
    try:
        single = Type[mix.upper()]
    except KeyError:
        raise SystemExit(f"--mix {mix}: expected q4_k_m, ud-q4_k_xl or a type") from None
    return lambda kind, layer, n_layers: single


def _q4_k_m(kind: str, layer: int, n_layers: int) -> Type:
    if kind in ("token_embd", "output"):
        return Type.Q6_K
    favoured = kind in ("attn_v", "ffn_down") and more_bits(layer, n_layers)
    return Type.Q6_K if favoured else Type.Q4_K


def _ud_q4_k_xl(kind: str, layer: int, n_layers: int) -> Type:
    if kind in ("token_embd", "output", "attn_v"):
        return Type.Q6_K
    if kind == "ffn_down":
        return Type.Q6_K if more_bits(layer, n_layers) else Type.Q5_K
    favoured = kind in ("attn_k", "attn_output") or layer in (0, n_layers - 1)
    return Type.Q5_K if favoured else Type.Q4_K


def rope_factors(shape: Shape) -> NDArray[np.float32]:
    """Llama 3.2's divisors of the rope frequencies: 1 for fast ones, 32 for slow ones."""
    factor, low, high, original = 32.0, 1.0, 4.0, 8192
    steps = np.arange(0, shape.head_dim, 2) / shape.head_dim
    turns = original / (2 * np.pi * shape.freq_base**steps)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _values(
    random: np.random.Generator, name: str, dims: tuple[int, ...], kind: Type, shape: Shape
) -> Bytes:
    if name == "rope_freqs.weight":
        return rope_factors(shape).view(np.uint8)
    if len(dims) == 1:
        norm = 1 + 0.1 * random.standard_normal(dims, np.float32)
        return norm.astype(np.float32).view(np.uint8)
    if kind in (Type.F32, Type.F16):
        plain = random.standard_normal(dims, np.float32) * np.float32(DEVIATION)
        return plain.astype(np.float16 if kind is Type.F16 else np.float32).view(np.uint8)
    return random_blocks(random, kind, math.prod(dims)).reshape(*dims[:-1], -1)


def random_blocks(random: np.random.Generator, kind: Type, elements: int) -> Bytes:
    """`elements` weights of a block type as raw bytes, mean 0, deviation about 0.02."""
    block, nbytes = GGML_QUANT_SIZES[kind]
    result = np.empty((elements // block, nbytes), np.uint8)
    scale = _unit_scale(kind)
    for begin in range(0, len(result), CHUNK_BLOCKS):
        part = result[begin : begin + CHUNK_BLOCKS]
        part[...] = np.frombuffer(random.bytes(part.size), np.uint8).reshape(part.shape)
        spread = scale * random.uniform(0.75, 1.25, len(part))
        _set_scales(part, kind, spread)
    return result


def _unit_scale(kind: Type) -> float:
    """The block scale that gives DEVIATION, from the deviation at scale 1 of a sample."""
    sample = np.frombuffer(np.random.Generator(np.random.SFC64(1)).bytes(1 << 18), np.uint8)
    nbytes = GGML_QUANT_SIZES[kind][1]
    blocks = sample[: len(sample) // nbytes * nbytes].reshape(-1, nbytes).copy()
    _set_scales(blocks, kind, np.ones(len(blocks)))
    return DEVIATION / float(np.std(dequantize(blocks, kind)))


def _set_scales(blocks: Bytes, kind: Type, scale: NDArray[np.float64]) -> None:
    """Overwrite the scales in random `blocks` so that each block's weights centre on 0.

    Offsets are set to minus the middle of the quant range times the scale; sub-block scales of the
    K types are kept small, since a half-precision block scale would otherwise be subnormal.
    """
    if kind is Type.Q6_K:
        blocks[:, 192:208] = (blocks[:, 192:208] & 31) - np.uint8(16)
        _put_half(blocks, 208, scale)
        return
    _put_half(blocks, 0, scale)
    if kind in (Type.Q4_1, Type.Q5_1):
        _put_half(blocks, 2, -scale * (7.5 if kind is Type.Q4_1 else 15.5))
    elif kind in (Type.Q4_K, Type.Q5_K):
        _put_half(blocks, 2, scale * (7.5 if kind is Type.Q4_K else 15.5))
        # Six-bit scales and offsets of eight sub-blocks, equal in pairs, five bits of them used.
        blocks[:, 4:8] &= 0x5F
        blocks[:, 8:12] = blocks[:, 4:8]
        low = blocks[:, 12:16] & 15
        blocks[:, 12:16] = low | (low << 4)


def _put_half(blocks: Bytes, at: int, values: NDArray[np.float64]) -> None:
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _add_metadata(writer: GGUFWriter, shape: Shape, mix: str) -> None:
    files = {"q4_k_m": LlamaFileType.MOSTLY_Q4_K_M, "ud-q4_k_xl": LlamaFileType.MOSTLY_Q4_K_M}
    named = {"f32": LlamaFileType.ALL_F32} | {
        item.name.removeprefix("MOSTLY_").lower(): item for item in LlamaFileType
    }
    writer.add_name(f"random llama {mix}")
    writer.add_file_type(files.get(mix) or named.get(mix, LlamaFileType.GUESSED))
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.freq_base)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_vocab_size(shape.n_vocab)


def _add_tokenizer(writer: GGUFWriter, shape: Shape, kind: str) -> None:
    """No tokenizer (bench needs none), or one token a byte, merged pairs of letters, fillers."""
    if kind == "none":
        writer.add_tokenizer_model("none")
        return
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in range(ord("a"), ord("z") + 1)]
    pairs = [(left, right) for left in letters for right in letters]
    tokens = [chr(byte) for byte in kept] + [chr(0x100 + i) for i in range(256 - len(kept))]
    tokens += [left + right for left, right in pairs] + ["<|end_of_text|>"]
    types = [1] * (len(tokens) - 1) + [3]
    fillers = range(shape.n_vocab - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"<|unused_{index}|>" for index in fillers])
    writer.add_token_types(types + [5] * len(fillers))
    writer.add_token_merges([f"{left} {right}" for left, right in pairs])
    writer.add_eos_token_id(len(tokens) - 1)


if __name__ == "__main__":
    main()
