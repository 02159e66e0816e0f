"""Views in elements, and their simplest equal walk: what dispatch needs to address strided tensors.

Pure arithmetic on shapes. Strides and offsets are in elements. Kernels walk four axes; axes that
lie one after the other in every operand are merged first, so that the last one is long.
"""

from __future__ import annotations

import math

import msgspec

from hrxmp.errors import UnsupportedError

AXES = 4


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Elements inside a buffer: up to four axes; strides and offset in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def dense(cls, shape: tuple[int, ...], offset: int = 0) -> View:
        """Row-major elements without gaps."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(shape=shape, strides=strides, offset=offset)

    def repeated(self, shape: tuple[int, ...]) -> View:
        """This view under `shape`, of which its own is the end; it repeats over leading axes."""
        lead = len(shape) - len(self.shape)
        if shape[lead:] != self.shape or lead < 0:
            raise UnsupportedError(f"{list(self.shape)} does not repeat over {list(shape)}")
        return View(shape=shape, strides=(0,) * lead + self.strides, offset=self.offset)


def merged(
    shape: tuple[int, ...], *strides: tuple[int, ...]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same walk over exactly four axes: shape, and strides for each operand.

    Raises UnsupportedError when more than four axes remain.
    """
    sizes: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        steps = [walk[axis] for walk in strides]
        if size == 1:
            continue
        if sizes and all(w[-1] == size * step for w, step in zip(walks, steps, strict=True)):
            sizes[-1] *= size
            for walk, step in zip(walks, steps, strict=True):
                walk[-1] = step
            continue
        sizes.append(size)
        for walk, step in zip(walks, steps, strict=True):
            walk.append(step)
    lead = AXES - len(sizes)
    if lead < 0:
        raise UnsupportedError(f"{list(shape)} with strides {strides} is more than {AXES} axes")
    padded = [(0,) * lead + tuple(walk) for walk in walks]
    if not sizes:  # a single element: a dense last axis of one
        padded = [(0,) * (AXES - 1) + (1,) for _ in walks]
    return (1,) * lead + tuple(sizes), padded


def alike(x: View, y: View) -> tuple[View, View]:
    """Both views under one shape: the dense one takes the other's. UnsupportedError if neither."""
    if math.prod(x.shape) != math.prod(y.shape):
        raise UnsupportedError(f"{list(x.shape)} and {list(y.shape)} differ in size")
    if x.shape == y.shape:
        return x, y
    if x == View.dense(x.shape, x.offset):
        return View.dense(y.shape, x.offset), y
    if y == View.dense(y.shape, y.offset):
        return x, View.dense(x.shape, y.offset)
    raise UnsupportedError(f"{list(x.shape)} and {list(y.shape)}, both strided")


def step(stride: int, argument: str) -> int | str:
    """The stride of a last axis as a parameter: 0 or 1 as they are, else the argument's name."""
    return stride if stride in (0, 1) else argument
