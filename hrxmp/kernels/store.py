"""The kernel store: finished binaries on disk, one file an entry, found by kernel key.

Executor, pool and workers use it; it never loads pyopencl. An entry is written beside its place
and renamed, and read without a lock: any doubt (torn, corrupt, foreign owner, writable by others,
other components) is a miss with its reason. A store that cannot be used is said once and passed
over. Nothing outside the store's own folder is touched, and nothing in it is executed here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hrxmp.errors import StoreError
from hrxmp.kernels import folder as files
from hrxmp.kernels.entry import (
    MAX_ENTRY_BYTES,
    EntryError,
    EntryHeader,
    StoreEntry,
    decode,
    decode_header,
    encode,
)
from hrxmp.kernels.folder import SUFFIX
from hrxmp.kernels.keys import KeyComponents
from hrxmp.settings import Settings

_MEASURE_EVERY = 32
_GIVEN_UP = "refused: the driver refused it"
_TOMBSTONE = b"the driver refused the entry of this name\n"
_MAKE_ROOM = "free some space or set HRXMP_CACHE to another folder"
_USE_ANOTHER = "going on without it; HRXMP_CACHE sets another folder"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def default_folder() -> Path:
    """The user's own store."""
    return Path("~/.cache/hrxmp/kernels").expanduser()


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no entry: `absent`, `off`, `corrupt: ...` or `refused: ...`."""

    reason: str

    @property
    def expected(self) -> bool:
        """Whether nothing is wrong: the entry simply is not there."""
        return self.reason in ("absent", "off")


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One entry as `ls` and `verify` show it; `problem` is empty for a good one."""

    key: str
    size: int
    used_s: float
    """Wall time of the last use, seconds since the epoch."""
    header: EntryHeader | None
    problem: str


