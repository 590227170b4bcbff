"""The ``tokenizer.ggml.*`` metadata of a GGUF file: known keys, types of tokens, special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.gguf_special import TURN_ENDS, special_id


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Keys below ``tokenizer.ggml.`` that are read, here or in ``gguf_special``.
_READ_KEYS = frozenset(
    {"model", "pre", "tokens", "token_type", "scores", "merges"}
    | {"add_bos_token", "add_eos_token", "add_space_prefix"}
    | {f"{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    | {f"fim_{role}_token_id" for role in ("pad", "rep", "sep")}
    | {"eos_token_ids"}
    | {"space_prefix_once", "symbol_token_ids"}  # of ``model_files`` alone
)
# Roles that are not used here (the format has both spellings of the separator's), and those of a
# fill-in-the-middle prompt with their older names.
_UNUSED_ROLES = ("seperator", "separator", "cls", "mask")
_FILL_IN_ROLES = ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")
_KEYS_WITHOUT_EFFECT = frozenset(
    {f"{role}_token_id" for role in (*_UNUSED_ROLES, *_FILL_IN_ROLES)}
    | {f"{role}_token_ids" for role in (*_UNUSED_ROLES, "bos", "unknown", "padding")}
    | {"token_type_count", "added_tokens"}
)
# Keys of other tokenizers, and the one value with which they do not change this one.
_REQUIRED_VALUES: Mapping[str, Any] = MappingProxyType(
    {f"add_{role}_token": False for role in (*_UNUSED_ROLES, "sep", "unknown", "padding")}
    | {
        "remove_extra_whitespaces": False,
        "normalizer.lowercase": False,
        "normalizer.strip_accents": False,
        "precompiled_charsmap": [],
        "suppress_tokens": [],
    }
)


def refuse_unknown_keys(metadata: Mapping[str, Any]) -> None:
    """Raise ``TokenizerError`` for keys that might change token ids and are not implemented."""
    prefix = "tokenizer.ggml."
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _READ_KEYS | _KEYS_WITHOUT_EFFECT:
            continue
        known = "it is unknown"
        if name in _REQUIRED_VALUES:
            if value == _REQUIRED_VALUES[name]:
                continue
            known = f"only {_REQUIRED_VALUES[name]!r} is supported"
        raise TokenizerError(
            f"The GGUF metadata key {key} is {short(value)}, and {known}; name a folder with "
            "the model's tokenizer.json by tokenizer=."
        )


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """A value that must be true or false, else ``TokenizerError``."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise TokenizerError(
            f"The GGUF metadata key tokenizer.ggml.{name} must be true or false, "
            f"got {short(value)}; convert the model again."
        )
    return value


def listed[T](metadata: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    """A list of values of one type that must be there, else ``TokenizerError``."""
    value = required(metadata, key)
    if not isinstance(value, list) or not all(type(one) is kind for one in value):
        raise TokenizerError(
            f"The GGUF metadata key tokenizer.ggml.{key} must be a list of {kind.__name__}, got "
            f"{short(value)}; the file is damaged."
        )
    return value


def token_types(vocab: Mapping[str, int], num_tokens: int, stored: Sequence[int]) -> list[int]:
    """The stored types, except that a token of ``TURN_ENDS`` is never an ordinary word.

    Raises ``TokenizerError`` if there are not as many as tokens.
    """
    if len(stored) != num_tokens:
        raise TokenizerError(
            f"The GGUF metadata has {num_tokens} tokens but {len(stored)} token types; "
            "the file is damaged."
        )
    types = [*stored]
    for token_id in (vocab[token] for token in TURN_ENDS if token in vocab):
        if types[token_id] == TokenType.NORMAL:
            types[token_id] = TokenType.CONTROL
    return types


def required(metadata: Mapping[str, Any], key: str) -> Any:
    """The value of a key that must be there, else ``TokenizerError``."""
    try:
        return metadata[f"tokenizer.ggml.{key}"]
    except KeyError:
        raise TokenizerError(
            f"The GGUF metadata has no tokenizer.ggml.{key}; "
            "convert the model again with a current llama.cpp."
        ) from None


def named_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens with a role, by the template's variable: ``{"bos_token": "<s>", ...}``.

    Raises ``TokenizerError`` as ``special_id`` does.
    """
    tokens = listed(metadata, "tokens", str)
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {name: special_id(metadata, role) for role, name in named.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
