"""The catalog: every definition is whole, and texts have their includes in place, each once."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from hrxmp.errors import HrxmpError
from hrxmp.kernels import catalog
from hrxmp.kernels.definition import KernelDefinition, arguments


def define(source: str) -> KernelDefinition:
    return KernelDefinition(
        name="x", source=source, entry_point="x", params=(), args=arguments("n:int y:buffer")
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(catalog, "_FOLDER", tmp_path)
    monkeypatch.setattr(catalog, "_text", catalog._text.__wrapped__)
    monkeypatch.setattr(catalog, "_digest", catalog._digest.__wrapped__)
    return tmp_path


@pytest.mark.parametrize("name", sorted(catalog.catalog()))
def test_definition_is_whole(name: str) -> None:
    definition = catalog.get(name)
    assert definition.name == name
    text = catalog.source_text(definition)
    assert re.search(rf"\b{definition.entry_point}\s*\(", text)
    assert definition.args[0].kind == "int", "the first argument is a run-time bound"
    assert len({argument.name for argument in definition.args}) == len(definition.args)
    assert '#include "' not in text


def test_unknown_name() -> None:
    with pytest.raises(HrxmpError, match="no_such_kernel"):
        catalog.get("no_such_kernel")


def test_includes_are_put_in_once_with_their_lines(folder: Path) -> None:
    (folder / "a.cl").write_text('one\n#include "b.h"\n  #  include "c.h"\nlast\n')
    (folder / "b.h").write_text('#include "c.h"\nfrom b\n')
    (folder / "c.h").write_text("from c\n")
    text = catalog.source_text(define("a.cl"))
    assert text.count("from c") == 1
    words = [line for line in text.splitlines() if not line.startswith("#line")]
    assert words == ["one", "from c", "from b", "last"]
    lines = text.splitlines()
    assert lines[lines.index("last") - 1] == '#line 4 "a.cl"'
    assert lines[lines.index("from b") - 1] == '#line 2 "b.h"'


def test_digest_follows_an_include(folder: Path) -> None:
    (folder / "a.cl").write_text('#include "b.h"\n')
    (folder / "b.h").write_text("int x;\n")
    before = catalog.source_digest(define("a.cl"))
    text = catalog.source_text(define("a.cl"))
    assert before == hashlib.sha256(text.encode()).hexdigest()
    (folder / "b.h").write_text("int y;\n")
    assert catalog.source_digest(define("a.cl")) != before


@pytest.mark.parametrize("source", ["../device.py", "/etc/hostname", "sub/x.cl"])
def test_only_files_of_the_folder(folder: Path, source: str) -> None:
    with pytest.raises(HrxmpError, match="plain file name"):
        catalog.source_text(define(source))


def test_missing_file_is_named(folder: Path) -> None:
    (folder / "a.cl").write_text('#include "gone.h"\n')
    with pytest.raises(HrxmpError, match=r"gone\.h"):
        catalog.source_text(define("a.cl"))


def test_argument_words() -> None:
    assert [argument.kind for argument in arguments("a:buffer b:int c:float")] == [
        "buffer", "int", "float",
    ]  # fmt: skip
    with pytest.raises(KeyError):
        arguments("a:double")
