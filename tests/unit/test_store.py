"""The kernel store on a real folder: whole or a miss, whatever happened to the files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hrxmp.errors import StoreError
from hrxmp.kernels import entry as entry_module
from hrxmp.kernels import store as store_module
from hrxmp.kernels.bundle import export_bundle, import_bundle
from hrxmp.kernels.entry import EntryError, StoreEntry, decode, decode_header, encode
from hrxmp.kernels.folder import network_type
from hrxmp.kernels.keys import KeyComponents
from hrxmp.kernels.store import Miss, Store
from hrxmp.settings import Settings
from hrxmp.workloads.store import main as store_command


def parts(number: int = 0) -> KeyComponents:
    return KeyComponents(
        source="a" * 64,
        entry_point="mul_mat",
        params=(("K", number), ("WTYPE", "q4_1")),
        local_size=(16, 1, 1),
        build_options="-cl-std=CL3.0",
        sanitizer="",
        platform="p",
        device="d",
        compute_units=2,
        driver="1.0",
    )


def put(store: Store, number: int = 0, binary: bytes = b"binary" * 100) -> str:
    return store.put(parts(number).digest(), parts(number), binary, "fake")


def get(store: Store, number: int = 0) -> StoreEntry | Miss:
    return store.get(parts(number).digest(), parts(number))


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, warnings: list[str]) -> Store:
    return Store(tmp_path / "store", warn=warnings.append)


def file_of(store: Store, number: int = 0) -> Path:
    assert store.folder is not None
    return store.folder / (parts(number).digest() + ".hrxk")


def test_what_was_put_is_found(store: Store, warnings: list[str]) -> None:
    assert get(store) == Miss(reason="absent")
    assert put(store) == ""
    found = get(store)
    assert isinstance(found, StoreEntry)
    assert found.binary == b"binary" * 100
    assert found.kind == "fake"
    assert warnings == []
    assert store.folder is not None
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(store).stat().st_mode) == 0o600


def test_an_entry_cut_at_each_length_is_corrupt(store: Store) -> None:
    """X18: no length of a torn entry passes."""
    put(store, binary=b"b" * 300)
    whole = file_of(store).read_bytes()
    for length in range(len(whole)):
        file_of(store).write_bytes(whole[:length])
        found = get(store)
        assert isinstance(found, Miss)
        assert found.reason.startswith("corrupt")
    file_of(store).write_bytes(whole + b"x")
    assert isinstance(get(store), Miss)
    file_of(store).write_bytes(whole)
    assert isinstance(get(store), StoreEntry)
    assert store.counts["corrupt"] == len(whole) + 1


def test_every_flipped_bit_is_corrupt_and_put_mends_it(store: Store) -> None:
    """X18, all bits instead of a hundred."""
    put(store, binary=b"b" * 40)
    whole = file_of(store).read_bytes()
    for bit in range(len(whole) * 8):
        wrong = bytearray(whole)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EntryError):
            decode(bytes(wrong))
    file_of(store).write_bytes(bytes(wrong))
    assert isinstance(get(store), Miss)
    put(store, binary=b"b" * 40)
    assert isinstance(get(store), StoreEntry)


@given(st.binary(max_size=4096))
@settings(max_examples=300)
def test_any_bytes_decode_or_are_refused(payload: bytes) -> None:
    for function in (decode, decode_header):
        with pytest.raises(EntryError):
            function(payload)


@given(st.data())
@settings(max_examples=300)
def test_a_mangled_entry_decodes_or_is_refused(data: st.DataObject) -> None:
    """Lengths and headers that lie, around a real entry."""
    whole = encode(StoreEntry(key=parts().digest(), components=parts(), kind="k", binary=b"x" * 50))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    mangled = whole[:start] + data.draw(st.binary(max_size=60)) + whole[stop:]
    if mangled == whole:
        return
    with pytest.raises(EntryError):
        decode(mangled)


def test_an_entry_of_other_components_is_not_taken(store: Store) -> None:
    """A file under another key's name, whole in itself."""
    put(store, 1)
    os.rename(file_of(store, 1), file_of(store, 0))
    found = get(store, 0)
    assert isinstance(found, Miss)
    assert found.reason.startswith("corrupt")
    assert store.components_index() == []


