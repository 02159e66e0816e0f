"""The tuned table of a device: which choices of its kernels were measured to be faster.

One small file a device beside the kernel store; `hrxmp-run tune` writes it, the executor reads it
once. It names the device, its driver and the source of each kernel, so what was measured elsewhere
or with other kernels is ignored, with the reason. It can only name options that a kernel offers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hrxmp.errors import HrxmpError, StoreError
from hrxmp.kernels import catalog
from hrxmp.kernels import folder as files
from hrxmp.kernels.choices import Choice

VERSION = 1
MAX_BYTES = 1 << 20
_MAX_WINNERS = 1000

DeviceFields = tuple[str, str, int, str]
"""Platform, device, compute units, driver version."""


class Winner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice that beat the default of its subject, and by how much."""

    kernel: str
    subject: str
    default: dict[str, int]
    choice: dict[str, int]
    gain: float
    """Time of the default over the choice's, minus 1."""


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says. `sources` are digests by kernel."""

    version: int
    device: DeviceFields
    sources: dict[str, str]
    winners: list[Winner]


class _Version(msgspec.Struct):
    version: int


class TunedTable:
    """The file of one device; no folder is a table that stays empty."""

    def __init__(self, folder: Path | None, device: DeviceFields) -> None:
        self._folder = folder
        self._device = device
        digest = hashlib.sha256(msgspec.json.encode(device)).hexdigest()
        self.name = f"tuned-{digest[:16]}.json"

    def load(self) -> tuple[list[Winner], str]:
        """The winners that hold here, and why others, or all, do not (empty: nothing is wrong)."""
        if self._folder is None:
            return [], ""
        try:
            with files.opened_folder(self._folder, own=True) as folder:
                payload = files.read_entry(folder, self.name, MAX_BYTES + 1, own=True)
        except FileNotFoundError:
            return [], ""
        except OSError as error:
            return [], f"it cannot be read: {error.strerror}"
        return self._decoded(payload)

    def save(self, winners: Iterable[Winner]) -> None:
        """Replace the file. Raises StoreError."""
        kept = list(winners)
        content = _Content(
            version=VERSION,
            device=self._device,
            sources={name: _source(name) for name in sorted({item.kernel for item in kept})},
            winners=kept,
        )
        payload = msgspec.json.format(msgspec.json.encode(content), indent=1)
        if len(kept) > _MAX_WINNERS or len(payload) > MAX_BYTES:
            raise StoreError(f"{len(kept)} tuned choices are too many for one table")
        try:
            with files.opened_folder(self._needed(), own=True, create=True) as folder:
                files.write_entry(folder, self.name, payload)
        except OSError as error:
            raise StoreError(f"the tuned table cannot be written: {error.strerror}") from error

    def clear(self) -> bool:
        """Remove the file; whether there was one. Raises StoreError."""
        try:
            with files.opened_folder(self._needed(), own=True) as folder:
                os.unlink(self.name, dir_fd=folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"the tuned table cannot be removed: {error.strerror}") from error
        return True

    def _needed(self) -> Path:
        if self._folder is None:
            raise StoreError("tuned choices lie in the kernel store, and that is off")
        return self._folder

    def _decoded(self, payload: bytes) -> tuple[list[Winner], str]:
        if len(payload) > MAX_BYTES:
            return [], f"it is longer than {MAX_BYTES} bytes"
        try:
            version = msgspec.json.decode(payload, type=_Version).version
            if version != VERSION:
                return [], f"its version is {version}, not {VERSION}"
            content = msgspec.json.decode(payload, type=_Content)
        except (msgspec.DecodeError, RecursionError) as error:
            return [], f"it is corrupt: {error}"
        if content.device != self._device:
            return [], f"it was made on another device: {content.device}"
        if len(content.winners) > _MAX_WINNERS:
            return [], f"it has more than {_MAX_WINNERS} choices"
        current = {name for name, digest in content.sources.items() if digest == _source(name)}
        kept = [item for item in content.winners if item.kernel in current]
        stale = sorted({item.kernel for item in content.winners} - current)
        return kept, f"other sources now, tune again: {', '.join(stale)}" if stale else ""


def mapping(winners: Iterable[Winner]) -> dict[str, Choice]:
    """Winners as dispatch looks them up."""
    return {item.subject: tuple(item.choice.items()) for item in winners}


def _source(kernel: str) -> str:
    """The digest of a kernel's source; empty when there is no such kernel."""
    with contextlib.suppress(HrxmpError):
        return catalog.source_digest(catalog.get(kernel))
    return ""
