"""Files of a store's folder, opened and written without trusting anybody else on the machine.

Used by `store` only. Folders and files are opened without following links and checked through
their descriptors: they must belong to this user (or root, in a read-only layer) and be writable by
nobody else. Files are written beside their place and renamed. It knows no entry's content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".hrxk"
_NAME = re.compile(r"[0-9a-f]{64}\.hrxk")
_TEMPORARY = re.compile(r"\.tmp-(\d+)-[0-9a-f]{16}")
_TOUCH_AFTER_S = 60.0
_STALE_AFTER_S = 3600.0
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "afs", "ceph", "glusterfs", "lustre", "gpfs", "sshfs"}


@contextlib.contextmanager
def opened_folder(folder: Path, *, own: bool, create: bool = False) -> Iterator[int]:
    """A descriptor of `folder`, checked. PermissionError when others could write there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    try:
        descriptor = os.open(folder, flags)
    except FileNotFoundError:
        if not create:
            raise
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, flags)
    try:
        _check(os.fstat(descriptor), "the folder", own)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_entry(folder: int, name: str, *, own: bool) -> Iterator[int]:
    """A descriptor of an entry's file, checked. PermissionError when others could write it."""
    # Not blocking: a planted FIFO must not hang the reader.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(errno.EPERM, "the entry is not a regular file")
        _check(status, "the entry", own)
        yield fd
    finally:
        os.close(fd)


def read_entry(folder: int, name: str, limit: int, *, own: bool) -> bytes:
    """A file's first `limit` bytes: all of an entry's; noted as used just now."""
    with opened_entry(folder, name, own=own) as fd:
        status = os.fstat(fd)
        payload = read_exactly(fd, min(status.st_size, limit))
        if own and time.time() - status.st_mtime > _TOUCH_AFTER_S:
            with contextlib.suppress(OSError):  # a read-only file system
                os.utime(fd)
        return payload


def read_exactly(fd: int, size: int) -> bytes:
    """`size` bytes, or fewer where the file ends."""
    pieces = []
    while size > 0 and (piece := os.read(fd, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def write_entry(folder: int, name: str, payload: bytes) -> None:
    """Write a file beside its place and rename it. OSError leaves nothing behind."""
    temporary = f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        try:
            view = memoryview(payload)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def network_type(folder: int, table: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the network file system that the folder lies on, or empty."""
    device = os.fstat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            mount, _, rest = line.partition(" - ")
            if mount.split()[2:3] == [wanted] and rest.split()[:1]:
                kind = rest.split()[0]
                return kind if kind.partition(".")[2] in _NETWORK or kind in _NETWORK else ""
    return ""


def private_subfolder(folder: int, name: str) -> None:
    """Make sure of a private folder in it. PermissionError when it is none."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    _check(status, "the folder in it", own=True)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{name} is no folder")


def entry_names(folder: int) -> list[str]:
    """Names of all entries."""
    return [name for name in os.listdir(folder) if _NAME.fullmatch(name)]


def measure(folder: int) -> tuple[int, int]:
    """(bytes, number) of all entries."""
    size = count = 0
    for name in entry_names(folder):
        with contextlib.suppress(FileNotFoundError):
            size += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
            count += 1
    return size, count


def evict(folder: int, limit_bytes: int, limit_entries: int) -> tuple[int, int, int]:
    """Remove the longest unused entries until both limits hold, and what dead writers left.

    (removed, bytes left, entries left). Nobody is broken: a reader has the entry in memory.
    """
    files = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if _NAME.fullmatch(name):
                files.append((status.st_mtime_ns, status.st_size, name))
            elif _is_stale(name, status):
                os.unlink(name, dir_fd=folder)
    files.sort(reverse=True)
    total, removed = sum(size for _, size, _ in files), 0
    while files and (len(files) > limit_entries or total > limit_bytes):
        _, size, name = files.pop()
        total -= size
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
            removed += 1
    return removed, total, len(files)


def _check(status: os.stat_result, what: str, own: bool) -> None:
    owners = (os.geteuid(),) if own else (os.geteuid(), 0)
    if status.st_uid not in owners:
        raise PermissionError(errno.EPERM, f"{what} belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, f"{what} is writable by other users")


def _is_stale(name: str, status: os.stat_result) -> bool:
    """Whether a temporary file was left by a writer that is gone."""
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return False
    age_s = time.time() - status.st_mtime
    return age_s > _STALE_AFTER_S or (age_s > 10 and not Path(f"/proc/{match[1]}").exists())
