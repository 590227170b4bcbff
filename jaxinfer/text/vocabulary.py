"""The tokens of a model's files, read without building a tokenizer.

An engine whose server is another process decodes tokens and rarely encodes a text. To build a
tokenizer of 150,000 tokens takes 0.25 s with Python's lock, during which no step of a start begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.gguf_metadata import TokenType, flag, required, token_types
from jaxinfer.text.pieces import DecodeRule, Vocabulary, read_decoder
from jaxinfer.text.tokenizer_config import TokenizerSpec

_GGUF_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # a list: those of Unigram, with scores


class _Definition(msgspec.Struct):
    """The entries of a tokenizer.json that matter here; others are skipped."""

    model: _Model
    added_tokens: list[_Added] = []
    decoder: dict[str, Any] | None = None


def read_vocabulary(spec: TokenizerSpec) -> Vocabulary:
    """The tokens that ``spec`` describes; equals those of the built tokenizer.

    Raises ``TokenizerError`` for some of the definitions that cannot be built.
    """
    if spec.gguf_metadata is not None:
        return _from_gguf(spec.gguf_metadata)
    assert spec.tokenizer_json is not None, "checked by ``load_tokenizer``"
    try:
        definition = msgspec.json.decode(spec.tokenizer_json, type=_Definition)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
    ids, added = definition.model.vocab, definition.added_tokens
    if isinstance(ids, list):
        ids = {token: i for i, (token, _) in enumerate(ids)}
    ids |= {token.content: token.id for token in added}
    special_ids = frozenset(token.id for token in added if token.special)
    return _vocabulary(ids, special_ids, read_decoder(definition.decoder))


def _from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """The tokens of the tokenizer that ``build`` makes."""
    tokens: Sequence[str] = required(metadata, "tokens")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    types = token_types(ids, len(tokens), required(metadata, "token_type"))
    rule = DecodeRule(True, False, (), 0)
    if required(metadata, "model") == "llama":
        spaces = 1 if flag(metadata, "add_space_prefix", True) else 0
        rule = DecodeRule(False, True, (("▁", " "),), spaces)
    special_ids = frozenset(i for i, kind in enumerate(types) if kind in _GGUF_SPECIAL)
    return _vocabulary(ids, special_ids, rule)


def _vocabulary(ids: dict[str, int], special_ids: frozenset[int], rule: DecodeRule) -> Vocabulary:
    tokens = {token_id: token for token, token_id in ids.items()}
    return Vocabulary(len(ids), special_ids, rule, tokens.get, ids.get)
