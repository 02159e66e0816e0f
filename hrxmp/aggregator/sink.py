"""Whole lines to one descriptor, from one thread, however slow its reader is.

The aggregator's loop never writes: it hands over what is released and hears when it is written.
On pipes, sockets and terminals each write holds whole lines and at most PIPE_BUF bytes, so that
nobody's output can get between; on files it may be large. A partial write is finished. Nothing is
dropped here, except when the reader is gone for good.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable

from hrxmp.aggregator.merge import Item, Released
from hrxmp.aggregator.rotation import Rotation
from hrxmp.records import OPENING

QUEUE_BYTES = 8 << 20
FILE_CHUNK = 1 << 20
RETRY_S = 0.1

_NEXT = b"\n" + OPENING
_LATE = OPENING + b'"late":true,'


class Sink:
    """The descriptor and its writer thread."""

    def __init__(
        self,
        descriptor: int,
        on_written: Callable[[], None],
        rotation: Rotation | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.written_bytes = 0
        self.broken = ""
        """Why nothing can be written any more; empty while all is well."""
        self.blocked_since = 0.0
        """Since when the disk has refused (monotonic seconds); 0 when it does not."""
        self._on_written = on_written
        self._rotation = rotation
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._work = threading.Condition()
        self._queue: deque[tuple[bytes, Released]] = deque()
        self._queued = 0
        self._done: deque[Released] = deque()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="sink", daemon=True)
        if self._regular:
            mend_tail(descriptor)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether the loop should release nothing for now."""
        return self._queued > QUEUE_BYTES

    @property
    def idle(self) -> bool:
        """Whether everything is written and reported."""
        return not self._queued and not self._done

    def put(self, released: Released) -> bytes:
        """Hand over lines; `on_written` is called, in the writer's thread, when they are out."""
        data = lines_of(released)
        with self._work:
            self._queue.append((data, released))
            self._queued += len(data)
            self._work.notify()
        return data

    def take_written(self) -> list[Released]:
        """What was written since the last call."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self, timeout_s: float) -> bool:
        """Write the rest, at most for so long; False when some is left."""
        with self._work:
            self._stop = True
            self._work.notify()
        self._thread.join(timeout_s)
        if self._rotation is not None:
            self._rotation.join(timeout_s)
        return not self._thread.is_alive()

    # -- the writer's thread -----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._queue and not self._stop:
                    self._work.wait()
                if not self._queue:
                    return
                data, released = self._queue[0]
            self._write(data)
            if self._rotation is not None and self._rotation.due(self.descriptor):
                self.descriptor = self._rotation.rotate(self.descriptor)
            self._done.append(released)
            with self._work:
                self._queue.popleft()
                self._queued -= len(data)
            self._on_written()

    def _write(self, data: bytes) -> None:
        view, start = memoryview(data), 0
        limit = FILE_CHUNK if self._regular else select.PIPE_BUF
        while start < len(data) and not self.broken:
            stop = len(data)
            if stop - start > limit:
                stop = data.rfind(b"\n", start, start + limit) + 1 or start + limit
            self._write_all(view[start:stop])
            start = stop
        self.written_bytes += len(data)

    def _write_all(self, view: memoryview) -> None:
        """One write, finished even when it comes out in parts."""
        while view and not self.broken:
            try:
                view = view[os.write(self.descriptor, view) :]
                self.blocked_since = 0.0
            except BlockingIOError:  # somebody made the shared descriptor non-blocking
                select.select([], [self.descriptor], [], RETRY_S)
            except OSError as error:
                self._refused(error)

    def _refused(self, error: OSError) -> None:
        """A full disk is waited for; a reader that is gone is not."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            self.broken = os.strerror(error.errno or 0)
            return
        self.blocked_since = self.blocked_since or time.monotonic()
        if self._stop:
            self.broken = os.strerror(error.errno)
            return
        with self._work:
            self._work.wait(RETRY_S)


def lines_of(released: Released) -> bytes:
    """The released records as whole lines."""
    parts = [_LATE + item[2] for item in released.late]
    text = b"\n".join(parts) + b"\n" if parts else b""
    return text + _plain(released.items)


def _plain(items: list[Item]) -> bytes:
    if not items:
        return b""
    return OPENING + _NEXT.join([item[2] for item in items]) + b"\n"


def mend_tail(descriptor: int) -> None:
    """Cut off half a record that a killed predecessor left at the end of a file.

    It was not acknowledged, so its source sends it again. Other unfinished text stays, but gets
    a newline, so that our first line is whole.
    """
    try:
        reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        size = os.fstat(reader).st_size
        tail = os.pread(reader, 64 << 10, max(size - (64 << 10), 0))
        rest = tail[tail.rfind(b"\n") + 1 :]
        if not rest:
            return
        if rest.startswith(OPENING[: len(rest)]):
            os.ftruncate(reader, size - len(rest))
            if os.lseek(descriptor, 0, os.SEEK_CUR) > size - len(rest):
                os.lseek(descriptor, size - len(rest), os.SEEK_SET)
        else:
            os.write(descriptor, b"\n")
    finally:
        os.close(reader)
