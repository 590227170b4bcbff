"""A damaged or hostile tokenizer is one sentence, whether it is read, built or used."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.build import build_tokenizer
from jaxinfer.text.gguf_special import end_token_ids, special_id
from jaxinfer.text.pieces import read_decoder
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.text.tokenizer_config import NO_LENGTH, TokenizerSpec, chat_templates
from jaxinfer.text.vocabulary import read_vocabulary
from kit.tokenizers import stories_gguf_metadata, tiny_tokenizer_json

both_ways = pytest.mark.parametrize("encodes", [True, False])


def changed(**more: Any) -> TokenizerSpec:
    """The tiny tokenizer with other entries of its tokenizer.json."""
    return TokenizerSpec(tokenizer_json=json.dumps(json.loads(tiny_tokenizer_json()) | more))


def with_config(**config: Any) -> TokenizerSpec:
    return TokenizerSpec(tokenizer_json=tiny_tokenizer_json(), tokenizer_config=config)


@both_ways
@pytest.mark.parametrize("depth", [200, 5_000, 100_000])
@pytest.mark.parametrize("where", ['{"model": ', '{"decoder": ', '{"other": '])
def test_nested_values(encodes: bool, depth: int, where: str) -> None:
    text = where + "[" * depth + "]" * depth + ', "model": {"vocab": {"a": 0}}}'
    with pytest.raises(TokenizerError):
        load_tokenizer(TokenizerSpec(tokenizer_json=text), encodes=encodes)


@pytest.mark.parametrize(
    "value", ["abc", float("inf"), float("nan"), -1, 0, True, [512], {"a": 1}, "512", 10**400]
)
def test_a_length_that_is_none(value: Any) -> None:
    with pytest.raises(TokenizerError, match="model_max_length of tokenizer_config.json is .*; it"):
        load_tokenizer(with_config(model_max_length=value))


@pytest.mark.parametrize(
    ("value", "length"), [(512, 512), (1e30, NO_LENGTH), (NO_LENGTH, NO_LENGTH), (None, NO_LENGTH)]
)
def test_a_length(value: Any, length: int) -> None:
    assert load_tokenizer(with_config(model_max_length=value)).model_max_length == length


@pytest.mark.parametrize("template", [3, [3], [{"name": "a"}], [{"name": [], "template": "x"}]])
def test_templates_that_are_no_texts(template: Any) -> None:
    with pytest.raises(TokenizerError, match="chat_template must be a string or a list"):
        chat_templates(with_config(chat_template=template))


@pytest.mark.parametrize(
    "decoder",
    [
        {},
        {"type": "Sequence"},
        {"type": "Sequence", "decoders": 3},
        {"type": "Sequence", "decoders": [3]},
        {"type": ["ByteLevel"]},
        {"type": "Replace", "pattern": {"String": 3}, "content": " "},
        {"type": "Replace", "pattern": {"String": "a"}, "content": None},
        {"type": "Strip", "content": " ", "start": "1", "stop": 0},
    ],
)
def test_a_decoder_of_another_form(decoder: Any) -> None:
    with pytest.raises(TokenizerError, match="decoder"):
        read_decoder(decoder)


@pytest.mark.parametrize("number", [-1, 2**32, 1.5, "1", True, None])
@both_ways
def test_ids_that_are_none(encodes: bool, number: Any) -> None:
    content = json.loads(tiny_tokenizer_json())
    content["added_tokens"][0]["id"] = number
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(changed(added_tokens=content["added_tokens"]), encodes=encodes)
    vocab = content["model"]["vocab"] | {"a": number}
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(changed(model=content["model"] | {"vocab": vocab}), encodes=encodes)


def test_added_tokens_have_the_ids_that_the_library_gives_them() -> None:
    """It does not use those of the file, which may be anything."""
    draw = random.Random(0)
    names = ["a", "b", "c", "x", "y", "z", ""]
    for _ in range(300):
        vocab = {name: 2 * i if draw.random() < 0.1 else i for i, name in enumerate(names[:3])}
        base = json.loads(Tokenizer(WordLevel(vocab=vocab, unk_token="a")).to_str())
        added = [
            {"id": draw.choice([0, 1, 5, 2**31]), "content": draw.choice(names)}
            | {"special": draw.random() < 0.5, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False}
            for _ in range(draw.randrange(6))
        ]
        base |= {"added_tokens": added, "decoder": {"type": "ByteLevel"}}
        base["decoder"] |= {"add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        spec = TokenizerSpec(tokenizer_json=json.dumps(base))
        built, read = build_tokenizer(spec), read_vocabulary(spec)
        ids = built.get_vocab(with_added_tokens=True)
        assert {name: read.id_of(name) for name in ids} == ids
        assert read.size == built.get_vocab_size()
        special = {i for i, token in built.get_added_tokens_decoder().items() if token.special}
        assert read.special_ids == special


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a|aa)+$"])
def test_a_pattern_that_backtracks_without_end_fails_its_text_alone(
    pattern: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library panics, which is no ``Exception``."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    spec = changed(pre_tokenizer={**split, "invert": False})
    tokenizer, text = load_tokenizer(spec), "a" * 60 + "b"
    for call in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_batch(["b", text]),
        lambda: tokenizer.encode_with_offsets(text),
        lambda: tokenizer.tokenize(text),
        lambda: tokenizer(text, truncation=True, max_length=3),
    ):
        with pytest.raises(TokenizerError, match="tokenizer fails on this text .*; use another"):
            call()
    assert tokenizer.encode("b") == [98]
    capfd.readouterr()  # what the library prints


@pytest.mark.parametrize("pattern", ["((", "[", "(?<a", "\\"])
def test_a_pattern_that_is_none(pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read: "):
        load_tokenizer(changed(pre_tokenizer={**split, "invert": False}))


def test_a_token_that_the_library_lacks_later() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    tokenizer = load_tokenizer(changed(model=model, added_tokens=[]))
    with pytest.raises(TokenizerError, match="tokenizer fails on this text"):
        tokenizer.encode("xyz")


# GGUF

WRONG = (3, "x", True, 1.5, ["x"], [3], [1.5], [True], [[1]], [], 2**63)


def load_gguf(metadata: dict[str, Any], encodes: bool) -> None:
    load_tokenizer(TokenizerSpec(gguf_metadata=metadata), encodes=encodes)
    special_id(metadata, "bos")
    end_token_ids(metadata)


@both_ways
@pytest.mark.parametrize("key", [*stories_gguf_metadata(), "tokenizer.ggml.eos_token_ids"])
def test_metadata_of_another_type(key: str, encodes: bool) -> None:
    """A value is refused, or not used; to read a vocabulary takes no scores."""
    whole, refused = stories_gguf_metadata(), 0
    load_gguf(whole, encodes)
    for value in WRONG:
        try:
            load_gguf(whole | {key: value}, encodes)
        except TokenizerError as error:
            assert len(str(error)) < 500
            refused += 1
    assert refused >= (5 if encodes else 0)


@pytest.mark.parametrize("key", ["tokens", "scores", "token_type"])
def test_lists_of_different_lengths(key: str) -> None:
    metadata = stories_gguf_metadata()
    name = f"tokenizer.ggml.{key}"
    for value in (metadata[name][:-1], metadata[name] + metadata[name][-1:]):
        with pytest.raises(TokenizerError):
            load_gguf(metadata | {name: value}, True)


def test_a_token_without_end() -> None:
    metadata = stories_gguf_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"]]
    tokens[300] = "a" * 2_000_000
    with pytest.raises(TokenizerError, match="a token of more than 1024 characters; the file is"):
        load_gguf(metadata | {"tokenizer.ggml.tokens": tokens}, True)
