"""Dispatch of arithmetic and copies, element by element.

Pure functions of traits and sizes, run by the executor's lowering and by warm-up; no device.
Strides and offsets are in elements. Everything that a prompt's length can change is a run-time
argument, never a parameter, so that no variant depends on it. A row stride of None means dense.
"""

from __future__ import annotations

import math
from typing import Literal

from hrxmp.dtypes import DType
from hrxmp.errors import UnsupportedError
from hrxmp.kernels.definition import DeviceTraits
from hrxmp.kernels.grid import Y_ROWS, define, over_elements, row_stride
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.view import View, alike, merged, step

BinaryOp = Literal["add", "sub", "mul", "div"]

_PLAIN = (DType.F32, DType.F16, DType.I32)
_WALK = "cols:int rows:int n1:int n2:int"


def _strides(names: str) -> str:
    return " ".join(f"{v}_offset:int {v}0:int {v}1:int {v}2:int {v}3:int" for v in names)


DEFINITIONS = (
    define(
        "binary",
        "elementwise.cl",
        "OP A_STEP B_STEP Y_STEP",
        f"{_WALK} {_strides('aby')} a:buffer b:buffer y:buffer",
    ),
    define(
        "unary",
        "elementwise.cl",
        "OP",
        "count:int x_offset:int y_offset:int factor:float bias:float x:buffer y:buffer",
    ),
    define(
        "swiglu",
        "elementwise.cl",
        "",
        "cols:int rows:int gate_stride:int gate_offset:int up_stride:int up_offset:int "
        f"{Y_ROWS} gate:buffer up:buffer y:buffer",
    ),
    define(
        "cpy",
        "elementwise.cl",
        "SRC DST X_STEP Y_STEP",
        f"{_WALK} {_strides('xy')} x:buffer y:buffer",
    ),
)


def binary(
    traits: DeviceTraits,
    *,
    op: BinaryOp,
    a: View,
    b: View,
    y: View | None = None,
) -> Launch:
    """y = a op b; b repeats over a's leading axes. Operands a, b, y (f32); in place allowed."""
    out = View.dense(a.shape) if y is None else y
    shape, strides = merged(a.shape, a.strides, b.repeated(a.shape).strides, out.strides)
    steps = [step(walk[-1], f"{name}3") for name, walk in zip("aby", strides, strict=True)]
    params = zip(("OP", "A_STEP", "B_STEP", "Y_STEP"), (op, *steps), strict=True)
    places = zip((a.offset, b.offset, out.offset), strides, strict=True)
    numbers = [number for offset, walk in places for number in (offset, *walk)]
    count = math.prod(shape)
    rows = count // shape[3]
    return over_elements(
        traits,
        "binary",
        tuple(params),
        cols=shape[3],
        rows=rows,
        args=(shape[3], rows, shape[1], shape[2], *numbers, "a", "b", "y"),
        cost=(count, 4 * (2 * count + math.prod(b.shape))),
    )


def scale(
    traits: DeviceTraits,
    *,
    count: int,
    factor: float,
    bias: float = 0.0,
    x_offset: int = 0,
    y_offset: int = 0,
) -> Launch:
    """y = x * factor + bias over `count` dense elements. Operands x, y; in place allowed."""
    return _unary(traits, "scale", count, (x_offset, y_offset, factor, bias), 2)


def silu(traits: DeviceTraits, *, count: int, x_offset: int = 0, y_offset: int = 0) -> Launch:
    """y = x * sigmoid(x) over `count` dense elements. Operands x, y; in place allowed."""
    return _unary(traits, "silu", count, (x_offset, y_offset, 1.0, 0.0), 4)


def swiglu(
    traits: DeviceTraits,
    *,
    k: int,
    m: int,
    gate_stride: int | None = None,
    gate_offset: int = 0,
    up_stride: int | None = None,
    up_offset: int = 0,
    y_stride: int | None = None,
    y_offset: int = 0,
) -> Launch:
    """y = silu(gate) * up, each [m, k]. Operands gate, up, y; y may be gate or up."""
    rows = (
        row_stride(gate_stride, k),
        gate_offset,
        row_stride(up_stride, k),
        up_offset,
        row_stride(y_stride, k),
    )
    args = (k, m, *rows, y_offset, "gate", "up", "y")
    return over_elements(
        traits, "swiglu", (), cols=k, rows=m, args=args, cost=(5 * m * k, 12 * m * k)
    )


def cpy(
    traits: DeviceTraits,
    *,
    x: View,
    y: View,
    src: DType = DType.F32,
    dst: DType = DType.F32,
) -> Launch:
    """y = x, element by element in row-major order, f32 and f16 converted. Operands x, y.

    Two shapes of the same size need not be equal when one of them is dense.
    """
    if src not in _PLAIN or dst not in _PLAIN or (src is DType.I32) != (dst is DType.I32):
        raise UnsupportedError(f"cpy from {src.label} to {dst.label}: f32, f16, and i32 to i32 are")
    x, y = alike(x, y)
    shape, strides = merged(x.shape, x.strides, y.strides)
    steps = (step(strides[0][-1], "x3"), step(strides[1][-1], "y3"))
    params = zip(("SRC", "DST", "X_STEP", "Y_STEP"), (src.label, dst.label, *steps), strict=True)
    count = math.prod(shape)
    rows = count // shape[3]
    return over_elements(
        traits,
        "cpy",
        tuple(params),
        cols=shape[3],
        rows=rows,
        args=(
            shape[3],
            rows,
            shape[1],
            shape[2],
            x.offset,
            *strides[0],
            y.offset,
            *strides[1],
            "x",
            "y",
        ),
        cost=(0, count * (src.nbytes + dst.nbytes)),
    )


def _unary(
    traits: DeviceTraits, op: str, count: int, args: tuple[int | float, ...], flops: int
) -> Launch:
    return over_elements(
        traits,
        "unary",
        (("OP", op),),
        cols=count,
        rows=1,
        args=(count, *args, "x", "y"),
        cost=(flops * count, 8 * count),
    )
