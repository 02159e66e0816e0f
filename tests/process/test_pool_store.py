"""The store among processes: writers that are killed, hostile folders, full disks, deletions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hrxmp.kernels.entry import StoreEntry
from hrxmp.kernels.store import Miss, Store
from tests.process.pool_fixture import (
    PATIENCE_S,
    components,
    make_request,
    outcome,
    running_pool,
)

ROOT = Path(__file__).resolve().parents[2]

WRITER = """
import sys
from hrxmp.kernels.store import Store
from tests.process.pool_fixture import make_request
from pathlib import Path
store, request = Store(Path(sys.argv[1])), make_request("shared", n=0)
print("go", flush=True)
for _ in range(int(sys.argv[2])):
    assert store.put(request.key, request.components, b"b" * 300_000, "fake") == ""
"""


def test_x17_many_writers_of_one_entry_one_of_them_killed(tmp_path: Path) -> None:
    """Eight processes write the same entry; one is killed at a random byte of its writing. Every
    read in between is whole or a miss, and afterwards the entry is there."""
    folder = tmp_path / "store"
    command = [sys.executable, "-c", WRITER, str(folder)]
    rounds = [["50"]] * 7 + [["1000000"]]
    writers = [
        subprocess.Popen([*command, *count], stdout=subprocess.PIPE, cwd=ROOT) for count in rounds
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"go\n"
    request = make_request("shared", n=0)
    reader = Store(folder)
    seen = 0
    while any(writer.poll() is None for writer in writers[:7]):
        found = reader.get(request.key, request.components)
        assert isinstance(found, StoreEntry) or found == Miss(reason="absent")
        if isinstance(found, StoreEntry):
            assert found.binary == b"b" * 300_000
            seen += 1
    writers[7].send_signal(signal.SIGKILL)
    codes = [writer.wait(PATIENCE_S) for writer in writers]
    for writer in writers:
        writer.stdout and writer.stdout.close()
    assert codes == [0] * 7 + [-9]
    assert seen > 0
    assert isinstance(reader.get(request.key, request.components), StoreEntry)
    left = [path for path in folder.iterdir() if path.name.startswith(".tmp-")]
    assert len(left) <= 1
    for path in left:
        os.utime(path, (1, 1))
    reader.prune(limit_bytes=1 << 30, limit_entries=10)
    assert [path.suffix for path in folder.iterdir()] == [".hrxk"]


def entry_file(store: str, key: str) -> Path:
    return Path(store) / f"{key}.hrxk"


def test_x18_a_corrupt_entry_is_compiled_again_and_replaced() -> None:
    with running_pool() as pool:
        client = pool.client()
        request = make_request(n=1)
        good = outcome(client.request(request, 1))
        file = entry_file(pool.settings.cache, request.key)
        whole = file.read_bytes()
        for damaged in (whole[:-5], b"", whole[:60] + b"\0" + whole[61:]):
            file.write_bytes(damaged)
            again = outcome(client.request(make_request(n=1), 1))
            assert (again.via, again.binary) == ("compile", good.binary)
            assert file.read_bytes() == whole
        assert outcome(client.request(make_request(n=1), 1)).via == "disk"
        client.close()


def read_only(folder: Path) -> None:
    folder.chmod(0o500)


def world_writable(folder: Path) -> None:
    folder.chmod(0o777)


def foreign_owned(folder: Path) -> None:
    os.chown(folder, 12345, 12345)


def a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("no folder")


def a_dangling_link(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to("/nowhere/at/all")


@pytest.mark.parametrize(
    "spoil", [read_only, world_writable, foreign_owned, a_file, a_dangling_link]
)
def test_x23_a_store_that_cannot_be_used_costs_one_warning(spoil: object) -> None:
    if spoil is foreign_owned and os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    if spoil is read_only and os.geteuid() == 0:
        pytest.skip("root writes into read-only folders; the read-only mount test stands for it")
    with running_pool() as pool:
        folder = Path(pool.settings.cache)
        folder.mkdir(mode=0o700)
        spoil(folder)  # type: ignore[operator]
        said: list[str] = []
        client = pool.client(on_not_stored=Store(folder, warn=said.append).note_trouble)
        for n in range(3):
            found = outcome(client.request(make_request(n=n), 1))
            assert found.error is None
            assert found.binary.startswith(b"binary of")
            assert found.not_stored
        assert outcome(client.request(make_request(n=0), 1)).via == "compile"
        client.close()
        pool.stop()
        assert len(said) == 1, said
        assert "delete" not in said[0]
        assert pool.words == ""


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A tmpfs of 256 KiB, where this user may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="hrxmp-d-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a small tmpfs cannot be mounted here; injected ENOSPC stands in test_store")
    yield folder
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], capture_output=True, check=False)
    subprocess.run(["umount", str(folder)], capture_output=True, check=True)
    folder.rmdir()


def test_x23_a_full_disk_is_said_once_and_left_clean(small_disk: Path) -> None:
    with running_pool(cache=str(small_disk)) as pool:
        said: list[str] = []
        client = pool.client(on_not_stored=Store(small_disk, warn=said.append).note_trouble)
        for n in range(4):
            request = make_request(n=n, do="large", arg=str(100_000))
            assert outcome(client.request(request, 1)).error is None
        client.close()
        pool.stop()
        assert len(said) == 1
        assert "No space left on device" in said[0]
    assert [path.suffix for path in small_disk.iterdir()] == [".hrxk"] * 2


def test_x23_a_read_only_disk_is_read_and_not_written(small_disk: Path) -> None:
    request = make_request(n=1)
    Store(small_disk).put(request.key, request.components, b"from the disk", "fake")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with running_pool(cache=str(small_disk)) as pool:
        said: list[str] = []
        client = pool.client(on_not_stored=Store(small_disk, warn=said.append).note_trouble)
        assert outcome(client.request(request, 1)).binary == b"from the disk"
        for n in range(2, 5):
            assert outcome(client.request(make_request(n=n), 1)).error is None
        client.close()
        pool.stop()
        assert len(said) == 1
        assert "Read-only file system" in said[0]


def test_x23_strict_makes_it_an_error_that_says_what() -> None:
    with running_pool(cache_strict=True) as pool:
        folder = Path(pool.settings.cache)
        folder.mkdir()
        folder.chmod(0o777)
        client = pool.client()
        found = outcome(client.request(make_request(n=1), 1))
        assert found.error.code == "store"
        assert "writable by other users" in found.error.message
        client.close()


def test_x24_a_store_deleted_while_running_is_only_misses() -> None:
    with running_pool() as pool:
        client = pool.client()
        assert outcome(client.request(make_request(n=1), 1)).via == "compile"
        shutil.rmtree(pool.settings.cache)
        assert outcome(client.request(make_request(n=1), 1)).via == "compile"
        assert outcome(client.request(make_request(n=1), 1)).via == "disk"
        client.close()


def test_a_lower_layer_serves_what_the_own_store_lacks(tmp_path: Path) -> None:
    request = make_request(n=1)
    assert request.components == components(request.variant)
    Store(tmp_path / "shipped").put(request.key, request.components, b"shipped", "fake")
    with running_pool(cache_layers=str(tmp_path / "shipped")) as pool:
        client = pool.client()
        found = outcome(client.request(request, 1))
        assert (found.via, found.binary) == ("disk", b"shipped")
        client.close()


def test_a_pool_without_a_store_compiles_and_says_nothing() -> None:
    with running_pool(cache="off") as pool:
        client = pool.client()
        assert [outcome(client.request(make_request(n=1), 1)).via for _ in range(2)] == [
            "compile",
            "compile",
        ]
        client.close()
        pool.stop()
        assert pool.words == ""
