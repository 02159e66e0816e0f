"""Text to tokens and back, from the vocabulary in a GGUF file (byte-level BPE, "gpt2").

Runs in the executor process. Splitting and merging is the `tokenizers` library's; the tables come
from the file each time (about 70 ms), nothing is cached on disk. Decoding works on bytes, so that
a character spread over several tokens comes out whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, cast

from hrxmp.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder
    from tokenizers.pre_tokenizers import PreTokenizer

PRE_TOKENIZERS: Final = ("smollm", "gpt-2", "llama-bpe")
"""Values of tokenizer.ggml.pre that are supported."""

_LLAMA_BPE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PARSED_TYPES: Final = frozenset({2, 3, 4})  # unknown, control, user-defined
_HIDDEN_TYPES: Final = frozenset({2, 3, 5})  # unknown, control, unused: no text of their own
_END_TEXTS: Final = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"}
)
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """Encoder and decoder of one vocabulary.

    `bos` is put first by `encode` where the file asks for it; None when it has none. `ends` are
    the ids that end a generation.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokens: list[str],
        types: list[int],
        *,
        bos: int | None,
        add_bos: bool,
        ends: frozenset[int],
    ) -> None:
        self._encoder = encoder
        self._tokens = tokens
        self._types = types
        self.bos = bos
        self.add_bos = add_bos
        self.ends = ends

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Build from `file`'s metadata. ModelError for other kinds and for broken tables."""
        model = file.string("tokenizer.ggml.model")
        pre = file.string("tokenizer.ggml.pre", "gpt-2")
        if model != "gpt2" or pre not in PRE_TOKENIZERS:
            raise file.error(
                f"has a tokenizer of model {model!r}, pre-tokenizer {pre!r}; supported are model "
                f"'gpt2' with {', '.join(map(repr, PRE_TOKENIZERS))}"
            )
        tokens = cast(list[str], file.items("tokenizer.ggml.tokens", str))
        types = cast(list[int], file.items("tokenizer.ggml.token_type", int))
        if not tokens or len(types) != len(tokens):
            raise file.error(f"has {len(tokens)} tokens but {len(types)} token types")
        bos = _token_id(file, "tokenizer.ggml.bos_token_id", len(tokens))
        add_bos = file.metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
        return cls(
            _encoder(file, pre, tokens, types),
            tokens,
            types,
            bos=bos,
            add_bos=bool(add_bos) and bos is not None,
            ends=_ends(file, tokens, types),
        )

    @property
    def n_vocab(self) -> int:
        """Number of token ids."""
        return len(self._tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it are parsed."""
        clean = text.encode("utf-8", "replace").decode()  # the library panics on lone surrogates
        ids: list[int] = self._encoder.encode(clean, add_special_tokens=False).ids
        return [self.bos, *ids] if self.add_bos and self.bos is not None else ids

    def piece(self, token: int) -> bytes:
        """The UTF-8 bytes of one token; empty for control tokens."""
        kind = self._types[token]
        return b"" if kind in _HIDDEN_TYPES else _bytes(self._tokens[token], kind)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self)


class StreamDecoder:
    """Turns tokens into text as soon as whole characters are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""
        return self._decoder.decode(self._tokenizer.piece(token))

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


def _encoder(file: GgufFile, pre: str, tokens: list[str], types: list[int]) -> Encoder:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

    merges = cast(list[str], file.items("tokenizer.ggml.merges", str))
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        vocabulary = {text: index for index, text in enumerate(tokens)}
        encoder = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
        encoder.pre_tokenizer = _pre_tokenizer(pre)
        encoder.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=False)
                for text, kind in zip(tokens, types, strict=True)
                if kind in _PARSED_TYPES and text
            ]
        )
    except Exception as error:  # the library raises bare exceptions
        raise file.error(f"has tokenizer tables that do not fit together: {error}") from error
    if encoder.get_vocab_size() > len(tokens):
        raise file.error("has special tokens outside its vocabulary")
    return encoder


def _pre_tokenizer(pre: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre == "llama-bpe":
        split = Split(Regex(_LLAMA_BPE), "isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    words = ByteLevel(add_prefix_space=False, use_regex=True)
    return Sequence([Digits(individual_digits=True), words]) if pre == "smollm" else words


def _byte_of_character() -> dict[str, int]:
    """Inverse of GPT-2's byte alphabet: printable Latin-1 stays, the rest moves to U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    table = {chr(byte): byte for byte in kept}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


_BYTES = {ord(character): byte for character, byte in _byte_of_character().items()}


def _bytes(text: str, kind: int) -> bytes:
    if kind == 4:  # user-defined tokens are plain text
        return text.encode("utf-8", "replace")
    try:
        return text.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # a character outside the alphabet stands for itself
        return text.encode("utf-8", "replace")


def _token_id(file: GgufFile, key: str, n_vocab: int) -> int | None:
    if key not in file.metadata:
        return None
    value = file.integer(key, least=0)
    if value >= n_vocab:
        raise file.error(f"has {key} = {value}, but only {n_vocab} tokens")
    return value


def _ends(file: GgufFile, tokens: list[str], types: list[int]) -> frozenset[int]:
    stated = (_token_id(file, f"tokenizer.ggml.{key}", len(tokens)) for key in _END_KEYS)
    named = (
        index
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _PARSED_TYPES and text in _END_TEXTS
    )
    return frozenset(index for index in (*stated, *named) if index is not None)