class Store:
    """A folder of entries with read-only folders (`layers`) under it.

    `folder=None` is a store that is off. `strict` makes an unusable folder a StoreError; otherwise
    `warn` gets one sentence for each kind of trouble and the caller goes on without the store.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        limit_bytes: int = 1 << 30,
        limit_entries: int = 100_000,
        layers: tuple[Path, ...] = (),
        strict: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = folder
        self.layers = layers
        self.counts = {
            "hits": 0,
            "misses": 0,
            "corrupt": 0,
            "refused": 0,
            "written": 0,
            "evicted": 0,
        }
        self._limit_bytes = limit_bytes
        self._limit_entries = limit_entries
        self._strict = strict
        self._warn = warn or (lambda _text: None)
        self._said: set[str] = set()
        self._room = 0, 0
        self._puts = 0
        self._known: dict[str, KeyComponents] = {}
        self._given_up: set[str] = set()

    def driver_cache(self) -> str:
        """A folder in which the driver may keep machine code; empty when there can be none.

        NVIDIA's binaries are PTX: what a worker's build leaves here, the executor's load finds.
        """
        if self.folder is None:
            return ""
        try:
            with files.opened_folder(self.folder, own=True, create=True) as folder:
                files.private_subfolder(folder, "cuda")
        except OSError:  # said when the store itself is written to
            return ""
        return str(self.folder / "cuda")

    def get(self, key: str, expected: KeyComponents) -> StoreEntry | Miss:
        """The entry of `key`, whole and made for `expected`, or why there is none."""
        if self.folder is None and not self.layers:
            return Miss(reason="off")
        if key in self._given_up:
            self._count_miss(_GIVEN_UP)
            return Miss(reason=_GIVEN_UP)
        reason = "absent"
        for folder, own in self._folders():
            found = self._read(folder, key, own)
            if isinstance(found, StoreEntry):
                if found.components == expected and found.key == key:
                    self.counts["hits"] += 1
                    return found
                found = Miss(reason="corrupt: made of other components")
            reason = found.reason if not found.expected else reason
            if found.reason == _GIVEN_UP:
                break
        self._count_miss(reason)
        return Miss(reason=reason)

    def read_any(self, key: str) -> StoreEntry | None:
        """The own folder's entry of `key` whatever it is made of, if it is whole."""
        found = self._read(self.folder, key, True) if self.folder is not None else None
        return found if isinstance(found, StoreEntry) and found.key == key else None

    def put(
        self, key: str, components: KeyComponents, binary: bytes, kind: str, compile_ns: int = 0
    ) -> str:
        """Write an entry; an old one of the same key is replaced. Empty, or why it was not kept."""
        if self.folder is None:
            return "off"
        entry = StoreEntry(
            key=key, components=components, kind=kind, binary=binary, compile_ns=compile_ns
        )
        try:
            payload = encode(entry)
            with files.opened_folder(self.folder, own=True, create=True) as folder:
                files.write_entry(folder, key + SUFFIX, payload)
                self._make_room(folder, len(payload))
        except (OSError, EntryError) as error:
            return self._trouble("written", error)
        self.counts["written"] += 1
        self._given_up.discard(key)
        return ""

    def remove(self, key: str) -> None:
        """Take an entry out, e.g. because the driver refuses it, for every process.

        A layer's cannot be taken out: the own folder says that it is given up, until a new one is
        put there.
        """
        name = key + SUFFIX
        in_layer = any((layer / name).exists() for layer in self.layers)
        try:
            if self.folder is None:
                raise FileNotFoundError(name)
            with files.opened_folder(self.folder, own=True, create=in_layer) as folder:
                if in_layer:
                    files.write_entry(folder, name, _TOMBSTONE)
                else:
                    os.unlink(name, dir_fd=folder)
        except OSError:  # then at least this process does not offer it again
            if in_layer:
                self._given_up.add(key)

    def components_index(self) -> list[KeyComponents]:
        """The components of every entry, from headers only. A name is the digest of its
        components, so each header is read once, whatever becomes of the file."""
        index = []
        for folder, own in self._folders():
            with contextlib.suppress(OSError), files.opened_folder(folder, own=own) as descriptor:
                for name in files.entry_names(descriptor):
                    if name in self._known or self._learn(descriptor, name, own):
                        index.append(self._known[name])
        return index

    def entry_count(self) -> int:
        """How many entries there are, in the layers too; nothing is read."""
        count = 0
        for folder, own in self._folders():
            with contextlib.suppress(OSError), files.opened_folder(folder, own=own) as descriptor:
                count += len(files.entry_names(descriptor))
        return count

    def entries(self, *, verify: bool = False) -> Iterator[Listed]:
        """All entries of the own folder; `verify` reads each whole. StoreError if unusable."""
        if self.folder is None:
            return
        try:
            with files.opened_folder(self.folder, own=True) as folder:
                for name in sorted(files.entry_names(folder)):
                    if (listed := self._list_one(folder, name, verify)) is not None:
                        yield listed
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"the kernel store {self.folder}: {_text(error)}") from error

    def prune(self, limit_bytes: int = 0, limit_entries: int = 0) -> int:
        """Remove the longest unused entries until both limits hold; how many went."""
        if self.folder is None:
            return 0
        try:
            with files.opened_folder(self.folder, own=True) as folder:
                return self._evict(folder, limit_bytes, limit_entries)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise StoreError(f"the kernel store {self.folder}: {_text(error)}") from error

    # -- reading ------------------------------------------------------------------------------

    def _folders(self) -> list[tuple[Path, bool]]:
        own = [(self.folder, True)] if self.folder is not None else []
        return own + [(layer, False) for layer in self.layers]

    def _read(self, folder: Path, key: str, own: bool) -> StoreEntry | Miss:
        try:
            with files.opened_folder(folder, own=own) as descriptor:
                payload = files.read_entry(descriptor, key + SUFFIX, MAX_ENTRY_BYTES, own=own)
            return Miss(reason=_GIVEN_UP) if payload == _TOMBSTONE else decode(payload)
        except FileNotFoundError:
            return Miss(reason="absent")
        except EntryError as error:
            return Miss(reason=f"corrupt: {error}")
        except OSError as error:
            self._trouble("read", error)
            return Miss(reason=f"refused: {_text(error)}")

    def _learn(self, folder: int, name: str, own: bool) -> bool:
        try:
            with files.opened_entry(folder, name, own=own) as fd:
                header = decode_header(os.read(fd, 65536))
        except (OSError, EntryError):
            return False
        if header.key + SUFFIX != name:
            return False
        self._known[name] = header.components
        return True

    def _list_one(self, folder: int, name: str, verify: bool) -> Listed | None:
        header, problem = None, ""
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            with files.opened_entry(folder, name, own=True) as fd:
                payload = files.read_exactly(fd, status.st_size if verify else 65536)
            header = decode_header(payload)
            if header.key + SUFFIX != name:
                problem = "corrupt: under another key's name"
            elif verify:
                decode(payload)
        except FileNotFoundError:
            return None
        except EntryError as error:
            problem = f"corrupt: {error}"
        except OSError as error:
            problem = f"refused: {_text(error)}"
        return Listed(
            key=name.removesuffix(SUFFIX),
            size=status.st_size,
            used_s=status.st_mtime,
            header=header,
            problem=problem,
        )

    # -- room ---------------------------------------------------------------------------------

    def _make_room(self, folder: int, added: int) -> None:
        """Keep within the limits. Other processes write too, so the folder is measured again now
        and then, and cleared when the estimate nears a limit."""
        self._puts += 1
        if self._puts == 1 and (kind := files.network_type(folder)):
            self._warn(
                f"the kernel store {self.folder} lies on a network file system ({kind}): "
                "it is used, but a folder on this machine's own disk is faster"
            )
        if self._puts % _MEASURE_EVERY == 1:
            self._room = files.measure(folder)
        else:
            self._room = self._room[0] + added, self._room[1] + 1
        size, entries = self._room
        if size > self._limit_bytes // 2 or entries > self._limit_entries // 2:
            self._evict(folder, self._limit_bytes, self._limit_entries)

    def _evict(self, folder: int, limit_bytes: int, limit_entries: int) -> int:
        removed, size, entries = files.evict(folder, limit_bytes, limit_entries)
        self._room = size, entries
        self.counts["evicted"] += removed
        return removed

    # -- trouble ------------------------------------------------------------------------------

    def _count_miss(self, reason: str) -> None:
        self.counts["misses"] += 1
        kind = reason.partition(":")[0]
        if kind in self.counts:
            self.counts[kind] += 1

    def note_trouble(self, text: str, what: str = "written", full: bool = False) -> None:
        """Say that something is wrong with the folder, once a text; others may have met it too."""
        if text not in self._said:
            self._said.add(text)
            advice = _MAKE_ROOM if full else _USE_ANOTHER
            self._warn(f"the kernel store {self.folder} cannot be {what}: {text} ({advice})")

    def _trouble(self, what: str, error: Exception) -> str:
        """Say it, or raise it in strict mode; the text."""
        text = _text(error)
        full = isinstance(error, OSError) and error.errno in _FULL
        if self._strict:
            raise StoreError(
                f"the kernel store {self.folder} cannot be {what}: {text}",
                remedy=_MAKE_ROOM if full else "set HRXMP_CACHE to another folder",
            ) from error
        self.note_trouble(text, what, full)
        return text


def open_store(settings: Settings, warn: Callable[[str], None] | None) -> Store:
    """The store that the settings ask for; the same in executor, pool and workers."""
    off = settings.cache == "off"
    folder = Path(settings.cache).absolute() if settings.cache else default_folder()
    return Store(
        None if off else folder,
        limit_bytes=settings.cache_limit_mb << 20,
        layers=tuple(Path(layer) for layer in settings.cache_layers.split(":") if layer),
        strict=settings.cache_strict,
        warn=warn,
    )


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
