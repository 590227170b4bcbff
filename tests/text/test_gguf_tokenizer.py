"""Tokenizers built from GGUF metadata equal the models' own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from jaxinfer.weights.tokenizer_files import spec_from_path
from kit.tokenizers import (
    gguf_spec_of,
    kitoken_inputs,
    read_vector,
    real_spec,
    stories_gguf_metadata,
    tiny_gguf_spec,
    tiny_tokenizer_spec,
    token_lines,
)

INPUTS = [
    *kitoken_inputs("small", "mixed"),
    read_vector("utf8_input.txt"),
    "<|im_start|>user\nTell me 3 facts.<|im_end|>\n<|im_start|>assistant\n<think>\n</think>",
    "<|endoftext|>x<|endoftext|>",
]


@pytest.mark.parametrize(
    ("name", "pre"), [("gpt2", "gpt-2"), ("smollm2", "smollm"), ("qwen3", "qwen2")]
)
def test_gguf_equals_tokenizer_json(name: str, pre: str) -> None:
    spec = real_spec(name)
    ours, theirs = load_tokenizer(gguf_spec_of(spec, pre)), load_tokenizer(spec)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.special_token_ids == theirs.special_token_ids
    for text in INPUTS:
        token_ids = theirs.encode(text)
        assert ours.encode(text) == token_ids
        assert ours.decode(token_ids) == theirs.decode(token_ids)


def test_smollm_pre_tokenizer_equals_vectors() -> None:
    tokenizer = load_tokenizer(gguf_spec_of(real_spec("smollm2"), "smollm"))
    assert tokenizer.encode_batch(INPUTS[:141]) == token_lines("all_tokens_smollm2.txt")


def stories(**more: Any) -> Tokenizer:
    return load_tokenizer(TokenizerSpec(gguf_metadata=stories_gguf_metadata(**more)))


def sentencepiece_encode(metadata: dict[str, Any], text: str) -> list[int]:
    """Sentencepiece's BPE from its definition: join the best-scored pair, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [
            (scores[vocab[left + right]], -at)
            for at, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
            if left + right in vocab
        ]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        if part in vocab:
            ids.append(vocab[part])
        else:
            ids += [vocab[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


def test_sentencepiece_equals_its_definition() -> None:
    metadata = stories_gguf_metadata()
    tokenizer = stories()
    draw = random.Random(0)
    words = ["Once", "upon", "a", "time,", "Lily.", "12", "é", "中🤗", "aaaa", "", "\n", "Mom's"]
    texts = [" ".join(draw.choices(words, k=draw.randrange(12))) for _ in range(300)]
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert token_ids == sentencepiece_encode(metadata, text)
        assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        pytest.param({}, [1, 403, 407, 261, 378], id="bos by default"),
        pytest.param({"add_bos_token": False}, [403, 407, 261, 378], id="no bos"),
        pytest.param({"add_eos_token": True}, [1, 403, 407, 261, 378, 2], id="bos and eos"),
        pytest.param(
            {"add_bos_token": False, "add_eos_token": True}, [403, 407, 261, 378, 2], id="eos"
        ),
    ],
)
def test_bos_and_eos_follow_the_metadata(more: dict[str, Any], ids: list[int]) -> None:
    tokenizer = stories(**more)
    assert tokenizer.encode("Once upon a time") == ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.decode(ids) == "Once upon a time"


def test_space_prefix_follows_the_metadata() -> None:
    tokenizer = stories(add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    assert tokenizer.encode("a") == [1, tokenizer.encode("ba")[-1]]  # no space before it


def tiny_with(token: str, token_type: int) -> Tokenizer:
    """The tiny tokenizer with one more token, of id 261, which no merge produces."""
    return load_tokenizer(tiny_gguf_spec("gpt-2", token, token_type))


@pytest.mark.parametrize("token", ["<think>", "<｜a ok｜>"])
@pytest.mark.parametrize(("token_type", "is_special"), [(3, True), (4, False)])
def test_added_tokens_are_whole(token: str, token_type: int, is_special: bool) -> None:
    tokenizer = tiny_with(token, token_type)
    assert tokenizer.encode(f"a{token}") == [97, 261]
    assert (261 in tokenizer.special_token_ids) == is_special
    assert tokenizer.decode([97, 261]) == ("a" if is_special else f"a{token}")
    assert tokenizer.detokenizer((), False).push([97, 261]) == f"a{token}"


def test_sentencepiece_joins_by_score_not_by_id() -> None:
    scores = {"<unk>": 0.0, "a": -3.0, "b": -3.0, "c": -3.0, "ab": -2.0, "bc": -1.0}
    metadata = stories_gguf_metadata(
        tokens=list(scores),
        scores=list(scores.values()),
        token_type=[2, 1, 1, 1, 1, 1],
        bos_token_id=0,
        eos_token_id=0,
        add_bos_token=False,
        add_space_prefix=False,
    )
    assert load_tokenizer(TokenizerSpec(gguf_metadata=metadata)).encode("abc") == [1, 5]


# Gemma's tokenizer.json, but for the vocabulary.
GEMMA = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
}


