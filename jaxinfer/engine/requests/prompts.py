"""Parsing of prompts in vLLM's forms: a string, a list of token ids, or a dict of either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from jaxinfer.core.checks import as_int
from jaxinfer.core.errors import RequestError

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

TOKEN_IDS = tuple[int, ...]  # a constant, since making the type takes as long as ten ids


class Prompt(NamedTuple):
    """A prompt ready for the engine; ``text`` is None when it came as token ids.

    ``offsets``: the offset of each token in the text, in characters; empty unless requested.
    """

    text: str | None
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...] = ()


def parse_prompts(prompts: Any, tokenizer: Tokenizer | None) -> list[Prompt]:
    """Parse one or several prompts, each a string, a list of token ids, or a dict
    ``{"prompt": str}`` or ``{"prompt_token_ids": [int]}``.

    Raises ``RequestError``; with several prompts it names the number of the invalid one.
    """
    if isinstance(prompts, (str, Mapping)):
        return [parse_prompt(prompts, tokenizer)]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"a prompt must be text or token ids, got {type(prompts).__name__}")
    several = cast("Sequence[Any]", prompts)
    if several and isinstance(several[0], Real):
        return [parse_prompt(several, tokenizer)]
    parsed: list[Prompt] = []
    for number, prompt in enumerate(several):
        try:
            parsed.append(parse_prompt(prompt, tokenizer))
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error}") from None
    return parsed


def parse_prompt(prompt: Any, tokenizer: Tokenizer | None) -> Prompt:
    """Parse one prompt in any of the forms; raises ``RequestError``."""
    text, token_ids = _parts(prompt)
    if text is not None and not isinstance(text, str):
        raise RequestError(f"a prompt must be text or token ids, got {type(text).__name__}")
    if token_ids is not None:
        return Prompt(text, _token_ids(token_ids))
    if text is None:
        raise RequestError('a prompt needs text or token ids ("prompt" or "prompt_token_ids")')
    return Prompt(text, encode(text, tokenizer))


def encode(
    text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """Token ids of a text; raises ``RequestError`` if the engine has no tokenizer."""
    if tokenizer is None:
        raise RequestError("the engine has no tokenizer; give prompt_token_ids instead of text")
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _parts(prompt: Any) -> tuple[Any, Any]:
    """The text and the token ids of a prompt; None for a missing one."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    named = cast("Mapping[str, Any]", prompt)
    for key, value in named.items():
        if key not in ("prompt", "prompt_token_ids") and value is not None:
            raise RequestError(f"{key!r} in a prompt dict is not supported; leave it out")
    return named.get("prompt"), named.get("prompt_token_ids")


def _token_ids(value: Any) -> tuple[int, ...]:
    items = _items(value)
    try:  # one call for all, since there may be thousands
        return msgspec.convert(items, TOKEN_IDS)
    except msgspec.ValidationError:
        return tuple([_token_id(item) for item in items])


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Iterable):
        raise RequestError(f"a prompt must be text or a list of token ids, got {value!r}")
    return tuple(cast("Iterable[Any]", value))


def _token_id(item: Any) -> int:
    token_id = as_int(item)
    if token_id is None:
        raise RequestError(f"prompt_token_ids holds {item!r}; token ids are integers")
    return token_id