def test_a_key_that_is_not_the_digest_is_not_written(store: Store, warnings: list[str]) -> None:
    assert "digest" in store.put("0" * 64, parts(), b"x", "fake")
    assert store.entry_count() == 0
    assert len(warnings) == 1


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_writable_by_others_is_refused(
    store: Store, mode: int, warnings: list[str]
) -> None:
    """X23: refused for reading and writing, said once."""
    put(store)
    assert store.folder is not None
    store.folder.chmod(mode)
    found = get(store)
    assert isinstance(found, Miss)
    assert found.reason == "refused: the folder is writable by other users"
    assert put(store, 1) == "the folder is writable by other users"
    assert get(store, 2) != Miss(reason="absent")
    assert len(warnings) == 1
    assert "delete" not in warnings[0]


def test_an_entry_writable_by_others_is_refused(store: Store) -> None:
    put(store)
    file_of(store).chmod(0o666)
    assert get(store) == Miss(reason="refused: the entry is writable by other users")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_foreign_owned_is_refused(store: Store) -> None:
    put(store)
    os.chown(file_of(store), 12345, 12345)
    assert get(store) == Miss(reason="refused: the entry belongs to user 12345")
    assert store.folder is not None
    os.chown(store.folder, 12345, 12345)
    assert get(store) == Miss(reason="refused: the folder belongs to user 12345")


def test_links_and_pipes_in_the_place_of_an_entry_are_refused(store: Store, tmp_path: Path) -> None:
    put(store)
    real = tmp_path / "elsewhere"
    os.rename(file_of(store), real)
    file_of(store).symlink_to(real)
    assert isinstance(get(store), Miss)
    file_of(store).unlink()
    os.mkfifo(file_of(store), 0o600)
    found = get(store)  # must not block
    assert found == Miss(reason="refused: the entry is not a regular file")


def test_a_deleted_folder_is_only_misses_and_comes_back(store: Store, warnings: list[str]) -> None:
    """X24."""
    put(store)
    assert store.folder is not None
    file_of(store).unlink()
    store.folder.rmdir()
    assert get(store) == Miss(reason="absent")
    assert put(store) == ""
    assert isinstance(get(store), StoreEntry)
    assert warnings == []


