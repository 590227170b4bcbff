"""Token ids of real models against published vectors, and the refusals of load_tokenizer."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest

from jaxinfer.core.errors import RequestError, TokenizerError
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from kit.tokenizers import (
    TINY_BOS_ID,
    TINY_EOS_ID,
    TINY_VOCAB_SIZE,
    kitoken_inputs,
    read_vector,
    real_spec,
    tiny_tokenizer_json,
    tiny_tokenizer_spec,
    token_lines,
)


@cache
def real(name: str) -> Tokenizer:
    return load_tokenizer(real_spec(name))


def ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer.encode_batch(texts, add_special_tokens=False)


@pytest.mark.parametrize("name", ["small", "mixed"])
def test_gpt2_equals_kitoken_vectors(name: str) -> None:
    assert ids(real("gpt2"), kitoken_inputs(name)) == token_lines(f"{name}_tokens_gpt2.txt")


@pytest.mark.parametrize(("name", "vector"), [("gpt2", "gpt-2"), ("qwen3", "qwen2")])
def test_equals_llama_cpp_vectors(name: str, vector: str) -> None:
    inputs = read_vector(f"ggml-vocab-{vector}.gguf.inp").split("\n__ggml_vocab_test__\n")
    lines = read_vector(f"ggml-vocab-{vector}.gguf.out").split("\n")
    expected = [[int(word) for word in line.split()] for line in lines[: len(inputs)]]
    assert len(inputs) > 40
    assert ids(real(name), inputs) == expected


def test_smollm2_equals_vectors() -> None:
    inputs = [*kitoken_inputs("small", "mixed"), read_vector("utf8_input.txt")]
    assert ids(real("smollm2"), inputs) == token_lines("all_tokens_smollm2.txt")


@pytest.mark.parametrize("name", ["gpt2", "smollm2", "qwen3"])
def test_decode_inverts_encode(name: str) -> None:
    text = read_vector("utf8_input.txt")
    tokenizer = real(name)
    # Qwen normalises to NFC before it encodes, so the comparison starts from that form.
    text = tokenizer.decode(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_text_are_parsed_and_skipped() -> None:
    tokenizer = real("smollm2")
    token_ids = tokenizer.encode("<|im_start|>user\nHi 12<|im_end|>")
    assert token_ids[0] == tokenizer.bos_token_id == 1
    assert token_ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(token_ids) == "user\nHi 12"
    assert tokenizer.decode(token_ids, skip_special_tokens=False).startswith("<|im_start|>user")


def test_tiny_tokenizer() -> None:
    tokenizer = load_tokenizer(tiny_tokenizer_spec())
    assert tokenizer.vocab_size == TINY_VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (TINY_BOS_ID, TINY_EOS_ID)
    assert tokenizer.encode("aé<|eos|>") == [97, 0xC3, 0xA9, TINY_EOS_ID]
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert prompt == "<|bos|><|user|>hi<|eos|><|assistant|>"
    assert tokenizer.encode(prompt, add_special_tokens=False) == [256, 259, 104, 105, 257, 260]
    assert tokenizer.special_token_ids == frozenset(range(256, TINY_VOCAB_SIZE))


def test_token_piece_shows_text_and_marks_parts_of_characters() -> None:
    tokenizer = real("gpt2")
    assert [tokenizer.token_piece(i) for i in tokenizer.encode("Hello world")] == [
        "Hello",
        " world",
    ]
    parts = tokenizer.encode("🤗")
    assert len(parts) > 1
    assert tokenizer.token_piece(parts[0]).endswith("\ufffd")
    assert b"".join(map(tokenizer.token_bytes, parts)).decode() == "🤗"
    assert tokenizer.token_piece(50256) == "<|endoftext|>"


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    tokenizer = real("smollm2")  # a model's embedding may be padded beyond its vocabulary
    assert tokenizer.decode([19556, 49999]) == "Hello"
    assert tokenizer.token_piece(49999) == ""


def test_truncation_stored_in_the_file_is_not_applied() -> None:
    parsed = json.loads(tiny_tokenizer_json())
    parsed["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = load_tokenizer(TokenizerSpec(tokenizer_json=json.dumps(parsed)))
    assert len(tokenizer.encode("0123456789")) == 10


def test_an_unpaired_surrogate_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="surrogate pair at position 2"):
        real("gpt2").encode("ab\ud83d")


def with_decoder(decoder: object) -> TokenizerSpec:
    return TokenizerSpec(
        tokenizer_json=json.dumps({**json.loads(tiny_tokenizer_json()), "decoder": decoder})
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(TokenizerSpec(), "either a tokenizer.json or GGUF", id="nothing"),
        pytest.param(
            TokenizerSpec(tokenizer_json="{}", gguf_metadata={}), "either", id="both sources"
        ),
        pytest.param(TokenizerSpec(tokenizer_json="{"), "cannot be read", id="broken json"),
        pytest.param(
            dataclasses.replace(tiny_tokenizer_spec(), tokenizer_config={"eos_token": "</s>"}),
            "eos_token '</s>', which is not in the vocabulary",
            id="unknown eos",
        ),
        pytest.param(with_decoder(None), "no decoder", id="no decoder"),
        pytest.param(
            with_decoder({"type": "WordPiece", "prefix": "##", "cleanup": True}),
            "WordPiece.*not supported",
            id="unsupported decoder",
        ),
        pytest.param(
            TokenizerSpec(
                tokenizer_json=tiny_tokenizer_json(), tokenizer_config={"chat_template": 3}
            ),
            "must be a string or a list",
            id="template of a wrong type",
        ),
    ],
)
def test_load_refuses(spec: TokenizerSpec, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(spec)
