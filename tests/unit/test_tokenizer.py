"""Tokenizer: llama.cpp's tokens for the oracle's prompts, bytes in and out, broken tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from hrxmp.errors import ModelError
from hrxmp.models.gguf_file import GgufFile
from hrxmp.models.tokenizer import Tokenizer
from tests.model_files import ORACLE, smollm2, write_tiny

PLAIN = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="|", max_codepoint=0xFFFF)
"""What smollm2 has tokens for (it lacks some bytes), without what special tokens are made of."""


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile.open(smollm2()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile.open(write_tiny(tmp_path_factory.mktemp("t") / "t.gguf")))


def build(path: Path, tokens: list[str], merges: list[str], /, **changes: object) -> Tokenizer:
    """A tokenizer of exactly these tables; `changes` replace metadata, None leaves it out."""
    values: dict[str, object] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges,
        "token_type": [1] * len(tokens),
    }  # fmt: skip
    writer = GGUFWriter(path, "llama")
    for key, value in (values | changes).items():
        name = f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_gguf(GgufFile.open(path))


@pytest.mark.parametrize("case", json.loads(ORACLE.read_text()), ids=lambda case: case["prompt"])
def test_the_oracles_tokens(real: Tokenizer, case: dict[str, list[int] | str]) -> None:
    assert real.encode(str(case["prompt"])) == case["tokens"]
    assert real.decode(case["tokens"]) == case["prompt"]  # type: ignore[arg-type]


def test_special_tokens_are_parsed_and_have_no_text(real: Tokenizer) -> None:
    ids = real.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert real.decode(ids) == "user\nhi"
    assert real.ends == {0, 2}
    assert (real.bos, real.add_bos) == (1, False)


def comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tiny: Tokenizer, text: str) -> None:
    comes_back(tiny, text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(PLAIN))
def test_text_comes_back(real: Tokenizer, text: str) -> None:
    comes_back(real, text)


def test_a_character_over_several_tokens_is_streamed_whole(tiny: Tokenizer) -> None:
    ids = tiny.encode("aé😀")
    stream = tiny.stream()
    assert len(ids) == 1 + 2 + 4
    assert [stream.push(token) for token in ids] == ["a", "", "é", "", "", "", "😀"]
    assert stream.finish() == ""
    stream.push(ids[1])
    assert stream.finish() == "\ufffd"
    assert tiny.decode(ids[3:6]) == "\ufffd"


def test_a_lone_surrogate_does_not_break_the_library(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("gpt-2", ["1234"]), ("smollm", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"])],
)
def test_pre_tokenizers_split_digits_differently(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    tokens = ["1", "2", "3", "4", "12", "123", "1234"]
    tokenizer = build(tmp_path / "m.gguf", tokens, ["1 2", "12 3", "123 4"], pre=pre)
    assert [tokens[index] for index in tokenizer.encode("1234")] == expected


def test_a_beginning_token_is_put_first_where_the_file_says_so(tmp_path: Path) -> None:
    tables = ["a", "b", "ab", "<s>"], ["a b"]
    common = {"token_type": [1, 1, 1, 3], "bos_token_id": 3, "eos_token_id": 3}
    with_bos = build(tmp_path / "a.gguf", *tables, **common, add_bos_token=True)
    assert with_bos.encode("ab") == [3, 2]
    assert with_bos.ends == {3}
    assert build(tmp_path / "b.gguf", *tables, **common).encode("ab") == [2]
    assert build(tmp_path / "c.gguf", *tables, **common, pre="llama-bpe").encode("ab") == [3, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "supported are model 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model = nothing"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2'"),
        ({"token_type": [1]}, "3 tokens but 1 token types"),
        ({"tokens": [1, 2, 3]}, "expected an array of str"),
        ({"merges": ["a z"]}, "do not fit together"),
        ({"merges": ["ab"]}, "do not fit together"),
        ({"merges": None}, "tokenizer.ggml.merges = nothing"),
        ({"bos_token_id": 3}, "bos_token_id = 3, but only 3 tokens"),
        ({"eos_token_id": 99}, "eos_token_id = 99"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(tmp_path / "m.gguf", ["a", "b", "ab"], ["a b"], **changes)
