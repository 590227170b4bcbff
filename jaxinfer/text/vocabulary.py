"""The tokens of a model's files, read without building a tokenizer.

An engine whose server is another process decodes tokens and rarely encodes a text. To build a
tokenizer of 150,000 tokens takes 0.25 s with Python's lock, during which no step of a start begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.gguf_metadata import TokenType, flag, listed, required, token_types
from jaxinfer.text.pieces import DecodeRule, Vocabulary, read_decoder
from jaxinfer.text.tokenizer_config import TokenizerSpec

_GGUF_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


type _Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]  # the library's type of ids


class _Added(msgspec.Struct):
    id: _Id
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, _Id] | list[tuple[str, float]]  # a list: those of Unigram, with scores


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
    except RecursionError as error:
        raise TokenizerError(
            "tokenizer.json cannot be read: its values are nested too deep; download it again"
        ) from error
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
    ids = definition.model.vocab
    if isinstance(ids, list):
        ids = {token: i for i, (token, _) in enumerate(ids)}
    ids, special_ids = _with_added(ids, definition.added_tokens)
    return _vocabulary(ids, special_ids, read_decoder(definition.decoder))


def _with_added(
    ids: Mapping[str, int], added: Sequence[_Added]
) -> tuple[dict[str, int], frozenset[int]]:
    """The ids with those of added tokens, and the ids of special ones.

    As in the library, an id in the file is not used: a token that the model has not is given the
    next one after the model's.
    """
    size, new, special = len(ids), dict[str, int](), dict[int, bool]()
    for token in added:
        if not token.content:
            continue
        if token.content not in ids:
            new.setdefault(token.content, size + len(new))
        special[new.get(token.content, ids.get(token.content, 0))] = token.special
    return {**ids, **new}, frozenset(number for number, is_one in special.items() if is_one)


def _from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """The tokens of the tokenizer that ``build`` makes."""
    tokens = listed(metadata, "tokens", str)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    types = token_types(ids, len(tokens), listed(metadata, "token_type", int))
    rule = DecodeRule(True, False, (), 0)
    if (model := required(metadata, "model")) in ("llama", "gemma4"):
        spaces = 1 if flag(metadata, "add_space_prefix", model == "llama") else 0
        rule = DecodeRule(False, True, (("▁", " "),), spaces)
    special_ids = frozenset(i for i, kind in enumerate(types) if kind in _GGUF_SPECIAL)
    return _vocabulary(ids, special_ids, rule)


def _vocabulary(ids: dict[str, int], special_ids: frozenset[int], rule: DecodeRule) -> Vocabulary:
    tokens = {token_id: token for token, token_id in ids.items()}
    return Vocabulary(len(ids), special_ids, rule, tokens.get, ids.get)
