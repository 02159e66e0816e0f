"""Element types of tensors and the block formats of GGUF weights.

Level 0: every process may import it. Sizes are ggml's: a block format packs `block` elements
into `nbytes` bytes. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type: (elements a block, bytes a block). Plain types have one-element blocks."""

    label: str
    block: int
    nbytes: int

    F32 = ("f32", 1, 4)
    F16 = ("f16", 1, 2)
    I32 = ("i32", 1, 4)
    Q4_0 = ("q4_0", 32, 18)
    Q4_1 = ("q4_1", 32, 20)
    Q5_0 = ("q5_0", 32, 22)
    Q5_1 = ("q5_1", 32, 24)
    Q8_0 = ("q8_0", 32, 34)
    Q4_K = ("q4_k", 256, 144)
    Q5_K = ("q5_k", 256, 176)
    Q6_K = ("q6_k", 256, 210)

    def __init__(self, label: str, block: int, nbytes: int) -> None:
        self.label = label
        self.block = block
        self.nbytes = nbytes

    @property
    def quantized(self) -> bool:
        """Whether elements come in blocks that share scales."""
        return self.block > 1

    def row_bytes(self, elements: int) -> int:
        """Bytes of a contiguous row; `elements` must be a multiple of the block."""
        return elements // self.block * self.nbytes

    @classmethod
    def from_label(cls, label: str) -> DType:
        """The dtype named `label` ("f32", "q4_1", ...); KeyError when there is none."""
        return _BY_LABEL[label]


_BY_LABEL = {dtype.label: dtype for dtype in DType}
