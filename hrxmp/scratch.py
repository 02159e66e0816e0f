"""A process's private folder for sockets and temporary files, gone with the process.

Launcher and pool own one each. A process that was killed cannot remove its folder, so each new
one removes those whose lock nobody holds: a lock ends with its process, whatever ends that, and
it tells the truth across process id namespaces too. Nobody ever waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from hrxmp.settings import Settings

_PREFIX = "hrxmp-"
_LOCK = "held"


class ScratchFolder:
    """A private folder (0700) in `parent` for the life of this process."""

    def __init__(self, parent: Path) -> None:
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Locked before it has its name: whoever finds it there finds it held.
        unnamed = self.path / "new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def parent_folder(settings: Settings) -> Path:
    """Where a run's private folder is made; socket paths must stay short."""
    parent = settings.runtime_dir or os.environ.get("XDG_RUNTIME_DIR", "")
    usable = bool(parent) and os.access(parent, os.W_OK | os.X_OK)
    return Path(parent if usable else tempfile.gettempdir())


def remove_abandoned(parent: Path) -> int:
    """Remove this user's folders of dead processes in `parent`; how many."""
    gone = 0
    for folder in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and _abandoned(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)
                gone += 1
    return gone


def _abandoned(lock: Path) -> bool:
    """Whether nobody holds the lock. A folder without one may be just being made: it stays."""
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
