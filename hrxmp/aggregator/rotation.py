"""The aggregator's output file, rotated by size and age; old files are compressed and bounded.

Used by the sink's thread only, between two writes of whole lines, so a file never ends inside a
line. Compression runs in a thread of its own and replaces the file by FILE.<UTC time>.gz.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import threading
import time
from pathlib import Path

from hrxmp.clock import wall_ns


class Rotation:
    """An output file by path. Bounds of 0 are none."""

    def __init__(self, path: Path, *, max_bytes: int = 0, max_age_s: float = 0, keep: int = 10):
        self.path = path
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self.keep = keep
        self._opened = time.monotonic()
        self._threads: list[threading.Thread] = []

    def open(self) -> int:
        """The file's descriptor: private, appended to."""
        self._opened = time.monotonic()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self.path, flags, 0o600)

    def due(self, descriptor: int) -> bool:
        """Whether the file is large or old enough. An empty one never is."""
        size = os.fstat(descriptor).st_size
        old = self.max_age_s and time.monotonic() - self._opened > self.max_age_s
        return bool(size and (old or (self.max_bytes and size >= self.max_bytes)))

    def rotate(self, descriptor: int) -> int:
        """Put the file aside and open the next; on trouble go on with the old one."""
        aside = self._free_name()
        try:
            os.rename(self.path, aside)
            fresh = self.open()
        except OSError:
            self._opened = time.monotonic()
            return descriptor
        os.close(descriptor)
        thread = threading.Thread(target=self._compress, args=(aside,), daemon=True)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        return fresh

    def join(self, timeout_s: float) -> None:
        """Wait for compressions, bounded; what is unfinished stays as it was."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _free_name(self) -> Path:
        """A name that sorts after all earlier ones."""
        seconds, rest = divmod(wall_ns(), 1_000_000_000)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
        return self.path.with_name(f"{self.path.name}.{stamp}.{rest:09d}")

    def _compress(self, aside: Path) -> None:
        """Compress beside, replace, remove; a crash leaves the whole uncompressed file."""
        whole = aside.with_name(aside.name + ".gz")
        part = aside.with_name(aside.name + ".gz.part")
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(aside, "rb") as source, os.fdopen(descriptor, "wb") as raw:
                with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                os.fsync(raw.fileno())
            os.rename(part, whole)
            os.unlink(aside)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        if not self.keep:
            return
        old = sorted(
            path
            for path in self.path.parent.glob(self.path.name + ".2*")
            if not path.name.endswith(".part")
        )
        for path in old[: -self.keep]:
            path.unlink(missing_ok=True)
