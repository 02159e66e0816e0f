"""Bundles: entries of a kernel store as one file, to carry to another machine or to ship.

A bundle is a plain tar file of entry files. Importing trusts nothing but whole entries: each is
decoded, its digest and its key are checked, and only then is it written, as if it had been
compiled here. Nothing of a bundle is executed, and no name in it becomes a path.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import msgspec

from hrxmp.errors import StoreError
from hrxmp.kernels.entry import MAX_ENTRY_BYTES, EntryError, decode, encode
from hrxmp.kernels.folder import SUFFIX
from hrxmp.kernels.store import Store


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a bundle: how many entries were taken, and why others were not."""

    taken: int
    refused: tuple[tuple[str, str], ...]
    """(name in the bundle, reason)."""


def export_bundle(store: Store, path: Path) -> int:
    """Write every good entry of the store's own folder; how many. StoreError when it cannot."""
    count = 0
    try:
        with path.open("xb") as file, tarfile.open(fileobj=file, mode="w") as bundle:
            for listed in store.entries():
                entry = store.read_any(listed.key)
                if entry is not None:
                    _add(bundle, listed.key + SUFFIX, encode(entry))
                    count += 1
    except OSError as error:
        raise StoreError(f"the bundle {path} cannot be written: {error.strerror}") from error
    return count


def import_bundle(store: Store, path: Path) -> Imported:
    """Take every whole entry of a bundle. StoreError when it is no bundle or not trustworthy."""
    taken = 0
    refused = []
    try:
        with path.open("rb") as file:
            _check_owner(file.fileno(), path)
            with tarfile.open(fileobj=file, mode="r:") as bundle:
                for member in bundle:
                    reason = _take(store, bundle, member)
                    taken += not reason
                    if reason:
                        refused.append((member.name[:100], reason))
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        raise StoreError(f"the bundle {path} cannot be read: {error}") from error
    return Imported(taken=taken, refused=tuple(refused))


def _take(store: Store, bundle: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """Put one member into the store; empty, or why not."""
    if not member.isreg() or member.size > MAX_ENTRY_BYTES:
        return "not a file of an entry's size"
    content = bundle.extractfile(member)
    if content is None:
        return "not a file"
    try:
        entry = decode(content.read(member.size))
    except EntryError as error:
        return f"corrupt: {error}"
    return store.put(entry.key, entry.components, entry.binary, entry.kind, entry.compile_ns)


def _check_owner(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is not a file")
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreError(f"{path} belongs to user {status.st_uid}: not trusted")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(f"{path} is writable by other users: not trusted")


def _add(bundle: tarfile.TarFile, name: str, payload: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(payload), 0o600
    bundle.addfile(member, io.BytesIO(payload))
