"""Large pages: pieces are aligned, apart, writable, and outlive their allocator."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from hrxmp.kernels.pages import LargePages


def address(piece: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


@pytest.mark.parametrize("sizes", [(1, 5000, 4096), (100 << 20, 1), (63 << 20, 2 << 20, 1)])
def test_pieces_do_not_overlap(sizes: tuple[int, ...]) -> None:
    pages = LargePages()
    pieces = [pages.take(size) for size in sizes]
    assert [len(piece) for piece in pieces] == list(sizes)
    ranges = sorted((address(piece), address(piece) + len(piece)) for piece in pieces)
    assert all(start % 4096 == 0 for start, _ in ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_pieces_outlive_the_allocator() -> None:
    piece = LargePages().take(3 << 20)
    assert bytes(piece[:4]) == b"\0\0\0\0"
    piece[-1] = 7
    assert piece[-1] == 7


def test_a_new_region_begins_a_large_page() -> None:
    assert address(LargePages().take(10)) % (2 << 20) == 0