def test_a_store_that_is_off_or_a_file_does_no_harm(tmp_path: Path) -> None:
    off = Store(None)
    assert get(off) == Miss(reason="off")
    assert put(off) == "off"
    (tmp_path / "file").write_text("not a folder")
    said: list[str] = []
    blocked = Store(tmp_path / "file", warn=said.append)
    assert put(blocked) != ""
    assert isinstance(get(blocked), Miss)
    assert len(said) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_failing_disk_is_said_once_and_leaves_nothing(
    store: Store, warnings: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """X23: injected at the write, so a part of the temporary file is there already."""
    put(store)

    def fail(_fd: int, _data: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store_module.os, "write", fail)
    assert put(store, 1) == os.strerror(number)
    assert put(store, 2) == os.strerror(number)
    monkeypatch.undo()
    assert len(warnings) == 1
    assert store.folder is not None
    assert [path.name for path in store.folder.iterdir()] == [file_of(store).name]
    assert put(store, 1) == ""


def test_strict_makes_it_an_error(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o777)
    (tmp_path / "store").chmod(0o777)
    strict = Store(tmp_path / "store", strict=True)
    with pytest.raises(StoreError, match="writable by other users"):
        put(strict)
    with pytest.raises(StoreError):
        get(strict)


def test_the_number_of_entries_is_bounded_and_the_used_stay(tmp_path: Path) -> None:
    """X25: 30 kernels, at most 10 on disk; the oldest go, the touched ones stay."""
    store = Store(tmp_path / "store", limit_entries=10)
    put(store, 0)
    os.utime(file_of(store, 0), (1, 1))
    get(store, 0)  # used: touched
    for number in range(1, 30):
        held = get(store, number - 1)
        put(store, number)
        assert store.entry_count() <= 10
        assert isinstance(held, StoreEntry)
    assert store.counts["evicted"] == 20
    assert isinstance(get(store, 29), StoreEntry)


def test_the_size_is_bounded_also_with_another_writer(tmp_path: Path) -> None:
    one = Store(tmp_path / "store", limit_bytes=20_000)
    other = Store(tmp_path / "store", limit_bytes=20_000)
    for number in range(40):
        put(one if number % 2 else other, number, b"z" * 1500)
    size = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert size <= 20_000
    assert isinstance(get(one, 39), StoreEntry)


def test_temporary_files_of_dead_writers_go(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", limit_entries=2)
    put(store)
    dead = tmp_path / "store" / f".tmp-{2**22 + 5}-0123456789abcdef"
    dead.write_bytes(b"half")
    os.utime(dead, (1, 1))
    mine = tmp_path / "store" / f".tmp-{os.getpid()}-0123456789abcdef"
    mine.write_bytes(b"half")
    for number in range(4):
        put(store, number)
    assert not dead.exists()
    assert mine.exists()


def test_layers_are_read_and_never_written(tmp_path: Path) -> None:
    lower = Store(tmp_path / "lower")
    put(lower, 1)
    (tmp_path / "lower").chmod(0o555)
    upper = Store(tmp_path / "upper", layers=(tmp_path / "lower",))
    assert isinstance(get(upper, 1), StoreEntry)
    put(upper, 2)
    assert upper.entry_count() == 2
    assert {c.params[0][1] for c in upper.components_index()} == {1, 2}
    assert lower.entry_count() == 1


def test_an_unreadable_own_entry_falls_through_to_a_layer(tmp_path: Path) -> None:
    put(Store(tmp_path / "lower"), 1)
    upper = Store(tmp_path / "upper", layers=(tmp_path / "lower",))
    put(upper, 1)
    file_of(upper, 1).write_bytes(b"torn")
    assert isinstance(get(upper, 1), StoreEntry)


def test_listing_and_verifying_name_the_bad_ones(store: Store) -> None:
    for number in range(3):
        put(store, number)
    torn = bytearray(file_of(store, 1).read_bytes())
    torn[-1] ^= 1
    file_of(store, 1).write_bytes(bytes(torn))
    assert [listed.problem for listed in store.entries()] == ["", "", ""]
    bad = [listed for listed in store.entries(verify=True) if listed.problem]
    assert [listed.key for listed in bad] == [parts(1).digest()]
    assert "digest" in bad[0].problem


def test_prune_removes_the_longest_unused(store: Store) -> None:
    for number in range(5):
        put(store, number)
        os.utime(file_of(store, number), (1000 + number, 1000 + number))
    assert store.prune(limit_bytes=1 << 30, limit_entries=2) == 3
    assert isinstance(get(store, 4), StoreEntry)
    assert isinstance(get(store, 0), Miss)


def test_remove_takes_an_entry_out(store: Store) -> None:
    put(store)
    store.remove(parts().digest())
    store.remove(parts().digest())
    assert get(store) == Miss(reason="absent")


def test_the_index_needs_headers_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        put(store, number)
    assert {c.params[0][1] for c in store.components_index()} == {0, 1, 2}
    monkeypatch.setattr(store_module, "decode_header", None)  # nothing is read a second time
    assert len(store.components_index()) == 3


def test_a_binary_that_is_too_large_is_not_kept(store: Store, warnings: list[str]) -> None:
    huge = bytes(entry_module.MAX_ENTRY_BYTES)
    assert "too large" in put(store, binary=huge)
    assert store.entry_count() == 0
    assert len(warnings) == 1


def test_components_are_kept_in_the_clear(store: Store) -> None:
    """X21: what differs can be said from the header of the nearest entry."""
    wanted = replace(parts(), params=(("K", 7), ("WTYPE", "q4_1")))
    store.put(wanted.digest(), wanted, b"b", "fake")
    assert store.components_index() == [wanted]
    assert b'"WTYPE"' in (store.folder or Path()).joinpath(wanted.digest() + ".hrxk").read_bytes()


def bundle_of(tmp_path: Path, count: int = 3) -> Path:
    source = Store(tmp_path / "source")
    for number in range(count):
        put(source, number)
    assert export_bundle(source, tmp_path / "bundle") == count
    return tmp_path / "bundle"


def test_a_bundle_carries_a_store(tmp_path: Path, store: Store) -> None:
    found = import_bundle(store, bundle_of(tmp_path))
    assert (found.taken, found.refused) == (3, ())
    assert isinstance(get(store, 2), StoreEntry)
    with pytest.raises(StoreError, match="cannot be written"):
        export_bundle(store, tmp_path / "bundle")  # never over a file that is there


def test_bad_entries_of_a_bundle_are_refused_one_by_one(tmp_path: Path, store: Store) -> None:
    """Torn, foreign, linked and wandering members: no name in a bundle becomes a path."""
    whole = bundle_of(tmp_path, 1).read_bytes()
    entry = whole[512 : 512 + file_size(whole)]
    path = tmp_path / "evil"
    with tarfile.open(path, "w") as bundle:
        for name, content in (
            ("../../evil.hrxk", entry), ("torn.hrxk", entry[:-1]), ("other", b"x" * 100),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.size = len(content)
            bundle.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.hrxk")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        bundle.addfile(link)
    found = import_bundle(store, path)
    assert found.taken == 1  # whole, and stored under its own key
    assert [name for name, _ in found.refused] == ["torn.hrxk", "other", "link.hrxk"]
    assert store.folder is not None
    assert [p.name for p in store.folder.iterdir()] == [file_of(store, 0).name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "evil", "source", "store"]


@given(st.binary(max_size=3000), st.integers(0, 3000))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bundle_is_read_or_refused(tmp_path: Path, junk: bytes, at: int) -> None:
    path = tmp_path / "junk"
    if not (tmp_path / "bundle").exists():
        bundle_of(tmp_path)
    whole = (tmp_path / "bundle").read_bytes()
    path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    with contextlib.suppress(StoreError):
        import_bundle(Store(tmp_path / "into"), path)


def test_a_bundle_that_others_could_have_written_is_not_trusted(
    tmp_path: Path, store: Store
) -> None:
    path = bundle_of(tmp_path)
    path.chmod(0o666)
    with pytest.raises(StoreError, match="writable by other users"):
        import_bundle(store, path)
    with pytest.raises(StoreError, match="cannot be read"):
        import_bundle(store, tmp_path / "none")


def file_size(tar: bytes) -> int:
    return int(tar[124:135], 8)


def test_the_store_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = Settings(cache=str(tmp_path / "store"))
    store = Store(tmp_path / "store")
    for number in range(4):
        put(store, number)
    file_of(store, 1).write_bytes(b"torn")
    assert store_command(["ls", "-o", "jsonl"], chosen) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert store_command(["verify"], chosen) == 1
    assert "corrupt" in capsys.readouterr().out
    assert store_command(["verify", "--remove"], chosen) == 0
    assert store_command(["export", str(tmp_path / "b")], chosen) == 0
    assert store_command(["prune", "--max-entries", "1"], chosen) == 0
    assert "2 entries removed, 1 left" in capsys.readouterr().err
    assert store_command(["import", str(tmp_path / "b")], chosen) == 0
    assert store.entry_count() == 3
    with pytest.raises(StoreError, match="off"):
        store_command(["ls"], Settings(cache="off"))


def test_a_network_file_system_is_noticed(store: Store, tmp_path: Path) -> None:
    put(store)
    assert store.folder is not None
    folder = os.open(store.folder, os.O_RDONLY)
    device = os.fstat(folder).st_dev
    table = tmp_path / "mountinfo"
    for kind, found in (("nfs4", "nfs4"), ("fuse.sshfs", "fuse.sshfs"), ("ext4", "")):
        where = f"{os.major(device)}:{os.minor(device)}"
        table.write_text(f"1 2 0:999 / / rw - proc p rw\n22 1 {where} / /x rw - {kind} a rw\n")
        assert network_type(folder, table) == found
    assert network_type(folder, tmp_path / "none") == ""
    os.close(folder)


def test_the_driver_s_cache_lies_in_a_private_folder(store: Store) -> None:
    old = os.umask(0o002)
    try:
        folder = Path(store.driver_cache())
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert put(store) == ""
    folder.chmod(0o777)
    assert store.driver_cache() == ""


def test_a_refused_entry_of_a_layer_is_not_offered_again(tmp_path: Path) -> None:
    """Not here, not to another process, until a new one is there; the layer stays as it is."""
    put(Store(tmp_path / "lower"), 1, b"refused by the driver")
    mine, other = (Store(tmp_path / "upper", layers=(tmp_path / "lower",)) for _ in range(2))
    assert isinstance(get(other, 1), StoreEntry)
    mine.remove(parts(1).digest())
    for store in (mine, other):
        assert get(store, 1) == Miss(reason="refused: the driver refused it")
    put(other, 1, b"compiled anew")
    found = get(other, 1)
    assert isinstance(found, StoreEntry)
    assert found.binary == b"compiled anew"
    assert isinstance(get(Store(tmp_path / "lower"), 1), StoreEntry)
    alone = Store(None, layers=(tmp_path / "lower",))
    alone.remove(parts(1).digest())
    assert isinstance(get(alone, 1), Miss)
