"""GGUF files: against the gguf package's reader, and broken in every way we could think of."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFEndian,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hrxmp.errors import ModelError
from hrxmp.models.gguf_file import TYPES, GgufFile
from tests.model_files import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    folder = tmp_path_factory.mktemp("broken")

    def write(content: bytes) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def small(path: Path, *, endian: GGUFEndian = GGUFEndian.LITTLE) -> Path:
    """One tensor `x` [2, 32] and a few pairs of metadata."""
    writer = GGUFWriter(path, "llama", endianess=endian)
    writer.add_uint32("answer", 42)
    writer.add_string("text", "wörld")
    writer.add_array("names", ["a", "b"])
    writer.add_tensor("x", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path) -> str:
    """The message of the ModelError that opening raises; it names the file."""
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    assert str(path) in caught.value.message
    return caught.value.message


def with_word(content: bytes, after: bytes, form: str, value: int) -> bytes:
    """`content` with the number that follows `after` replaced."""
    at = content.index(after) + len(after)
    return content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]


@pytest.mark.parametrize("mix", ["q4_k_m", "ud-q4_k_xl", "f16", "q4_1", "q5_0", "q8_0"])
def test_same_as_the_package_reads(tmp_path: Path, mix: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", mix)
    ours, theirs = GgufFile.open(path), GGUFReader(path)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert dict(ours.metadata) == expected
    assert [*ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.dtype.label == tensor.tensor_type.name.lower()
        assert mine.data.tobytes() == tensor.data.tobytes()


def test_type_table_is_ggmls() -> None:
    for type_id, dtype in TYPES.items():
        theirs = GGMLQuantizationType(type_id)
        assert theirs.name.lower() == dtype.label
        assert GGML_QUANT_SIZES[theirs] == (dtype.block, dtype.nbytes)


def test_every_value_type(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "UINT8": 200, "INT8": -3, "UINT16": 60000, "INT16": -300, "UINT32": 4_000_000_000,
        "INT32": -70000, "FLOAT32": 0.5, "BOOL": True, "STRING": "é", "UINT64": 1 << 63,
        "INT64": -(1 << 62), "FLOAT64": 0.1,
    }  # fmt: skip
    for name, value in values.items():
        writer.add_key_value(name, value, GGUFValueType[name])
    arrays = {"ints": [1, -2, 3], "floats": [0.5, 1.5], "texts": ["", "ü"], "nested": [[1], [2, 3]]}
    for name, value in arrays.items():
        writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = dict(GgufFile.open(tmp_path / "m.gguf").metadata)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == values | arrays


def test_tensors_are_read_only_views_of_the_file(tiny: Path) -> None:
    tensor = GgufFile.open(tiny).tensors["token_embd.weight"]
    assert not tensor.data.flags.writeable and not tensor.data.flags.owndata


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list([f"token{index}" for index in range(50_000)])
    writer.add_token_merges([f"left{index} right" for index in range(50_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = []
    for _ in range(3):
        begin = time.process_time()
        GgufFile.open(tmp_path / "m.gguf")
        ours.append(time.process_time() - begin)
    begin = time.process_time()
    GGUFReader(tmp_path / "m.gguf")
    theirs = time.process_time() - begin
    assert min(ours) < theirs / 4  # 0.04 s and 1.5 s


def test_truncated_anywhere(tmp_path: Path, broken: Callable[[bytes], Path]) -> None:
    content = small(tmp_path / "m.gguf").read_bytes()
    for length in range(1, len(content)):
        refused(broken(content[:length]))
    assert "truncated" in refused(broken(content[:-1]))
    assert "byte" in refused(broken(content[:-1]))


def test_foreign_files(tmp_path: Path, broken: Callable[[bytes], Path]) -> None:
    assert "expected b'GGUF'" in refused(broken(b"PK\x03\x04 a zip file, say"))
    assert "is empty" in refused(broken(b""))
    assert "cannot be read" in refused(tmp_path / "absent.gguf")
    assert "cannot be read" in refused(tmp_path)


def test_big_endian_and_other_versions(tmp_path: Path, broken: Callable[[bytes], Path]) -> None:
    assert "big-endian" in refused(small(tmp_path / "big.gguf", endian=GGUFEndian.BIG))
    content = small(tmp_path / "m.gguf").read_bytes()
    assert "version 1, expected 2 or 3" in refused(broken(with_word(content, b"GGUF", "<I", 1)))
    assert "version 99" in refused(broken(with_word(content, b"GGUF", "<I", 99)))


@pytest.mark.parametrize(
    ("after", "form"),
    [
        (b"GGUF\x03\0\0\0", "<Q"),  # tensors
        (b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0", "<Q"),  # metadata pairs
        (b"text\x08\0\0\0", "<Q"),  # length of a string
        (b"names\x09\0\0\0\x08\0\0\0", "<Q"),  # items of an array
        (b"\x01\0\0\0\0\0\0\0x", "<I"),  # dimensions
        (b"\x01\0\0\0\0\0\0\0x\x02\0\0\0", "<Q"),  # a dimension
    ],
)
@pytest.mark.parametrize("value", [1 << 31, (1 << 63) + 5])
def test_absurd_counts_are_refused_at_once(
    tmp_path: Path, broken: Callable[[bytes], Path], after: bytes, form: str, value: int
) -> None:
    content = small(tmp_path / "m.gguf").read_bytes()
    begin = time.process_time()
    refused(broken(with_word(content, after, form, value % (1 << 8 * struct.calcsize(form)))))
    assert time.process_time() - begin < 10  # walking over so many takes minutes


def test_bad_types_and_places(tmp_path: Path, broken: Callable[[bytes], Path]) -> None:
    content = small(tmp_path / "m.gguf").read_bytes()
    entry = b"\x01\0\0\0\0\0\0\0x\x02\0\0\0" + struct.pack("<QQ", 32, 2)
    message = refused(broken(with_word(content, entry, "<I", 16)))
    assert "IQ2_XXS" in message and "supported are f32" in message
    assert "999 (unknown)" in refused(broken(with_word(content, entry, "<I", 999)))
    assert "value type 77" in refused(broken(with_word(content, b"answer", "<I", 77)))
    assert "multiple of 32" in refused(broken(with_word(content, entry + b"\0\0\0\0", "<Q", 4)))
    far = with_word(content, entry + b"\0\0\0\0", "<Q", 1 << 20)
    assert "truncated" in refused(broken(far))
    zero = with_word(content, b"\x01\0\0\0\0\0\0\0x\x02\0\0\0", "<Q", 0)
    assert "expected positive" in refused(broken(zero))


def test_repeated_names_and_overlaps(tmp_path: Path, broken: Callable[[bytes], Path]) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in ("tensor_a", "tensor_b"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = (tmp_path / "m.gguf").read_bytes()
    assert "twice" in refused(broken(content.replace(b"tensor_b", b"tensor_a")))
    entry = b"tensor_b" + struct.pack("<IQI", 1, 32, 0)
    assert "from 128 on" in refused(broken(with_word(content, entry, "<Q", 0)))


def test_metadata_of_the_wrong_kind(tmp_path: Path) -> None:
    file = GgufFile.open(small(tmp_path / "m.gguf"))
    assert (file.integer("answer"), file.integer("absent", 7)) == (42, 7)
    assert (file.number("answer"), file.string("text")) == (42.0, "wörld")
    assert file.items("names", str) == ["a", "b"]
    for call in (
        lambda: file.integer("text"),
        lambda: file.integer("absent"),
        lambda: file.integer("answer", least=43),
        lambda: file.number("text"),
        lambda: file.string("answer"),
        lambda: file.items("names", int),
        lambda: file.tensor("y", (1,)),
        lambda: file.tensor("x", (32, 2)),
    ):
        with pytest.raises(ModelError, match=re.escape(str(file.path))):
            call()


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=8))))
def test_random_damage_gives_a_file_or_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzz.gguf"
    content = bytearray(small(path).read_bytes())
    for at, part in changes:
        content[at % len(content) : at % len(content) + len(part)] = part
    path.write_bytes(content)
    try:
        file = GgufFile.open(path)
    except ModelError:
        return
    assert all(tensor.data.nbytes <= len(content) for tensor in file.tensors.values())