def test_gemma_joins_by_the_listed_merges() -> None:
    """As the library does with a tokenizer.json; scores have no part in it."""
    words = ["<unk>", "▁", "a", "b", "c", "ab", "bc", "▁a", "▁▁"]
    tokens = [*words, *(f"<0x{i:02X}>" for i in range(256))]
    merges = ["b c", "▁ ▁", "▁ a", "a b"]
    metadata = stories_gguf_metadata(
        model="gemma4",
        tokens=tokens,
        scores=[0.0] * len(tokens),
        merges=merges,
        token_type=[2, *[1] * (len(words) - 1), *[6] * 256],
        bos_token_id=0,
        eos_token_id=0,
        add_bos_token=False,
    )
    ours = load_tokenizer(TokenizerSpec(gguf_metadata=metadata))
    bpe = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    vocab = {token: i for i, token in enumerate(tokens)}
    model = {"model": bpe | {"vocab": vocab, "merges": merges}}
    theirs = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", **GEMMA, **model}))
    for text in ("abc", " abc", "a  bc\n c", "é ab", "   "):
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids) == text
        assert ours.detokenizer((), False).push(ids) == text
    assert ours.encode("abc") == [2, 6]


def test_chat_template_comes_from_the_metadata() -> None:
    metadata = stories_gguf_metadata() | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ tools | length }}{{ eos_token }}",
    }
    tokenizer = load_tokenizer(TokenizerSpec(gguf_metadata=metadata))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(chat) == "<s>hi"
    assert tokenizer.render_chat(chat, template_kwargs={"tools": [{}]}) == "1</s>"


def test_named_chat_templates() -> None:
    metadata = stories_gguf_metadata() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = load_tokenizer(TokenizerSpec(gguf_metadata=metadata))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, template_kwargs={"tools": [{}]}) == "tools"


def test_keys_that_change_no_token_id() -> None:
    more = {
        "seperator_token_id": 5,
        "fim_pre_token_id": 6,
        "token_type_count": 2,
        "remove_extra_whitespaces": False,
        "precompiled_charsmap": [],
        "suppress_tokens": [],
        "add_sep_token": False,
        "add_padding_token": False,
        "add_unknown_token": False,
    }
    assert stories(**more).encode("Once upon a time") == stories().encode("Once upon a time")


def changed(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    metadata = gguf_spec_of(tiny_tokenizer_spec(), pre, **more).gguf_metadata
    assert metadata is not None
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param({}, "no tokenizer.ggml.model", id="empty"),
        pytest.param(changed(model="rwkv"), "'rwkv' is not supported; gpt2, llama and", id="model"),
        pytest.param(changed("default"), "'default' is not supported.*smollm", id="pre"),
        pytest.param(changed(merges=None), "no tokenizer.ggml.merges", id="no merges"),
        pytest.param(changed(merges=["a zz"]), "do not fit", id="merge outside the vocabulary"),
        pytest.param(changed(token_type=[1]), "261 tokens but 1 token types", id="types"),
        pytest.param(changed(tokens=["a"] * 261), "'a' twice", id="twice"),
        pytest.param(changed(eos_token_id=261), "outside its vocabulary of 261", id="eos id"),
        pytest.param(changed(add_bos_token=1), "add_bos_token must be true or false", id="flag"),
        pytest.param(
            changed(remove_extra_whitespaces=True), "remove_extra_whitespaces is True", id="spaces"
        ),
        pytest.param(changed(suppress_tokens=[3]), "suppress_tokens is", id="suppressed"),
        pytest.param(changed(add_sep_token=True), "add_sep_token is True", id="separator"),
        pytest.param(
            changed() | {"tokenizer.ggml.normalizer.lowercase": True},
            "normalizer.lowercase",
            id="case",
        ),
        pytest.param(changed(precompiled_charsmap=[1]), "precompiled_charsmap", id="charsmap"),
        pytest.param(changed(a_key_of_tomorrow=1), "a_key_of_tomorrow.*is unknown", id="unknown"),
        pytest.param(
            changed() | {"tokenizer.chat_template": 3}, "'default' must be a string", id="template"
        ),
        pytest.param(changed(add_bos_token=True), "no tokenizer.ggml.bos_token_id", id="bos id"),
    ],
)
def test_refuses(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(TokenizerSpec(gguf_metadata=metadata))


@pytest.mark.parametrize(
    "spec",
    [
        gguf_spec_of(real_spec("smollm2"), "smollm", bos_token_id=1, eos_token_id=2),
        gguf_spec_of(real_spec("qwen3"), "qwen2", add_bos_token=False),
        TokenizerSpec(gguf_metadata=stories_gguf_metadata()),
        TokenizerSpec(gguf_metadata=stories_gguf_metadata(add_space_prefix=False)),
    ],
    ids=["smollm2", "qwen3", "stories", "stories without a space"],
)
def test_a_saved_tokenizer_is_the_same(spec: TokenizerSpec, tmp_path: Path) -> None:
    ours = load_tokenizer(spec)
    ours.save_pretrained(tmp_path / "new")
    saved = load_tokenizer(spec_from_path(tmp_path / "new"))
    assert saved.special_token_ids == ours.special_token_ids
    assert saved.special_tokens_map == ours.special_tokens_map
    assert (saved.bos_token_id, saved.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    for text in (*INPUTS[::20], *INPUTS[-2:]):
        token_ids = ours.encode(text)
        assert saved.encode(text) == token_ids
        assert saved.decode(token_ids) == ours.decode(token_ids)
