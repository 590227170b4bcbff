"""Builds the tokenizer of a tokenizer.json, or of the ``tokenizer.ggml.*`` metadata of a GGUF file
as llama.cpp defines it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jaxinfer.core.checks import short
from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.encoding import is_failure
from jaxinfer.text.gguf_metadata import (
    TokenType,
    flag,
    listed,
    named_tokens,
    refuse_unknown_keys,
    required,
    token_types,
)
from jaxinfer.text.gguf_words import WORD_RULES
from jaxinfer.text.tokenizer_config import TokenizerSpec

_MAX_CHARACTERS = 1024  # of a token, of which all divisions are tried; Llama 2's have up to 48


def build_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Build the tokenizer that ``spec`` describes; raises ``TokenizerError`` if that fails."""
    if spec.gguf_metadata is not None:
        built = _of_gguf(spec.gguf_metadata)
    else:
        assert spec.tokenizer_json is not None, "checked by ``load_tokenizer``"
        try:
            built = Tokenizer.from_str(spec.tokenizer_json)
        except BaseException as error:
            if not is_failure(error):
                raise
            reason = short(str(error), 200)
            raise TokenizerError(f"tokenizer.json cannot be read: {reason}") from error
    # Some published files truncate or pad every text to a training length.
    built.no_truncation()
    built.no_padding()
    return built


def _of_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that ``metadata`` describes.

    Models "gpt2" (byte-level BPE), "llama" (sentencepiece BPE with scores) and "gemma4" (the same
    with merges). Raises ``TokenizerError`` for another model, an unknown pre-tokenizer, a missing
    key, and a key whose value is not supported.
    """
    model = required(metadata, "model")
    refuse_unknown_keys(metadata)
    tokens = listed(metadata, "tokens", str)
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    types = token_types(vocab, len(tokens), listed(metadata, "token_type", int))
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise TokenizerError(f"The GGUF metadata lists the token {short(twice)} twice.")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, vocab)
    elif model == "llama":
        merges = _merges_from_scores(vocab, _scores(metadata, vocab, types), types)
        tokenizer, add_bos = _sentencepiece(metadata, vocab, types, merges), True
    elif model == "gemma4":
        merges = [_pair(*merge.partition(" ")) for merge in listed(metadata, "merges", str)]
        tokenizer, add_bos = _sentencepiece(metadata, vocab, types, merges), True
    else:
        raise TokenizerError(
            f"The GGUF tokenizer model {short(model)} is not supported; gpt2, llama and gemma4 are."
        )
    _add_tokens(tokenizer, tokens, types, _symbols(metadata))
    _add_post_processor(tokenizer, metadata, named_tokens(metadata), add_bos)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = required(metadata, "pre")
    if not isinstance(name, str) or name not in WORD_RULES:
        # "default" is refused too: a converter writes it if it does not know the pre-tokenizer.
        raise TokenizerError(
            f"The GGUF pre-tokenizer {short(name)} is not supported (known: "
            f"{', '.join(WORD_RULES)}); use the model's tokenizer.json instead."
        )
    rules = WORD_RULES[name]
    merges = [_pair(*merge.partition(" ")) for merge in listed(metadata, "merges", str)]
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
    except BaseException as error:
        if not is_failure(error):
            raise
        reason = short(str(error), 200)
        raise TokenizerError(f"The GGUF vocabulary and merges do not fit: {reason}") from error


def _scores(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], types: Sequence[int]
) -> Sequence[float]:
    scores = listed(metadata, "scores", float)
    if len(scores) != len(types) or max(map(len, vocab)) > _MAX_CHARACTERS:
        raise TokenizerError(
            f"The GGUF metadata has {len(types)} tokens and {len(scores)} scores, or a token of "
            f"more than {_MAX_CHARACTERS} characters; the file is damaged."
        )
    return scores


def _sentencepiece(
    metadata: Mapping[str, Any],
    vocab: dict[str, int],
    types: Sequence[int],
    merges: Sequence[tuple[str, str]],
) -> Tokenizer:
    """A tokenizer whose tokens have "▁" for spaces, and bytes for characters that they lack."""
    unknown = next((token for token, n in vocab.items() if types[n] == TokenType.UNKNOWN), None)
    model = _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    space_prefix = flag(metadata, "add_space_prefix", required(metadata, "model") == "llama")
    spaces = normalizers.Replace(" ", "▁")
    if space_prefix and flag(metadata, "space_prefix_once", False):
        tokenizer.normalizer = spaces
        once = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = once
    elif space_prefix:
        own = _symbols(metadata)
        symbols = [token for token, token_id in vocab.items() if token_id in own]
        tokenizer.normalizer = normalizers.Sequence([spaces, _prefix(symbols)])
    else:
        tokenizer.normalizer = spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _symbols(metadata: Mapping[str, Any]) -> frozenset[int]:
    """The ids of sentencepiece's user-defined symbols; see ``model_files``."""
    name = "symbol_token_ids"
    is_there = f"tokenizer.ggml.{name}" in metadata
    return frozenset(listed(metadata, name, int) if is_there else ())


def _prefix(symbols: Sequence[str]) -> normalizers.Normalizer:
    """Puts "▁" before each text between tokens that are not of the model itself.

    The library normalises the texts of tokens that it looks for in normalised texts, too; those of
    the ``symbols`` have to stay.
    """
    if not symbols:
        return normalizers.Prepend("▁")
    either = "|".join(map(re.escape, symbols))
    return normalizers.Replace(Regex(rf"\A(?!(?:{either})\z)(?=[\s\S])"), "▁")


def _merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The pairs to merge, in order: sentencepiece joins the pair whose union scores highest."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        if types[token_id] != TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], symbols: Set[int]
) -> None:
    """Make control tokens special, and user-defined ones whole words that are not special. The
    ``symbols`` are those of a sentencepiece model, found once spaces are "▁".
    """

    def of(*kinds: TokenType) -> list[AddedToken]:
        wanted = {*map(int, kinds)}
        found = (token_id for token_id, kind in enumerate(types) if kind in wanted)
        return [AddedToken(tokens[one], normalized=one in symbols) for one in found]

    tokenizer.add_special_tokens(of(TokenType.CONTROL, TokenType.UNKNOWN))
    tokenizer.add_tokens(of(TokenType.USER_DEFINED))


def _add_post_processor(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str], add_bos: bool
) -> None:
    """Put bos before and eos after each text if the metadata says so."""
    added: dict[str, list[str]] = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        token = special.get(f"{name}_token")
        is_added = flag(metadata, f"add_{name}_token", default)
        if is_added and token is None:
            raise TokenizerError(
                f"The GGUF metadata adds a {name} token but has no tokenizer.ggml.{name}_token_id."
            )
        added[name] = [token] if is_added and token is not None else []
    around = {*added["bos"], *added["eos"]}
    if around:
        try:
            tokenizer.post_processor = TemplateProcessing(
                single=[*added["bos"], "$A", *added["eos"]],
                special_tokens=[(token, tokenizer.token_to_id(token)) for token in sorted(around)],
            )
        except (ValueError, TypeError) as error:  # a token with characters of the template's own
            raise TokenizerError(
                f"The GGUF metadata's tokens {short(sorted(around))} cannot be added to a text: "
                f"{short(str(error), 200)}; use the model's tokenizer.json instead."
            ) from error
