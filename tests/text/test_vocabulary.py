"""A vocabulary that is read from a model's files equals that of the built tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import Unigram

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.build import build_tokenizer
from jaxinfer.text.pieces import PieceTable, vocabulary_of
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from jaxinfer.text.vocabulary import read_vocabulary
from kit.tokenizers import (
    gguf_spec_of,
    real_spec,
    stories_gguf_metadata,
    tiny_gguf_spec,
    tiny_tokenizer_spec,
)


def unigram_spec() -> TokenizerSpec:
    """A vocabulary with scores, and added tokens: a new one and one of the vocabulary."""
    made = Tokenizer(Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0), ("</s>", 0.0)], 0))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_special_tokens([AddedToken("</s>"), AddedToken("<new>")])
    made.add_tokens([AddedToken("word")])
    return TokenizerSpec(tokenizer_json=made.to_str())


def spec_with_keys_twice(*parts: tuple[str, str]) -> TokenizerSpec:
    """A tokenizer of a, b and c in which each text is replaced by another one."""
    added = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
    model = {"type": "BPE", "unk_token": None, "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}
    text = json.dumps(
        {
            "added_tokens": [{"id": 3, "content": "<s>", "normalized": False, **added}],
            "decoder": {"type": "ByteFallback"},
            "model": model,
        }
    )
    for old, new in parts:
        assert old in text
        text = text.replace(old, new)
    return TokenizerSpec(tokenizer_json=text)


KEYS_TWICE = {
    "a token": ('"b": 1', '"b": 1, "a": 3'),
    "vocab": ('"merges"', '"vocab": {"x": 0, "y": 1}, "merges"'),
    "model": ('"decoder"', '"model": {"type": "BPE", "vocab": {"x": 0}, "merges": []}, "decoder"'),
    "added tokens": ('"decoder"', '"added_tokens": [], "decoder"'),
    "decoder": ('"model"', '"decoder": {"type": "Fuse"}, "model"'),
}


def test_a_key_of_an_added_token_that_is_there_twice_is_refused() -> None:
    spec = spec_with_keys_twice(('"content"', '"content": "<t>", "content"'))
    with pytest.raises(TokenizerError, match="duplicate field `content`"):
        build_tokenizer(spec)


@pytest.mark.parametrize(
    "spec",
    [
        *(pytest.param(spec_with_keys_twice(KEYS_TWICE[name]), id=name) for name in KEYS_TWICE),
        pytest.param(real_spec("gpt2"), id="gpt2"),
        pytest.param(real_spec("smollm2"), id="smollm2"),
        pytest.param(real_spec("qwen3"), id="qwen3"),
        pytest.param(unigram_spec(), id="unigram"),
        pytest.param(gguf_spec_of(real_spec("qwen3"), "qwen2"), id="gguf"),
        pytest.param(tiny_gguf_spec("gpt-2", "<|im_end|>"), id="gguf_end_of_turn"),
        pytest.param(tiny_gguf_spec("gpt-2", "word", 4), id="gguf_user_defined"),
        pytest.param(TokenizerSpec(gguf_metadata=stories_gguf_metadata()), id="sentencepiece"),
        pytest.param(
            TokenizerSpec(gguf_metadata=stories_gguf_metadata(add_space_prefix=False)),
            id="no_space_prefix",
        ),
    ],
)
def test_it_equals_that_of_the_built_tokenizer(spec: TokenizerSpec) -> None:
    read, built = read_vocabulary(spec), vocabulary_of(build_tokenizer(spec))
    assert (read.size, read.special_ids, read.rule) == (built.size, built.special_ids, built.rule)
    ours, theirs = PieceTable(read), PieceTable(built)
    for token_id in range(built.size + 2):
        token = built.token_of(token_id)
        assert read.token_of(token_id) == token
        assert ours[token_id] == theirs[token_id]
        assert token is None or read.id_of(token) == token_id
    assert read.id_of("no such token") is None


@pytest.mark.parametrize("spec", [tiny_tokenizer_spec(), gguf_spec_of(real_spec("gpt2"), "gpt-2")])
def test_a_tokenizer_of_it_encodes_too(spec: TokenizerSpec) -> None:
    whole, reads = load_tokenizer(spec), load_tokenizer(spec, encodes=False)
    assert reads.end_token_ids == whole.end_token_ids
    assert reads.special_tokens_map == whole.special_tokens_map
    token_ids = whole.encode("Hello, world")
    assert reads.encode("Hello, world") == token_ids
    assert reads.decode(token_ids) == whole.decode(token_ids)


def test_decoding_does_not_import_the_library() -> None:
    definition = json.dumps(tiny_tokenizer_spec().tokenizer_json)
    program = (
        "import sys\n"
        "from jaxinfer.text.tokenizer import load_tokenizer\n"
        "from jaxinfer.text.tokenizer_config import TokenizerSpec\n"
        f"tokenizer = load_tokenizer(TokenizerSpec(tokenizer_json={definition}), encodes=False)\n"
        "assert tokenizer.detokenizer().push([72, 105])\n"
        "sys.exit('tokenizers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    "text",
    ["{}", "no JSON", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}, "decoder": null}'],
)
def test_refuses_what_is_no_tokenizer(text: str) -> None:
    with pytest.raises(TokenizerError, match="cannot be read|no decoder"):
        read_vocabulary(TokenizerSpec(tokenizer_json=text))
