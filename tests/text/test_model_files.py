"""Vocabularies of sentencepiece and tiktoken give the tokens of their own definitions."""

from __future__ import annotations

import json
import random
import struct
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.pieces import byte_to_char
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from jaxinfer.weights.tokenizer_files import spec_from_path
from kit.tokenizers import real_spec, stories_gguf_metadata

TEXTS = ("Once upon a time", "  two  spaces", "é 中🤗\n\nx", "", "Lily's mom, 12")
KIMI = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    coded = len(value) if isinstance(value, bytes) else value
    words = [number << 3 | 2 * isinstance(value, bytes), coded]
    made = bytearray()
    for word in words:
        while word > 127:
            made.append(word & 127 | 128)
            word >>= 7
        made.append(word)
    return bytes(made) + (value if isinstance(value, bytes) else b"")


def stories_model(
    *, kind: int = 2, normalizer: bytes = field(4, 0), symbols: tuple[str, ...] = ()
) -> bytes:
    """The 512 tokens of tinyllamas as a tokenizer.model, and user-defined symbols behind them."""
    metadata = stories_gguf_metadata()
    names = ("tokens", "scores", "token_type")
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in names)
    found = [*zip(*columns, strict=True), *((symbol, 0.0, 4) for symbol in symbols)]
    pieces = [
        field(1, field(1, token.encode()) + field(2, score) + field(3, number))
        for token, score, number in found
    ]
    return b"".join(pieces) + field(2, field(3, kind)) + field(3, normalizer)


def folder_with(path: Path, name: str, data: bytes, **config: Any) -> Path:
    (path / name).write_bytes(data)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def loaded(folder: Path) -> Tokenizer:
    built, early = (load_tokenizer(spec_from_path(folder), encodes=each) for each in (True, False))
    assert [early.token_bytes(n) for n in range(len(early))] == [
        built.token_bytes(n) for n in range(len(built))
    ]
    return built


def test_a_sentencepiece_model_equals_the_same_vocabulary_of_a_gguf_file(tmp_path: Path) -> None:
    theirs = load_tokenizer(TokenizerSpec(gguf_metadata=stories_gguf_metadata()))
    ours = loaded(folder_with(tmp_path, "tokenizer.model", stories_model()))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")


@pytest.mark.parametrize(
    ("config", "text", "tokens"),
    [
        ({"add_bos_token": False}, "Once", ["▁Once"]),
        ({"add_eos_token": True}, "Once", ["<s>", "▁Once", "</s>"]),
        ({"add_prefix_space": False}, " Once", ["<s>", "▁Once"]),
        ({"add_prefix_space": None}, "Once", ["<s>", "▁Once"]),  # as transformers 4 saves it
        ({}, "</s>the</s>the", ["<s>", "</s>", "▁the", "</s>", "▁the"]),
        # transformers' legacy: a space behind each token that is not the model's own
        ({"legacy": True}, "the</s>the", ["<s>", "▁the", "</s>", "▁the"]),
        ({"legacy": False}, "the</s>the", ["<s>", "▁the", "</s>", "t", "he"]),
        (
            {"added_tokens_decoder": {"512": {"content": "<|im_start|>", "special": True}}},
            "Once<|im_start|>",
            ["<s>", "▁Once", "<|im_start|>"],
        ),
        (  # a token of the file gets another text
            {"added_tokens_decoder": {"511": {"content": "<tool>", "special": False}}},
            "Once<tool>",
            ["<s>", "▁Once", "<tool>"],
        ),
        (
            {"bos_token": {"content": "</s>"}, "eos_token": "<s>"},
            "Once",
            ["</s>", "▁Once"],
        ),
    ],
)
def test_tokenizer_config_adds_to_a_sentencepiece_model(
    config: dict[str, Any], text: str, tokens: list[str], tmp_path: Path
) -> None:
    tokenizer = loaded(folder_with(tmp_path, "tokenizer.model", stories_model(), **config))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


# by sentencepiece 0.2.3, of the same file
SYMBOLS = {
    "the  the": ["▁the", "▁▁", "t", "he"],
    " the": ["▁▁", "t", "he"],
    "    the": ["▁▁", "▁▁", "▁the"],
    "the<sep>the <sep> the": ["▁the", "<sep>", "t", "he", "▁", "<sep>", "▁the"],
    "<sep>the": ["▁", "<sep>", "t", "he"],
    "the</s>the<sep>": ["▁the", "</s>", "▁the", "<sep>"],  # sentencepiece reads no </s>
}


@pytest.mark.parametrize("text", SYMBOLS)
def test_symbols_of_a_sentencepiece_model_are_found_among_its_spaces(
    text: str, tmp_path: Path
) -> None:
    data = stories_model(symbols=("<sep>", "▁▁"))
    tokenizer = loaded(folder_with(tmp_path, "tokenizer.model", data, add_bos_token=False))
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == SYMBOLS[text]
    assert tokenizer.decode(ids) == text.replace("</s>", " ")
    tokenizer.save_pretrained(saved := tmp_path / "saved")
    assert loaded(saved).encode(text) == ids


