"""One entry of the kernel store as bytes: magic, version, lengths, digest, header, payload.

Pure: no file, no device. Whatever the bytes are, decoding ends in a whole entry or an EntryError,
in time and memory bounded by their length. The digest is over everything else in the entry, so
one wrong bit anywhere is found.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from hrxmp.kernels.keys import KeyComponents

MAX_ENTRY_BYTES = 64 << 20
_MAGIC = b"HRXKERN\n"
_VERSION = 1
_FIXED = struct.Struct("<8sIIQ32s")
_MAX_HEADER = 60_000


class EntryError(Exception):
    """The bytes are not one whole entry; the text says what is wrong."""


class EntryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the clear beside a binary."""

    key: str
    kind: str
    """Whose binary it is: the device's form."""
    components: KeyComponents
    compile_ns: int = 0
    """What the compiler took: a load nearly as slow is a compile by the driver."""


class StoreEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A binary with what it is made of."""

    key: str
    components: KeyComponents
    kind: str
    binary: bytes
    compile_ns: int = 0


def encode(entry: StoreEntry) -> bytes:
    """The entry as bytes. EntryError when it is too large or its key is not its components'."""
    if entry.key != entry.components.digest():
        raise EntryError("the key is not the digest of the components")
    header = _encoder.encode(
        EntryHeader(
            key=entry.key,
            kind=entry.kind,
            components=entry.components,
            compile_ns=entry.compile_ns,
        )
    )
    if len(header) > _MAX_HEADER:
        raise EntryError(f"a header of {len(header)} bytes is too large")
    if _FIXED.size + len(header) + len(entry.binary) > MAX_ENTRY_BYTES:
        raise EntryError(f"a binary of {len(entry.binary)} bytes is too large")
    fixed = _fixed(header, entry.binary)
    return fixed + header + entry.binary


def decode(payload: bytes) -> StoreEntry:
    """The whole entry. EntryError on any doubt."""
    header_bytes, binary_length, digest = _split(payload)
    start = _FIXED.size + len(header_bytes)
    if len(payload) != start + binary_length:
        raise EntryError(f"{len(payload)} bytes instead of {start + binary_length}")
    binary = payload[start:]
    if _digest(header_bytes, binary) != digest:
        raise EntryError("the digest is wrong")
    header = _decode_header(header_bytes)
    return StoreEntry(
        key=header.key,
        components=header.components,
        kind=header.kind,
        binary=binary,
        compile_ns=header.compile_ns,
    )


def decode_header(payload: bytes) -> EntryHeader:
    """The header alone, from the beginning of an entry; the digest is not checked."""
    return _decode_header(_split(payload)[0])


def _split(payload: bytes) -> tuple[bytes, int, bytes]:
    if len(payload) < _FIXED.size:
        raise EntryError(f"{len(payload)} bytes are too few")
    magic, version, header_length, binary_length, digest = _FIXED.unpack_from(payload)
    if magic != _MAGIC:
        raise EntryError("it is no entry")
    if version != _VERSION:
        raise EntryError(f"version {version} instead of {_VERSION}")
    header = payload[_FIXED.size : _FIXED.size + header_length]
    if header_length > _MAX_HEADER or len(header) != header_length:
        raise EntryError("the header is cut")
    return header, binary_length, digest


def _decode_header(header: bytes) -> EntryHeader:
    try:
        found = _decoder.decode(header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise EntryError(f"the header does not decode: {error}") from None
    if found.key != found.components.digest():
        raise EntryError("the key is not the digest of the components")
    return found


def _fixed(header: bytes, binary: bytes) -> bytes:
    return _FIXED.pack(_MAGIC, _VERSION, len(header), len(binary), _digest(header, binary))


def _digest(header: bytes, binary: bytes) -> bytes:
    """Over the fixed fields too: a flipped bit in a length must not pass by luck."""
    found = hashlib.sha256(struct.pack("<8sIIQ", _MAGIC, _VERSION, len(header), len(binary)))
    found.update(header)
    found.update(binary)
    return found.digest()


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(EntryHeader)
