"""Vocabularies in files of other libraries, as the ``tokenizer.ggml.*`` metadata of a GGUF file.

``tokenizer.model`` is a message of protocol buffers (src/sentencepiece_model.proto of
sentencepiece), ``tiktoken.model`` has a line for each token: its bytes in base 64, and its rank.
What else a tokenizer needs is in tokenizer_config.json: further tokens, and those around a text.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.gguf_metadata import TokenType
from jaxinfer.text.pieces import byte_to_char

BPE = 2  # sentencepiece's number of that kind of model
KIMI_CLASS = "TikTokenTokenizer"  # of tokenizer_config.json, for tokenization_kimi.py
KIMI_SPECIAL = 256  # ids for special tokens, after those of the file
_MAX_TOKENS = 1 << 21  # the largest vocabularies have 262,144
_RANKED = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a line of tiktoken's
_EDGES = ("lstrip", "rstrip", "single_word")
_REMEDY = "save the model's tokenizer.json with transformers, or name a GGUF file by tokenizer="


def sentencepiece_metadata(data: bytes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a ``tokenizer.model`` and its tokenizer_config.json.

    Raises ``TokenizerError`` for a damaged file, a model that is not BPE, and a normalisation of
    texts.
    """
    if _RANKED.match(data):
        raise TokenizerError(
            "tokenizer.model has the ranks of tiktoken, as of Llama 3 and GLM-4, whose words are "
            f"unknown here; {_REMEDY}"
        )
    try:
        fields = [*_fields(data)]
        pieces = [dict(_fields(value)) for number, value in fields if number == 1]
        trainer, normalizer = (
            dict(_fields(next((value for number, value in fields if number == which), b"")))
            for which in (2, 3)
        )
        tokens = [piece[1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    except (LookupError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise TokenizerError(f"tokenizer.model is damaged ({error}); download it again") from error
    if (kind := trainer.get(3, 1)) != BPE:
        raise TokenizerError(f"tokenizer.model is of kind {kind}, only BPE (2) is read; {_REMEDY}")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise TokenizerError(
            f"tokenizer.model changes texts by {normalizer.get(1, b'').decode()!r} or removes "
            f"extra spaces, which is not supported; {_REMEDY}"
        )
    types = [piece.get(3, TokenType.NORMAL) for piece in pieces]
    symbols = {n for n, kind in enumerate(types) if kind == TokenType.USER_DEFINED}
    prefix = config.get("add_prefix_space")  # may be null
    ids = {role: trainer.get(40 + n, n) for n, role in enumerate(("unknown", "bos", "eos"))}
    made = {
        "model": "llama",
        "scores": scores,
        "add_space_prefix": bool(normalizer.get(3, 1) if prefix is None else prefix),
        # transformers' "legacy" Llama puts a space behind each added token, too
        "space_prefix_once": config.get("legacy") is False,
        **{f"{role}_token_id": number for role, number in ids.items() if number < len(tokens)},
    }
    symbols -= _add_tokens(tokens, types, config)
    made["symbol_token_ids"] = sorted(symbols)
    scores += [0.0] * (len(tokens) - len(scores))
    return _metadata(made, tokens, types, config, add_bos=True)


def tiktoken_metadata(data: bytes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of Kimi's ``tiktoken.model`` and its tokenizer_config.json.

    Raises ``TokenizerError`` for a damaged file, and another model's, whose words are unknown.
    """
    if (name := config.get("tokenizer_class")) != KIMI_CLASS:
        raise TokenizerError(
            f"tiktoken.model is read for Kimi's {KIMI_CLASS}, and tokenizer_config.json has "
            f"tokenizer_class {short(name)}; {_REMEDY}"
        )
    try:
        ranks = {b64decode(key): int(rank) for key, rank in map(bytes.split, data.splitlines())}
    except ValueError as error:
        raise TokenizerError(f"tiktoken.model is damaged ({error}); download it again") from error
    if [*ranks.values()] != [*range(len(ranks))]:
        raise TokenizerError("tiktoken.model has ranks that do not ascend; download it again")
    alphabet = [byte_to_char()[byte] for byte in range(256)]
    tokens = ["".join([alphabet[byte] for byte in key]) for key in ranks]
    merges = [
        f"{left} {right}" for left, right in _pairs(dict(zip(tokens, ranks.values(), strict=True)))
    ]
    types = [int(TokenType.NORMAL)] * len(tokens)
    _add_tokens(tokens, types, config, len(tokens) + KIMI_SPECIAL)
    made = {"model": "gpt2", "pre": "kimi-k2", "merges": merges}
    return _metadata(made, tokens, types, config, add_bos=False)


def _pairs(ranks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens whose union is one, by its rank: tiktoken joins any of them."""
    for token in ranks:
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        cuts = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(cuts, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def with_added_tokens(
    config: Mapping[str, Any], special_map: Mapping[str, Any], added: Mapping[str, Any]
) -> Mapping[str, Any]:
    """tokenizer_config.json with special_tokens_map.json and added_tokens.json, in which older
    folders have the tokens that now are in its ``added_tokens_decoder``.
    """
    if "added_tokens_decoder" in config:
        return config
    found = {**config, **special_map}
    entries = [value for key, value in found.items() if key.endswith("_token")]
    entries += found.get("additional_special_tokens") or ()
    special = [entry.get("content") if isinstance(entry, Mapping) else entry for entry in entries]
    decoder = {key: {"content": token, "special": token in special} for token, key in added.items()}
    return {**found, "added_tokens_decoder": decoder}


def _add_tokens(
    tokens: list[str], types: list[int], config: Mapping[str, Any], size: int = 0
) -> set[int]:
    """Add the tokens of ``added_tokens_decoder``, and reserved ones up to the size; returns the ids
    of the former.
    """
    added = config.get("added_tokens_decoder") or {}
    try:
        entries = {int(key): (entry["content"], entry) for key, entry in added.items()}
        if wrong := [number for number in entries if not 0 <= number < _MAX_TOKENS]:
            raise ValueError(f"the id {wrong[0]}")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TokenizerError(
            "added_tokens_decoder of tokenizer_config.json, or added_tokens.json, is unusable "
            f"({error}); download it again"
        ) from error
    for number in range(len(tokens), max([size, *(key + 1 for key in entries)])):
        tokens.append(f"<|reserved_token_{number}|>")
        types.append(TokenType.CONTROL)
    for number, (content, entry) in entries.items():
        if any(entry.get(edge) for edge in _EDGES):
            raise TokenizerError(
                f"the token {short(content)} of tokenizer_config.json has one of "
                f"{', '.join(_EDGES)}, which is not supported; {_REMEDY}"
            )
        tokens[number] = content
        if types[number] != TokenType.UNKNOWN:
            types[number] = TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED
    return {*entries}


def _metadata(
    made: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    config: Mapping[str, Any],
    *,
    add_bos: bool,
) -> dict[str, Any]:
    found = {**made, "tokens": tokens, "token_type": [int(kind) for kind in types]}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        entry = config.get(f"{name}_token")
        content = entry.get("content") if isinstance(entry, Mapping) else entry
        if content in tokens:
            found[f"{role}_token_id"] = tokens.index(content)
    found["add_bos_token"] = bool(config.get("add_bos_token", add_bos))
    found["add_eos_token"] = bool(config.get("add_eos_token", False))
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message of protocol buffers: numbers, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        match key & 7:
            case 0:
                value, position = _varint(data, position)
            case 2:
                size, position = _varint(data, position)
                value, position = data[position : position + size], position + size
            case 5:
                value, position = data[position : position + 4], position + 4
            case 1:
                value, position = data[position : position + 8], position + 8
            case kind:
                raise ValueError(f"a field of kind {kind}")
        if position > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
