"""A GGUF model file: metadata, and tensors as read-only views of the mapped file.

Runs in the executor process. Checks what can be checked without reading the data: types, sizes,
offsets and overlaps. Nothing is copied; a tensor's bytes are read when they are uploaded. What the
tensors mean is the architecture module's business, dequantisation the kernels'.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hrxmp.dtypes import DType
from hrxmp.errors import ModelError
from hrxmp.models.gguf_header import Header, TensorEntry, Value, read_header

TYPES: Final = {
    0: DType.F32,
    1: DType.F16,
    2: DType.Q4_0,
    3: DType.Q4_1,
    6: DType.Q5_0,
    7: DType.Q5_1,
    8: DType.Q8_0,
    12: DType.Q4_K,
    13: DType.Q5_K,
    14: DType.Q6_K,
    26: DType.I32,
}
"""ggml type id -> element type, for the types that hrxmp has kernels for."""

_MAX_ELEMENTS = 1 << 48


class GgufTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: `shape` in numpy order, `data` its raw bytes (uint8, a view of the map)."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    data: NDArray[np.uint8]

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class GgufFile:
    """An open GGUF file. The map lives as long as the object or any view of it."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Value],
        tensors: Mapping[str, GgufTensor],
        raw: mmap.mmap,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._raw = raw

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map `path` and check its header. Raises ModelError naming file, what and expected."""
        raw = _map(path)

        def fail(what: str) -> ModelError:
            return _error(path, what)

        header = read_header(memoryview(raw), fail)
        tensors = _tensors(path, header, np.frombuffer(raw, np.uint8))
        return cls(path, header.metadata, tensors, raw)

    def release(self) -> None:
        """Give back the memory of all pages read so far; reading them again is allowed.

        Without it a file that was uploaded counts twice: on the device and in the map.
        """
        self._raw.madvise(mmap.MADV_DONTNEED)

    @property
    def n_params(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.n_elements for tensor in self.tensors.values())

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())

    def error(self, what: str) -> ModelError:
        """A ModelError that names this file."""
        return _error(self.path, what)

    def tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """The tensor `name`, refused when it is missing or has another shape."""
        found = self.tensors.get(name)
        if found is None:
            raise self.error(f"has no tensor {name!r} (expected, with shape {shape})")
        if found.shape != shape:
            raise self.error(f"has {name!r} with shape {found.shape}, its metadata says {shape}")
        return found

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A metadata integer in `least`..2^31-1; ModelError when absent without a default."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise self.error(f"has {key} = {_short(value)}, expected an integer")
        if not least <= value < 1 << 31:
            raise self.error(f"has {key} = {value}, expected {least} to 2147483647")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite metadata number; ModelError when absent without a default."""
        value = self.metadata.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.error(f"has {key} = {_short(value)}, expected a number")
        return float(value)  # type: ignore[arg-type]

    def string(self, key: str, default: str | None = None) -> str:
        """A metadata string; ModelError when absent without a default."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"has {key} = {_short(value)}, expected a string")
        return value

    def items(self, key: str, kind: type[str] | type[int]) -> list[Value]:
        """A metadata array of strings or integers; ModelError when it is anything else."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.error(f"has {key} = {_short(value)}, expected an array of {kind.__name__}")
        return value


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise _error(path, "is empty, expected a GGUF file") from error
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror or error}") from error


def _tensors(path: Path, header: Header, raw: NDArray[np.uint8]) -> dict[str, GgufTensor]:
    found: dict[str, GgufTensor] = {}
    end = 0
    for entry in sorted(header.tensors, key=lambda item: item.offset):
        if entry.name in found:
            raise _error(path, f"states tensor {entry.name[:80]!r} twice")
        if entry.offset % header.alignment or entry.offset < end:
            raise _error(
                path,
                f"puts {entry.name[:80]!r} at data offset {entry.offset}, expected a multiple of "
                f"{header.alignment} from {end} on",
            )
        found[entry.name] = _tensor(path, header, entry, raw)
        end = entry.offset + found[entry.name].data.nbytes
    return {entry.name: found[entry.name] for entry in header.tensors}


def _tensor(path: Path, header: Header, entry: TensorEntry, raw: NDArray[np.uint8]) -> GgufTensor:
    dtype = TYPES.get(entry.type_id)
    name = entry.name[:80]
    if dtype is None:
        known = ", ".join(item.label for item in TYPES.values())
        raise _error(
            path, f"has {name!r} of type {_type_name(entry.type_id)}; supported are {known}"
        )
    elements = math.prod(entry.dims)
    if not 0 < elements < _MAX_ELEMENTS or entry.dims[0] % dtype.block:
        raise _error(
            path,
            f"has {name!r} with dimensions {entry.dims}, expected positive ones, the first a "
            f"multiple of {dtype.block} ({dtype.label})",
        )
    begin = header.data_start + entry.offset
    nbytes = dtype.row_bytes(elements)
    if begin + nbytes > raw.nbytes:
        raise _error(
            path,
            f"is truncated: {name!r} ends at byte {begin + nbytes}, the file has {raw.nbytes}",
        )
    return GgufTensor(
        name=entry.name,
        shape=tuple(reversed(entry.dims)),
        dtype=dtype,
        data=raw[begin : begin + nbytes],
    )


def _type_name(type_id: int) -> str:
    from gguf.constants import GGMLQuantizationType  # only to name what is refused: 30 ms

    try:
        return str(GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"{type_id} (unknown)"


def _error(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} {what}")


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
