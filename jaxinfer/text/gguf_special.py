"""The special tokens of a GGUF vocabulary: ids that have a role, and ids that end a text.

Source of the rules: ``llama_vocab::impl::load`` in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import TokenizerError

# Tokens that end a message of a chat. They end a text, and are special tokens, whatever type a file
# gives them: converters have written some of them as ordinary words.
TURN_ENDS = frozenset(
    {
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",  # Llama 3.1, before a tool runs
        "<|im_end|>",  # ChatML: Qwen, SmolLM2
        "<|end|>",  # Phi 3
        "<end_of_turn>",  # Gemma
        "<|endoftext|>",  # GPT-2, Qwen
        "<|end_of_text|>",  # Granite, Llama 3
        "<EOT>",
        "_<EOT>",
        "[EOT]",  # Kimi K2
        "<｜end▁of▁sentence｜>",  # DeepSeek
        "<end_of_utterance>",  # SmolVLM
    }
)
_ENDS = TURN_ENDS | {
    "</s>",
    "<eos>",
    "[EOS]",  # Kimi K2
    "<|return|>",  # harmony: gpt-oss
    "<|call|>",  # harmony
    "<|calls|>",  # Solar
    "<|flush|>",  # Solar
    "<turn|>",  # Gemma 4
    "<|tool_response>",  # Gemma 4
    "[e~[",  # MiniMax M2
}

# Tokens between the parts of a fill-in-the-middle prompt; they end a text. They are found by their
# text if the metadata names no id. Of several, llama.cpp takes the one that its hash table has
# first; here all of them end a text.
_FILL_IN_ENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        "fim_sep": ("<|file_sep|>",),
    }
)

# A token that does not end a text in a vocabulary where all tokens of one of these sets do: there
# it closes a part of the answer (harmony's channels), or is an ordinary word.
_EXCEPTIONS: Mapping[str, tuple[frozenset[str], ...]] = MappingProxyType(
    {
        "<|end|>": tuple(
            frozenset(pair)
            for pair in product(("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>"))
        ),
        "</s>": (frozenset({"<|tool_response>"}), frozenset({"<|plamo:eos|>"})),
    }
)
_SEARCHED = (
    _ENDS
    | {text for texts in _FILL_IN_ENDS.values() for text in texts}
    | {text for sets in _EXCEPTIONS.values() for texts in sets for text in texts}
)

# sentencepiece's default ids, if the metadata names none. llama.cpp's default for byte level BPE,
# 11, is Falcon's <|endoftext|>, which is found by its text.
_SENTENCEPIECE_IDS: Mapping[str, int] = MappingProxyType({"unknown": 0, "bos": 1, "eos": 2})


def special_id(metadata: Mapping[str, Any], role: str) -> int | None:
    """The token id of a role such as "bos", "eos", "eot" or "padding"; None if it has none.

    Raises ``TokenizerError`` for a value that is not an id of the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    tokens = _tokens(metadata)
    if value is None:
        is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
        value = _SENTENCEPIECE_IDS.get(role) if is_sentencepiece else None
        return value if value is None or not tokens or value < len(tokens) else None
    return _checked_id(key, value, tokens)


def _tokens(metadata: Mapping[str, Any]) -> list[Any] | None:
    """The vocabulary; None in a file without one."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else None


def _checked_id(key: str, value: Any, tokens: list[Any] | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TokenizerError(
            f"The GGUF metadata key {key} must be an integer, got {short(value)}; "
            "convert the model again."
        )
    if tokens is not None and not 0 <= value < len(tokens):
        raise TokenizerError(
            f"The GGUF metadata key {key} is {value}, outside its vocabulary of {len(tokens)} "
            "tokens; convert the model again."
        )
    return value


def end_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Every token that ends a text: those that the metadata names, and those known by their text.

    Raises ``TokenizerError`` as ``special_id`` does.
    """
    roles = ("eos", "eot", "eom", *_FILL_IN_ENDS)
    named = {role: special_id(metadata, role) for role in roles}
    ends = {token_id for token_id in named.values() if token_id is not None}
    tokens = _tokens(metadata)
    further = "tokenizer.ggml.eos_token_ids"  # Ollama writes the list of generation_config.json
    ids: Any = metadata.get(further)
    given = ids if isinstance(ids, list) else [] if ids is None else [ids]
    ends |= {_checked_id(further, token_id, tokens) for token_id in given}
    if tokens is None:
        return frozenset(ends)  # a file without a vocabulary
    found = {text: token_id for token_id, text in enumerate(tokens) if text in _SEARCHED}
    ends |= {found[text] for text in _ENDS if text in found}
    for role, texts in _FILL_IN_ENDS.items():
        if named[role] is None:
            ends |= {found[text] for text in texts if text in found}
    for text, sets in _EXCEPTIONS.items():
        if any(all(found.get(other) in ends for other in others) for others in sets):
            ends.discard(found.get(text, -1))
    return frozenset(ends)