def test_older_folders_have_added_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As llama.cpp's issue 3454 shows one: which of them are special, another file says."""
    folder = folder_with(tmp_path, "tokenizer.model", stories_model())
    added = {"<|im_end|>": 512, "<|im_start|>": 513, "<tool>": 514}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    named = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = loaded(folder)
    tokens = ["<s>", "<|im_start|>", "▁the", "<|im_end|>", "<tool>"]
    ids = tokenizer.encode("".join(tokens[1:]).replace("▁", ""))
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == "the<tool>"
    assert tokenizer.eos_token_id == 512


def ranks(count: int = 3000) -> dict[bytes, int]:
    """GPT-2's first tokens by rank: bytes, and then what each merge makes."""
    spec = real_spec("gpt2")
    assert spec.tokenizer_json is not None
    vocab = json.loads(spec.tokenizer_json)["model"]["vocab"]
    byte_of = {char: byte for byte, char in byte_to_char().items()}
    return {
        bytes(byte_of[char] for char in token): rank
        for token, rank in vocab.items()
        if rank < count
    }


def tiktoken_file(count: int = 3000) -> bytes:
    ordered = sorted(ranks(count).items(), key=lambda item: item[1])
    return b"".join(b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def joined(word: bytes, found: dict[bytes, int]) -> list[int]:
    """tiktoken's tokens of a word: join the pair whose union ranks first, leftmost first."""
    parts = [word[at : at + 1] for at in range(len(word))]
    while True:
        pairs = zip(parts, parts[1:], strict=False)
        unions = [(found[a + b], at) for at, (a, b) in enumerate(pairs) if a + b in found]
        if not unions:
            return [found[part] for part in parts]
        at = min(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_tiktoken_model_equals_its_definition(tmp_path: Path) -> None:
    config = {"tokenizer_class": KIMI["tokenizer_class"]}
    tokenizer = loaded(folder_with(tmp_path, "tiktoken.model", tiktoken_file(), **config))
    draw, found = random.Random(0), ranks()
    for _ in range(500):
        word = "".join(draw.choices("etaoinshrdlué", k=draw.randrange(1, 14)))
        assert tokenizer.encode(word) == joined(word.encode(), found)
        assert tokenizer.encode(f"中文{word} 12345") == [
            one for part in ("中文", word, " ", "123", "45") for one in joined(part.encode(), found)
        ]


def test_special_tokens_follow_those_of_a_tiktoken_model(tmp_path: Path) -> None:
    added = {
        str(3000 + n): {"content": text, "special": True}
        for n, text in ((0, "[BOS]"), (1, "[EOS]"), (2, "<|im_end|>"))
    }
    folder = folder_with(
        tmp_path, "tiktoken.model", tiktoken_file(), **KIMI, added_tokens_decoder=added
    )
    tokenizer = loaded(folder)
    assert len(tokenizer) == 3256 and tokenizer.eos_token_id == 3001
    assert tokenizer.end_token_ids == {3001, 3002}
    assert tokenizer.encode("<|im_end|><|reserved_token_3255|>") == [3002, 3255]
    assert tokenizer.decode([3000, 3255, 3002]) == ""
    tokenizer.save_pretrained(saved := tmp_path / "saved")
    assert loaded(saved).encode("hello<|im_end|>") == tokenizer.encode("hello<|im_end|>")


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    folder_with(tmp_path, "tokenizer.model", b"no vocabulary")
    (tmp_path / "tokenizer.json").write_text(real_spec("gpt2").tokenizer_json or "")
    assert len(loaded(tmp_path)) == 50257


EDGE = {"content": "<mask>", "lstrip": True}


@pytest.mark.parametrize(
    ("name", "data", "config", "words"),
    [
        ("tokenizer.model", stories_model(kind=1), {}, "is of kind 1, only BPE"),
        ("tokenizer.model", stories_model(normalizer=b""), {}, "removes extra spaces"),
        (
            "tokenizer.model",
            stories_model(normalizer=field(1, b"nmt_nfkc") + field(2, b"x") + field(4, 0)),
            {},
            "changes texts by 'nmt_nfkc'",
        ),
        ("tokenizer.model", stories_model()[:-1], {}, "damaged .it ends within a field"),
        ("tokenizer.model", b"no vocabulary", {}, "is damaged"),
        (
            "tokenizer.model",
            stories_model(),
            {"added_tokens_decoder": {"512": EDGE}},
            "'<mask>'.*has one of lstrip",
        ),
        (
            "tokenizer.model",
            stories_model(),
            {"added_tokens_decoder": {"512": "x"}},
            "added_tokens_decoder .*is unusable",
        ),
        (
            "tokenizer.model",
            stories_model(),
            {"added_tokens_decoder": {"4000000000": {"content": "x"}}},
            "unusable .the id 4000000000",
        ),
        (
            "tokenizer.model",
            stories_model(),
            {"added_tokens_decoder": {"-1": {"content": "x"}}},
            "unusable .the id -1",
        ),
        ("tokenizer.model", tiktoken_file(), {}, "has the ranks of tiktoken"),
        ("tiktoken.model", tiktoken_file(), {}, "read for Kimi's"),
        ("tiktoken.model", b"IQ== x", KIMI, "is damaged"),
        ("tiktoken.model", b"IQ== 0\nIg== 2\n", KIMI, "ranks that do not ascend"),
    ],
)
def test_what_cannot_be_read_is_refused(
    name: str, data: bytes, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=words):
        spec_from_path(folder_with(tmp_path, name, data, **config))
