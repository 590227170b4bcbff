"""The bytes that one token adds to the text, by a rule read from the tokenizer's decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.core.checks import short
from jaxinfer.core.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_to_char() -> dict[int, str]:
    """GPT-2's printable character for each byte value, as in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(0x100 + n) for n, byte in enumerate(others)})
    return table


class Piece(NamedTuple):
    """The text of one token. ``data`` may end or begin inside a UTF-8 character."""

    data: bytes
    is_special: bool


class DecodeRule(NamedTuple):
    """A tokenizer's decoder, reduced to the parts that apply to single tokens."""

    byte_level: bool  # tokens are spelt in GPT-2's characters for bytes
    byte_fallback: bool  # ``<0x0A>`` stands for one byte
    replacements: tuple[tuple[str, str], ...]
    leading_spaces: int  # the maximum number of spaces dropped at the start of the whole text


def read_decoder(decoder: Mapping[str, Any] | None) -> DecodeRule:
    """Read the ``decoder`` entry of a tokenizer.json.

    Supported: ByteLevel, and sentencepiece's Sequence of Replace, ByteFallback, Fuse and Strip,
    which together cover every decoder-only language model we know of. Raises ``TokenizerError`` for
    any other.
    """
    if decoder is None:
        raise TokenizerError("The tokenizer has no decoder, so its tokens cannot become text.")
    listed = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(listed, list):
        raise TokenizerError("The tokenizer's decoder is a Sequence without a list of decoders.")
    steps: list[Any] = listed
    kinds = [step.get("type") if isinstance(step, Mapping) else None for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRule(True, False, (), 0)
    replacements: list[tuple[str, str]] = []
    leading_spaces = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if (
                "Fuse" in kinds
            ):
                leading_spaces = start
            case _:
                raise TokenizerError(
                    f"The tokenizer's decoder step {short(step)} is not supported; "
                    "ByteLevel and sentencepiece's Replace, ByteFallback, Fuse, Strip are."
                )
    return DecodeRule(False, "ByteFallback" in kinds, tuple(replacements), leading_spaces)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer, which is all that decoding needs."""

    size: int  # with added tokens
    special_ids: frozenset[int]
    rule: DecodeRule
    token_of: Callable[[int], str | None]
    id_of: Callable[[str], int | None]


def vocabulary_of(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    """The tokens of a built tokenizer; raises ``TokenizerError`` as ``read_decoder`` does."""
    decoder, added = tokenizer.decoder, tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        tokenizer.get_vocab_size(with_added_tokens=True),
        frozenset(token_id for token_id, token in added.items() if token.special),
        read_decoder(None if decoder is None else json.loads(decoder.__getstate__())),
        tokenizer.id_to_token,
        tokenizer.token_to_id,
    )


class PieceTable(dict[int, Piece]):
    """Token id -> ``Piece``, computed on first use and kept. An unknown id has empty text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.rule, self.special_ids = vocabulary.rule, vocabulary.special_ids
        self._token_of = vocabulary.token_of
        self._byte_of = {ord(char): byte for byte, char in byte_to_char().items()}
        self._byte_alphabet = frozenset(byte_to_char().values())

    def __missing__(self, token_id: int) -> Piece:
        piece = Piece(self.data_of(token_id), token_id in self.special_ids)
        self[token_id] = piece
        return piece

    def data_of(self, token_id: int) -> bytes:
        """The bytes of one token, which are not kept."""
        token = self._token_of(token_id) or ""
        byte = _BYTE_TOKEN.fullmatch(token) if self.rule.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else self._text_bytes(token)

    def _text_bytes(self, token: str) -> bytes:
        # A token with a character outside the byte alphabet is an added one, written literally.
        if self.rule.byte_level and self._byte_alphabet.issuperset(token):
            return token.translate(self._byte_of).encode("latin-1")
        for old, new in self.rule.replacements:
            token = token.replace(old, new)
        return token.encode()
