"""The forms a prompt may come in, made one: text and token ids.

Owns: ``Prompt`` and its parsing (vLLM's forms: a string, a list of ids, or a dict of either).
Must not know: the engine, sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from jaxinfer.core.errors import RequestError
from jaxinfer.text.tokenizer import Tokenizer


class Prompt(NamedTuple):
    """A prompt ready for the engine; ``text`` is None when it came as token ids."""

    text: str | None
    token_ids: tuple[int, ...]


def parse_prompts(prompts: Any, tokenizer: Tokenizer | None) -> list[Prompt]:
    """One or several prompts, each a string, a list of token ids, or a dict
    ``{"prompt": str}`` or ``{"prompt_token_ids": [int]}``. Raises ``RequestError``."""
    if isinstance(prompts, (str, Mapping)):
        return [parse_prompt(prompts, tokenizer)]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"a prompt must be text or token ids, got {type(prompts).__name__}")
    several = cast("Sequence[Any]", prompts)
    if several and isinstance(several[0], int):
        return [parse_prompt(several, tokenizer)]
    return [parse_prompt(prompt, tokenizer) for prompt in several]


def parse_prompt(prompt: Any, tokenizer: Tokenizer | None) -> Prompt:
    """One prompt in any of its forms."""
    if isinstance(prompt, Mapping):
        named = cast("Mapping[str, Any]", prompt)
        if "prompt_token_ids" in named:
            return Prompt(named.get("prompt"), _token_ids(named["prompt_token_ids"]))
        if "prompt" not in named:
            raise RequestError('a prompt dict needs "prompt" or "prompt_token_ids"')
        prompt = named["prompt"]
    if isinstance(prompt, str):
        return Prompt(prompt, encode(prompt, tokenizer))
    return Prompt(None, _token_ids(prompt))


def encode(
    text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """Token ids of a text; an error says what to do when there is no tokenizer."""
    if tokenizer is None:
        raise RequestError("the engine has no tokenizer; give prompt_token_ids instead of text")
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _token_ids(value: Any) -> tuple[int, ...]:
    try:
        return tuple(int(token_id) for token_id in value)
    except (TypeError, ValueError):
        raise RequestError("prompt_token_ids must be a list of integers") from None
