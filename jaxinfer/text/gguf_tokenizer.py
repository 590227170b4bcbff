"""A tokenizer from the ``tokenizer.ggml.*`` metadata of a GGUF file, as llama.cpp defines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.gguf_special import TURN_ENDS, end_token_ids, special_id
from jaxinfer.text.gguf_words import WORD_RULES


class _TokenType(IntEnum):
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


class GGUFTokenizer(NamedTuple):
    """A built tokenizer and the special tokens that the metadata names."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # template variable ("bos_token", ...) -> token
    end_token_ids: frozenset[int]  # every token that ends a text


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Build the tokenizer that ``metadata`` describes.

    Models "gpt2" (byte-level BPE) and "llama" (sentencepiece BPE with scores). Raises
    ``TokenizerError`` for another model, an unknown pre-tokenizer, a missing key, and a key whose
    value is not supported.
    """
    model = _required(metadata, "model")
    _refuse_unknown_keys(metadata)
    tokens: list[str] = list(_required(metadata, "tokens"))
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    types = _token_types(vocab, len(tokens), _required(metadata, "token_type"))
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise TokenizerError(f"The GGUF metadata lists the token {twice!r} twice.")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, vocab)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, vocab, types), True
    else:
        raise TokenizerError(
            f"The GGUF tokenizer model {model!r} is not supported; gpt2 and llama are."
        )
    _add_tokens(tokenizer, tokens, types)
    special_tokens = _special_tokens(metadata, tokens)
    _add_post_processor(tokenizer, metadata, special_tokens, add_bos)
    return GGUFTokenizer(tokenizer, special_tokens, end_token_ids(metadata))


def _refuse_unknown_keys(metadata: Mapping[str, Any]) -> None:
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
            f"The GGUF metadata key {key} is {repr(value)[:40]}, and {known}; name a folder with "
            "the model's tokenizer.json by tokenizer=."
        )


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise TokenizerError(
            f"The GGUF metadata key tokenizer.ggml.{name} must be true or false, "
            f"got {repr(value)[:40]}; convert the model again."
        )
    return value


def _token_types(vocab: Mapping[str, int], num_tokens: int, stored: Sequence[Any]) -> list[int]:
    """The stored types, except that a token of ``TURN_ENDS`` is never an ordinary word."""
    if len(stored) != num_tokens:
        raise TokenizerError(
            f"The GGUF metadata has {num_tokens} tokens but {len(stored)} token types; "
            "the file is damaged."
        )
    types = [*map(int, stored)]
    for token_id in (vocab[token] for token in TURN_ENDS if token in vocab):
        if types[token_id] == _TokenType.NORMAL:
            types[token_id] = _TokenType.CONTROL
    return types


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{key}"]
    except KeyError:
        raise TokenizerError(
            f"The GGUF metadata has no tokenizer.ggml.{key}; "
            "convert the model again with a current llama.cpp."
        ) from None


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = _required(metadata, "pre")
    if name not in WORD_RULES:
        # "default" is refused too: a converter writes it if it does not know the pre-tokenizer.
        raise TokenizerError(
            f"The GGUF pre-tokenizer {name!r} is not supported (known: {', '.join(WORD_RULES)}); "
            "use the model's tokenizer.json instead."
        )
    rules = WORD_RULES[name]
    merges = [_pair(*merge.partition(" ")) for merge in _required(metadata, "merges")]
    tokenizer = Tokenizer(_bpe(vocab, merges, ignore_merges=rules.whole_words))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rules.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _pair(left: str, _: str, right: str) -> tuple[str, str]:
    return left, right


def _bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocab, merges=list(merges), **options)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"The GGUF vocabulary and merges do not fit: {error}") from error


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int]
) -> Tokenizer:
    scores = [float(score) for score in _required(metadata, "scores")]
    unknown = next((token for token, n in vocab.items() if types[n] == _TokenType.UNKNOWN), None)
    merges = _merges_from_scores(vocab, scores, types)
    model = _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    space_prefix = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if space_prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The pairs to merge, in order: sentencepiece joins the pair whose union scores highest."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        if types[token_id] != _TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make control tokens special, and user-defined ones whole words that are not special."""

    def of(*kinds: _TokenType) -> list[AddedToken]:
        wanted = {*map(int, kinds)}
        listed = (token for token, kind in zip(tokens, types, strict=True) if kind in wanted)
        return [AddedToken(token, normalized=False) for token in listed]

    tokenizer.add_special_tokens(of(_TokenType.CONTROL, _TokenType.UNKNOWN))
    tokenizer.add_tokens(of(_TokenType.USER_DEFINED))


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {name: special_id(metadata, role) for role, name in named.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}


def _add_post_processor(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str], add_bos: bool
) -> None:
    """Put bos before and eos after each text if the metadata says so."""
    added: dict[str, list[str]] = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        token = special.get(f"{name}_token")
        is_added = _flag(metadata, f"add_{name}_token", default)
        if is_added and token is None:
            raise TokenizerError(
                f"The GGUF metadata adds a {name} token but has no tokenizer.ggml.{name}_token_id."
            )
        added[name] = [token] if is_added and token is not None else []
    around = {*added["bos"], *added["eos"]}
    if around:
        tokenizer.post_processor = TemplateProcessing(
            single=[*added["bos"], "$A", *added["eos"]],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in sorted(around)],
        )
