"""Why a kernel is not in memory: the nearest known key, each component by name, and storms."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hrxmp.executor.reasons import Reasons, Storms
from hrxmp.kernels import catalog
from hrxmp.kernels.keys import KeyComponents
from hrxmp.kernels.store import Store

BASE = KeyComponents(
    source="a" * 64, entry_point="rms_norm", params=(("K", 64), ("WEIGHTED", 1)),
    local_size=(64, 1), build_options="-cl-std=CL3.0", sanitizer="", platform="P", device="D",
    compute_units=2, driver="1.0",
)  # fmt: skip
CHANGES: dict[str, Any] = {
    "driver": "1.1", "device": "E", "platform": "Q", "compute_units": 4,
    "build_options": "-cl-std=CL2.0", "source": "b" * 64, "local_size": (32, 1),
    "sanitizer": "access",
}  # fmt: skip


class Told:
    """Stands where the tracer does and keeps what is emitted."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: type, **fields: Any) -> None:
        self.records.append((record.__name__, fields))


def reasons(folder: Path | None, keys: int = 3, window_ns: int = 10**12) -> tuple[Reasons, Told]:
    told = Told()
    store = Store(folder)
    return Reasons(store, Storms(keys, window_ns), told, print), told  # type: ignore[arg-type]


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    assert Store(folder).put(BASE.digest(), BASE, b"binary", "kind") == ""
    return folder


@pytest.mark.parametrize("component", CHANGES)
def test_a_change_is_named_with_old_and_new_value(warm: Path, component: str) -> None:
    """X21: exactly that component, from the store of another process."""
    other = msgspec.structs.replace(BASE, **{component: CHANGES[component]})
    entry, reason = reasons(warm)[0].look_up(other.digest(), other)
    assert entry is None and reason.why == "differs" and reason.near == BASE.digest()
    (difference,) = reason.differs
    assert difference.component == component
    texts = [getattr(item, component) for item in (BASE, other)]
    texts = ["x".join(map(str, t)) if isinstance(t, tuple) else str(t) for t in texts]
    assert [difference.before, difference.after] == texts
    assert f"{component} {texts[0]} -> {texts[1]}" in reason.text()


def test_a_parameter_is_named_by_itself(warm: Path) -> None:
    other = msgspec.structs.replace(BASE, params=(("K", 128), ("WEIGHTED", 1)))
    _, reason = reasons(warm)[0].look_up(other.digest(), other)
    assert [(d.component, d.before, d.after) for d in reason.differs] == [("params.K", "64", "128")]


def test_what_is_there_is_stored_and_what_was_never_is_first_use(warm: Path) -> None:
    found, _ = reasons(warm)
    entry, reason = found.look_up(BASE.digest(), BASE)
    assert entry is not None and reason.why == "stored"
    other = msgspec.structs.replace(BASE, entry_point="soft_max")
    assert found.look_up(other.digest(), other)[1].why == "first_use"


def test_keys_of_this_process_are_known_without_a_store() -> None:
    found, _ = reasons(None)
    found.remember(BASE.digest(), BASE)
    other = msgspec.structs.replace(BASE, driver="1.1")
    _, reason = found.look_up(other.digest(), other)
    assert (reason.why, reason.near) == ("differs", BASE.digest())


def test_a_refused_entry_says_why(warm: Path) -> None:
    entry = warm / f"{BASE.digest()}.hrxk"
    entry.write_bytes(entry.read_bytes()[:-3])
    assert reasons(warm)[0].look_up(BASE.digest(), BASE)[1].why.startswith("corrupt")
    entry.chmod(0o666)
    reason = reasons(warm)[0].look_up(BASE.digest(), BASE)[1]
    assert reason.why.startswith("refused") and "writable" in reason.text()


def test_an_include_is_a_part_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X21: a changed header is a changed source, of the kernels that include it only."""
    folder = tmp_path / "cl"
    shutil.copytree(catalog._FOLDER, folder)
    monkeypatch.setattr(catalog, "_FOLDER", folder)
    norm, other = catalog.get("rms_norm"), catalog.get("unary")
    before = {d.name: _fresh_digest(d) for d in (norm, other)}
    with (folder / "reduce.h").open("a") as file:
        file.write("// another line\n")
    assert _fresh_digest(norm) != before["rms_norm"]
    assert _fresh_digest(other) == before[other.name]


def _fresh_digest(definition: catalog.KernelDefinition) -> str:
    catalog._digest.cache_clear()
    catalog._text.cache_clear()
    try:
        return catalog.source_digest(definition)
    finally:
        catalog._digest.cache_clear()
        catalog._text.cache_clear()


def test_a_storm_is_told_once_with_its_component_and_count() -> None:
    found, told = reasons(None, keys=3)
    for k in range(64, 64 + 20 * 16, 16):
        other = msgspec.structs.replace(BASE, params=(("K", k), ("WEIGHTED", 1)))
        found.look_up(other.digest(), other)
        found.remember(other.digest(), other)
    assert told.records == []
    found.finish()
    ((name, fields),) = told.records
    assert name == "Storm"
    assert (fields["kernel"], fields["component"], fields["count"]) == ("rms_norm", "params.K", 19)


def test_few_keys_are_no_storm_and_a_pause_ends_one() -> None:
    storms = Storms(2, window_ns=10)
    for now in (0, 5):
        assert storms.note("k", "driver", now) == []
    assert storms.note("k", "driver", 9) == []
    assert storms.note("k", "driver", 100) == [("k", "driver", 3)]  # the pause was longer
    assert storms.note("other", "driver", 300) == []  # one is no storm
    assert storms.over() == []
