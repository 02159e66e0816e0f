"""A matrix product as dispatch sees it: its sizes, operand names, arithmetic and traffic.

Pure data, shared by the product kernels of all device forms.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError

Epilogue = Literal["none", "add", "swiglu"]

MAX_WEIGHTS = 3

OPERANDS = "w0:buffer w1:buffer w2:buffer residual:buffer y:buffer"
STRIDES = "x_stride:int x_offset:int r_stride:int r_offset:int y_stride:int y_offset:int"

_EPILOGUES = ("none", "add", "swiglu")


class WeightSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One weight matrix of n rows: its element type and how its bytes lie."""

    dtype: DType
    layout: str
    n: int


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """A checked call of `mul_mat`."""

    weights: tuple[WeightSpec, ...]
    k: int
    m: int
    norm: bool
    epilogue: Epilogue
    x: tuple[int, int]
    residual: tuple[int, int]
    y: tuple[int, int]
    eps: float

    @property
    def columns(self) -> int:
        """Results a row of x has."""
        first = self.weights[0].n
        return first if self.epilogue == "swiglu" else sum(w.n for w in self.weights)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each weight, 0 for those that are not there."""
        return tuple(w.n for w in self.weights) + (0,) * (MAX_WEIGHTS - len(self.weights))

    def operands(self) -> tuple[str, ...]:
        """Names for w0, w1, w2, residual, y; an operand that the variant ignores repeats one."""
        names = [f"w{min(i, len(self.weights) - 1)}" for i in range(MAX_WEIGHTS)]
        return (*names, "residual" if self.epilogue == "add" else "y", "y")

    def strides(self) -> tuple[int, ...]:
        """Stride and offset of x, residual and y, in elements."""
        return (*self.x, *self.residual, *self.y)

    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * sum(weight.n for weight in self.weights)

    def nbytes(self) -> int:
        """Bytes that must move at least once."""
        weights = sum(weight.n * weight.dtype.row_bytes(self.k) for weight in self.weights)
        results = self.columns * (2 if self.epilogue == "add" else 1)
        return weights + 4 * self.m * (self.k + results)

    def check(self) -> None:
        """Refuse what no device does. Raises UnsupportedError."""
        weights, first = self.weights, self.weights[0]
        if not 1 <= len(weights) <= MAX_WEIGHTS:
            raise UnsupportedError(f"{len(weights)} weights in one product; 1 to {MAX_WEIGHTS} go")
        if self.epilogue not in _EPILOGUES:
            raise UnsupportedError(f"no epilogue {self.epilogue!r}; there are {_EPILOGUES}")
        if self.epilogue == "swiglu" and [w.n for w in weights] != [first.n] * 2:
            raise UnsupportedError("swiglu takes two weights with equally many rows")
