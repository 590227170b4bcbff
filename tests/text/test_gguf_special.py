"""Tokens of a GGUF vocabulary that end a text, by llama.cpp's rules."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.gguf_special import end_token_ids, special_id
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from kit.tokenizers import gguf_spec_of, real_spec, stories_gguf_metadata, tiny_tokenizer_spec


def ends_of(*tokens: str, **ids: int) -> set[str]:
    """The end tokens of a vocabulary of these tokens."""
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": list(tokens)}
    metadata |= {f"tokenizer.ggml.{role}_token_id": value for role, value in ids.items()}
    return {tokens[token_id] for token_id in end_token_ids(metadata)}


@pytest.mark.parametrize(
    ("tokens", "ids", "ends"),
    [
        pytest.param(
            "a <|im_end|> <|endoftext|>", {"eos": 1}, "<|im_end|> <|endoftext|>", id="qwen"
        ),
        pytest.param(
            "a <|eot_id|> <|eom_id|> x", {"eos": 3}, "<|eot_id|> <|eom_id|> x", id="llama"
        ),
        pytest.param("a b c d", {"eos": 1, "eot": 2, "eom": 3}, "b c d", id="named"),
        pytest.param("a b c d", {}, "", id="none"),
        pytest.param("<end_of_turn> <eos> b", {"eos": 1}, "<end_of_turn> <eos>", id="gemma"),
        pytest.param(
            "<｜end▁of▁sentence｜> [EOT] [EOS] <EOT> _<EOT> <|end_of_text|> [e~[",
            {},
            "<｜end▁of▁sentence｜> [EOT] [EOS] <EOT> _<EOT> <|end_of_text|> [e~[",
            id="others",
        ),
        pytest.param("<|end|> <|user|>", {}, "<|end|>", id="phi"),
        pytest.param(
            "<|end|> <|return|> <|call|>", {"eos": 1}, "<|return|> <|call|>", id="harmony"
        ),
        pytest.param("<|end|> <|return|>", {}, "<|end|> <|return|>", id="half of harmony"),
        pytest.param(
            "<|end|> <|return|> <|call|>", {"eos": 0}, "<|return|> <|call|>", id="harmony, named"
        ),
        pytest.param("<|end|> <|flush|> <|calls|>", {}, "<|flush|> <|calls|>", id="solar"),
        pytest.param("a </s>", {}, "</s>", id="sentencepiece"),
        pytest.param("</s> <|tool_response>", {}, "<|tool_response>", id="gemma 4"),
        pytest.param("</s> <|plamo:eos|>", {"eos": 1}, "<|plamo:eos|>", id="plamo"),
        pytest.param("</s> <|plamo:eos|>", {}, "</s>", id="plamo's token, not an end"),
        pytest.param(
            "<|fim_pad|> <|repo_name|> <|file_sep|> <|fim_prefix|> <|fim_middle|>",
            {},
            "<|fim_pad|> <|repo_name|> <|file_sep|>",
            id="between parts",
        ),
        pytest.param("[PAD] x <REPO>", {"fim_pad": 1}, "x <REPO>", id="between parts, named"),
        pytest.param("<fim_pad> <PAD>", {}, "<fim_pad> <PAD>", id="several of a role"),
    ],
)
def test_ends(tokens: str, ids: dict[str, int], ends: str) -> None:
    assert ends_of(*tokens.split(), **ids) == set(ends.split())


def test_without_a_vocabulary_the_named_ones_end() -> None:
    assert end_token_ids({"tokenizer.ggml.eos_token_id": 7}) == {7}
    assert end_token_ids({}) == frozenset()


@pytest.mark.parametrize("role", ["eos", "eot", "eom", "fim_sep"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "_token_id is 3, outside its vocabulary of 2 tokens"),
        (2**32 - 1, "outside its vocabulary"),
        ("1", "_token_id must be an integer, got '1'"),
        (True, "_token_id must be an integer, got True"),
    ],
)
def test_refuses_an_invalid_id(role: str, value: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=f"{role}{message}" if message[0] == "_" else message):
        ends_of("a", "b", **{role: value})


def test_list_of_ends() -> None:
    """As Ollama writes the list of generation_config.json."""
    metadata = {"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.eos_token_id": 0}
    assert end_token_ids(metadata | {"tokenizer.ggml.eos_token_ids": [0, 2]}) == {0, 2}
    with pytest.raises(TokenizerError, match="eos_token_ids is 3, outside its vocabulary"):
        end_token_ids(metadata | {"tokenizer.ggml.eos_token_ids": [0, 3]})


def test_defaults_of_sentencepiece() -> None:
    metadata = stories_gguf_metadata()
    for role in ("bos", "eos"):
        del metadata[f"tokenizer.ggml.{role}_token_id"]
    tokenizer = load_tokenizer(TokenizerSpec(gguf_metadata=metadata))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.end_token_ids == {2}
    assert tokenizer.encode("Once")[0] == 1
    assert special_id({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": []}, "eos") is None


def test_ends_of_real_vocabularies() -> None:
    smollm2 = load_tokenizer(gguf_spec_of(real_spec("smollm2"), "smollm", eos_token_id=2))
    assert texts(smollm2) == {"<|endoftext|>", "<|im_end|>", "<reponame>"}
    qwen3 = load_tokenizer(gguf_spec_of(real_spec("qwen3"), "qwen2", eos_token_id=151645))
    # llama.cpp also ends at </s>; BPE never makes this word, so Qwen does not generate it
    assert texts(qwen3) == {
        *("<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "</s>")
    }
    folder = load_tokenizer(real_spec("qwen3"))
    assert folder.end_token_ids == {folder.eos_token_id}


def texts(tokenizer: Tokenizer) -> set[str]:
    decode = tokenizer.decode
    return {decode([token_id], skip_special_tokens=False) for token_id in tokenizer.end_token_ids}


def test_an_end_of_a_turn_is_never_an_ordinary_word() -> None:
    """Some converters wrote it as one, so that a template's text was split into pieces."""
    for text, is_whole in (("<end_of_turn>", True), ("<|im_end|>", True), ("<an_other>", False)):
        metadata = gguf_spec_of(tiny_tokenizer_spec(), "gpt-2").gguf_metadata
        assert metadata is not None
        for key, more in (("tokens", text), ("token_type", 1)):
            metadata[f"tokenizer.ggml.{key}"] += [more]  # type: ignore[index]
        tokenizer = load_tokenizer(TokenizerSpec(gguf_metadata=metadata))
        assert (tokenizer.encode(f"a{text}") == [97, 261]) == is_whole
        assert (261 in tokenizer.special_token_ids) == is_whole
