"""Tokenizers for tests: a self-contained byte-level one, and real ones in tests/data/tokenizers."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

from jaxinfer.text.pieces import byte_to_char
from jaxinfer.text.tokenizer_config import TokenizerSpec

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
VECTORS = DATA / "vectors"
GOLDEN = Path(__file__).parents[1] / "golden" / "data"
GOLDEN_CHAT = GOLDEN / "chat.json.gz"

TINY_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
TINY_BOS_ID, TINY_EOS_ID = 256, 257
TINY_VOCAB_SIZE = 256 + len(TINY_SPECIAL_TOKENS)
_TINY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer_json() -> str:
    """A tokenizer.json whose token ids 0..255 are the bytes; the special tokens follow."""
    special = {
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": 256 + n, "content": token, **special}
                for n, token in enumerate(TINY_SPECIAL_TOKENS)
            ],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": False},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": False},
            "model": {
                "type": "BPE",
                "vocab": {char: byte for byte, char in byte_to_char().items()},
                "merges": [],
            },
        }
    )


def write_tiny_tokenizer(folder: Path) -> None:
    """The files of the tokenizer, with its chat template."""
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    bos, eos, *_ = TINY_SPECIAL_TOKENS
    config = {"chat_template": _TINY_TEMPLATE, "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_tokenizer_spec() -> TokenizerSpec:
    """The tiny tokenizer with bos, eos and a chat template of one line for each message."""
    return TokenizerSpec(
        tokenizer_json=tiny_tokenizer_json(),
        tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        chat_template=_TINY_TEMPLATE,
    )


def real_spec(name: str) -> TokenizerSpec:
    """A real model's tokenizer: gpt2, smollm2 or qwen3."""
    folder = DATA / name
    return TokenizerSpec(
        tokenizer_json=gzip.decompress((folder / "tokenizer.json.gz").read_bytes()).decode(),
        tokenizer_config=json.loads((folder / "tokenizer_config.json").read_text("utf-8")),
    )


def gguf_spec_of(spec: TokenizerSpec, pre: str, **more: Any) -> TokenizerSpec:
    """The same byte-level tokenizer in the metadata of a GGUF file.

    ``more`` are further ``tokenizer.ggml.`` entries.
    """
    assert spec.tokenizer_json is not None
    parsed = json.loads(spec.tokenizer_json)
    tokens = {token_id: (token, 1) for token, token_id in parsed["model"]["vocab"].items()}
    for added in parsed["added_tokens"]:
        tokens[added["id"]] = (added["content"], 3 if added["special"] else 4)
    pairs = parsed["model"]["merges"]
    ordered = [tokens[token_id] for token_id in range(len(tokens))]
    entries = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [token for token, _ in ordered],
        "token_type": [kind for _, kind in ordered],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs],
        **more,
    }
    return TokenizerSpec(gguf_metadata={f"tokenizer.ggml.{k}": v for k, v in entries.items()})


def tiny_gguf_spec(pre: str, token: str, token_type: int = 1, **more: Any) -> TokenizerSpec:
    """The tiny tokenizer and one more token, of id 261, which no merge produces, in GGUF metadata.

    ``more`` are further ``tokenizer.ggml.`` entries.
    """
    metadata = gguf_spec_of(
        tiny_tokenizer_spec(), pre, **{"add_bos_token": False, **more}
    ).gguf_metadata
    assert metadata is not None
    added = {"tokens": [token], "token_type": [token_type]}
    longer = {f"tokenizer.ggml.{k}": metadata[f"tokenizer.ggml.{k}"] + v for k, v in added.items()}
    return TokenizerSpec(gguf_metadata={**metadata, **longer})


def stories_gguf_metadata(**more: Any) -> dict[str, Any]:
    """The 512-token sentencepiece vocabulary of tinyllamas, as a GGUF file's metadata."""
    data = (DATA / "stories" / "tok512.bin").read_bytes()
    tokens: list[str] = []
    scores: list[float] = []
    at = 4  # after the longest token's length
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        at += 8
        tokens.append(data[at : at + size].decode())
        scores.append(score)
        at += size
    tokens[:3] = ["<unk>", "<s>", "</s>"]  # llama2.c writes line breaks around them
    is_byte = [token.startswith("<0x") for token in tokens]
    entries = {
        "model": "llama",
        "tokens": [token.replace(" ", "▁") for token in tokens],
        "scores": scores,
        "token_type": [2, 3, 3, *(6 if byte else 1 for byte in is_byte[3:])],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def kitoken_inputs(*names: str) -> list[str]:
    """The inputs of the named vector files (small, mixed), one case for each line."""
    return [
        line.replace("\\n", "\n").replace("\\s", " ").replace("\\x", "")
        for name in names
        for line in read_vector(f"{name}_input.txt").rstrip("\n").split("\n")
    ]


def token_lines(name: str) -> list[list[int]]:
    """Lines of token ids, separated by commas or spaces."""
    lines = read_vector(name).rstrip("\n").split("\n")
    return [[int(word) for word in line.replace(",", " ").split()] for line in lines]


def read_vector(name: str) -> str:
    """A vector file, unpacked if it is stored compressed."""
    packed = VECTORS / f"{name}.gz"
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else None
    return (data or (VECTORS / name).read_bytes()).decode()
