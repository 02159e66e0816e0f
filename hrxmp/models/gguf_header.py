"""The header of a GGUF file, read with bounds: metadata and tensor entries, no tensor data.

Runs in the executor process. Every length and count is checked against the bytes that are there
before anything is allocated, so that no file can make it hang, allocate or leave the map. The
gguf package's reader makes two numpy arrays a string, 1.5 s for a vocabulary of 49,152 tokens
with merges; this one takes about 50 ms. The package stays the reference: a test compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from hrxmp.errors import ModelError

Value = int | float | bool | str | list["Value"]
"""A metadata value; arrays are lists."""

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4
MAX_NAME: Final = 65535
MAX_ARRAY_DEPTH: Final = 4

STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""GGUF value type -> struct format of the scalar types."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_PAIR = 8 + 4 + 1
_MIN_ENTRY = 8 + 4 + 8 + 4 + 8


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor as the header states it; `dims` in the file's order (first is contiguous)."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Everything before the tensor data. `data_start` is the file offset of the data section."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorEntry, ...]
    alignment: int
    data_start: int


class _Cursor:
    """A read position in the mapped file; every move is checked."""

    def __init__(self, data: memoryview, fail: Callable[[str], ModelError]) -> None:
        self.data = data
        self.at = 0
        self.fail = fail

    def take(self, count: int, what: str) -> int:
        """Move past `count` bytes and return where they began."""
        begin = self.at
        if count > len(self.data) - begin:
            raise self.fail(
                f"is truncated: {what} needs {count} bytes at offset {begin}, "
                f"the file has {len(self.data)}"
            )
        self.at = begin + count
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def count(self, what: str, smallest: int) -> int:
        """A count of items of at least `smallest` bytes each, refused when they cannot fit."""
        value = self.u64(what)
        room = (len(self.data) - self.at) // smallest
        if value > room:
            raise self.fail(f"states {value} {what}, but there is room for at most {room}")
        return value

    def text(self, what: str) -> str:
        begin = self.take(self.u64(what), what)
        try:
            return str(self.data[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"has {what} that is not UTF-8 at offset {begin}") from error

    def texts(self, count: int, what: str) -> list[Value]:
        """`count` strings. The vocabulary's loop: no call per string, tokens may be any bytes."""
        data, at, end, unpack = self.data, self.at, len(self.data), _U64.unpack_from
        found: list[Value] = []
        for _ in range(count):
            begin = at + 8
            if begin > end or (stop := begin + unpack(data, at)[0]) > end:
                raise self.fail(f"is truncated: {what} ends past the file's {end} bytes")
            found.append(str(data[begin:stop], "utf-8", "surrogateescape"))
            at = stop
        self.at = at
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> Value:
        """One metadata value of GGUF value type `kind`."""
        if kind in SCALARS:
            form = struct.Struct(f"<{SCALARS[kind]}")
            scalar: Value = form.unpack_from(self.data, self.take(form.size, what))[0]
            return scalar
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what, depth + 1)
        raise self.fail(f"gives {what} the value type {kind}; GGUF knows 0 to 12")

    def array(self, what: str, depth: int) -> list[Value]:
        """A homogeneous array; scalars are unpacked in one step."""
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"nests {what} deeper than {MAX_ARRAY_DEPTH} arrays")
        kind = self.u32(what)
        if kind in SCALARS:
            size = struct.calcsize(f"<{SCALARS[kind]}")
            count = self.count(f"items in {what}", size)
            begin = self.take(count * size, what)
            return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", self.data, begin))
        if kind == STRING:
            return self.texts(self.count(f"items in {what}", 8), what)
        count = self.count(f"items in {what}", 12)
        return [self.value(kind, what, depth) for _ in range(count)]


def read_header(data: memoryview, fail: Callable[[str], ModelError]) -> Header:
    """Parse the header of a mapped GGUF file.

    `fail` turns what is wrong ("is truncated: ...") into a ModelError that names the file.
    """
    cursor = _Cursor(data, fail)
    version = _read_version(cursor)
    n_tensors = cursor.count("tensors", _MIN_ENTRY)
    n_pairs = cursor.count("metadata pairs", _MIN_PAIR)
    metadata = _read_metadata(cursor, n_pairs)
    tensors = tuple(_read_entry(cursor) for _ in range(n_tensors))
    alignment = _alignment(metadata, fail)
    return Header(
        version=version,
        metadata=metadata,
        tensors=tensors,
        alignment=alignment,
        data_start=-(-cursor.at // alignment) * alignment,
    )


def _read_version(cursor: _Cursor) -> int:
    found = bytes(cursor.data[: len(MAGIC)])
    if found != MAGIC:
        raise cursor.fail(f"is not a GGUF file: it begins with {found!r}, expected {MAGIC!r}")
    cursor.take(len(MAGIC), "the magic")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise cursor.fail("is a big-endian GGUF file; only little-endian ones are supported")
    if version not in VERSIONS:
        raise cursor.fail(f"has GGUF version {version}, expected 2 or 3")
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if not key or len(key) > MAX_NAME or key in metadata:
            raise cursor.fail(f"has an empty, endless or repeated metadata key {key[:80]!r}")
        metadata[key] = cursor.value(cursor.u32(key), key)
    return metadata


def _read_entry(cursor: _Cursor) -> TensorEntry:
    name = cursor.text("a tensor name")
    n_dims = cursor.u32(f"tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"gives tensor {name[:80]!r} {n_dims} dimensions, expected 1 to 4")
    dims = tuple(cursor.u64(f"tensor {name!r}") for _ in range(n_dims))
    type_id = cursor.u32(f"tensor {name!r}")
    return TensorEntry(name=name, dims=dims, type_id=type_id, offset=cursor.u64(f"tensor {name!r}"))


def _alignment(metadata: Mapping[str, Value], fail: Callable[[str], ModelError]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= 1 << 20 or value & (value - 1):
        raise fail(f"has general.alignment {value!r}, expected a power of two from 8")
    return value
