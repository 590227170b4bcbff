"""A stream adds up to the whole answer, and offsets match the returned text.

The settings are drawn at random: stop strings, min_tokens, logprobs, echo, n, special tokens and
parts of characters.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from kit.api_calls import CHATS, COMPLETIONS, GENERATE, ask, events, same
from kit.server import Serving
from kit.tokenizers import TINY_BOS_ID, TINY_EOS_ID

TEXTS = ("Hi", "a\U0001f917b", "\u00e9\u20ac ", "<|user|>x<|eos|>", "\u65e5\u672c\u8a9e", "  ")
WORDS = ("ab", "\u00e9", "\U0001f917a", "b\u20ac", "\ufffd", "\ufffda", "aa")
SHARED = ("max_tokens", "min_tokens", "stop", "include_stop_str_in_output", "skip_special_tokens")


def drawn(seed: int) -> dict[str, Any]:
    """Settings of a request, biased towards characters, parts of them and special tokens."""
    draw = random.Random(seed)
    likely = [*draw.choice(WORDS).encode(), *draw.choice(WORDS).encode(), ord("a")]
    if draw.random() < 0.4:
        likely += [TINY_BOS_ID, TINY_EOS_ID]
    max_tokens = draw.randint(1, 12)
    fields: dict[str, Any] = {
        "seed": seed,
        "max_tokens": max_tokens,
        "min_tokens": draw.choice([0, 0, draw.randint(0, max_tokens)]),
        "stop": draw.sample(WORDS, draw.randint(0, 3)),
        "include_stop_str_in_output": draw.random() < 0.5,
        "skip_special_tokens": draw.random() < 0.6,
        "logit_bias": {str(token): draw.choice([12, 14]) for token in likely},
        "return_token_ids": True,
        "n": draw.choice([1, 1, 3]),
    }
    if draw.random() < 0.3:
        fields["stop_token_ids"] = [draw.choice(likely)]
    return fields


def prompt_of(draw: random.Random) -> Any:
    """A prompt in one of its forms; ids may begin and end within a character."""
    texts = ["".join(draw.choices(TEXTS, k=draw.randint(1, 3))) for _ in range(2)]
    ids = [list(text.encode())[draw.randint(0, 1) : -draw.randint(1, 3)] for text in texts]
    ids = [[*one, TINY_BOS_ID, *one] for one in ids]
    return draw.choice([texts[0], texts, ids[0], ids])


def streamed(server: Serving, path: str, **fields: Any) -> dict[int, list[Any]]:
    """The parts of each choice."""
    parts: dict[int, list[Any]] = {}
    for event in events(server.post(path, **fields, stream=True)):
        for part in event["choices"]:
            parts.setdefault(part["index"], []).append(part)
    return parts


def added(parts: list[Any], *path: str) -> Any:
    """The sum of a field over the parts."""
    values = []
    for part in parts:
        for name in path:
            part = (part or {}).get(name)
        if part is not None:
            values.append(part)
    return "".join(values) if isinstance(values[0], str) else [x for one in values for x in one]


def check_offsets(choice: Any, prompt_ids: list[int], *, skip: bool) -> None:
    """Check the offsets of a choice's tokens against its text."""
    text, ids = choice["text"], [*prompt_ids, *choice["token_ids"]]
    offsets = choice["logprobs"]["text_offset"]
    assert len(offsets) == len(ids)
    assert all(first <= second for first, second in pairwise(offsets))
    assert all(0 <= offset <= len(text) for offset in offsets)
    for number, (token, offset) in enumerate(zip(ids, offsets, strict=True)):
        if token < 0x80 and offset < len(text):
            assert text[offset] == chr(token)  # an ASCII token is at its offset
        if skip and token >= TINY_BOS_ID and number + 1 < len(ids) and number >= len(prompt_ids):
            assert offsets[number + 1] - offset <= 1  # of a character that it interrupts


@pytest.mark.parametrize("seed", range(24))
def test_completions(server: Serving, seed: int) -> None:
    draw = random.Random(-seed - 1)
    fields = {"prompt": prompt_of(draw), **drawn(seed)}
    fields |= {"logprobs": draw.randint(0, 3), "echo": draw.random() < 0.5}
    whole = ask(server, COMPLETIONS, **fields)["choices"]
    parts = streamed(server, COMPLETIONS, **fields)
    for choice in whole:
        streamed_parts = parts[choice["index"]]
        assert added(streamed_parts, "text") == choice["text"]
        assert added(streamed_parts, "token_ids") == choice["token_ids"]
        assert streamed_parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for name in ("finish_reason", "stop_reason"):
            assert streamed_parts[-1][name] == choice[name]
        for name, values in choice["logprobs"].items():
            assert same(added(streamed_parts, "logprobs", name), values), name
        for part in streamed_parts:  # a token's fields arrive with the token
            assert len(part["logprobs"]["tokens"]) >= len(part["token_ids"])
        echoed = choice["prompt_token_ids"] if fields["echo"] else []
        check_offsets(choice, echoed, skip=fields["skip_special_tokens"])
    spelt = ask(server, COMPLETIONS, **fields, return_tokens_as_token_ids=True)["choices"]
    for plain, choice in zip(whole, spelt, strict=True):
        assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
        ids = plain["prompt_token_ids"] * fields["echo"] + plain["token_ids"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]


@pytest.mark.parametrize("seed", range(12))
def test_chats(server: Serving, seed: int) -> None:
    draw = random.Random(-seed - 1)
    messages = [{"role": "user", "content": draw.choice(TEXTS)}]
    fields = {"messages": messages, **drawn(seed), "logprobs": True, "top_logprobs": 2}
    whole = ask(server, CHATS, **fields)["choices"]
    parts = streamed(server, CHATS, **fields)
    for choice in whole:
        streamed_parts = parts[choice["index"]]
        assert added(streamed_parts, "delta", "content") == choice["message"]["content"]
        assert streamed_parts[-1]["finish_reason"] == choice["finish_reason"]
        assert streamed_parts[-1]["stop_reason"] == choice["stop_reason"]
        content = added(streamed_parts, "logprobs", "content")
        assert same(content, choice["logprobs"]["content"])
        if choice["finish_reason"] == "stop":
            continue  # the text that ended it is cut off
        shown = [
            entry["bytes"]
            for entry, token in zip(content, choice["token_ids"], strict=True)
            if not (fields["skip_special_tokens"] and token >= TINY_BOS_ID)
        ]
        data = bytes(byte for one in shown for byte in one)
        assert data.decode("utf-8", "replace") == choice["message"]["content"]


@pytest.mark.parametrize("seed", range(6))
def test_generate(server: Serving, seed: int) -> None:
    fields = {"prompt": TEXTS[seed % len(TEXTS)], **drawn(seed), "logprobs": 1}
    answer = ask(server, GENERATE, **fields)
    streamed_parts = events(server.post(GENERATE, **fields, stream=True))
    assert streamed_parts[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in streamed_parts[1:])
    for output in answer["outputs"]:
        parts = [
            o for event in streamed_parts for o in event["outputs"] if o["index"] == output["index"]
        ]
        assert added(parts, "text") == output["text"]
        assert added(parts, "token_ids") == output["token_ids"]
        assert same(added(parts, "logprobs"), output["logprobs"])
        assert parts[-1]["finish_reason"] == output["finish_reason"]


@pytest.mark.parametrize("include", [False, True])
def test_a_text_that_is_held_back_and_cut_off(server: Serving, include: bool) -> None:
    """Tokens whose text is cut off have the offset of its end, in streams too."""
    fields = {
        "prompt": "a", "max_tokens": 6, "temperature": 0, "logprobs": 0,
        "logit_bias": {str(ord("x")): 100}, "stop": ["xxxy", "xxxxx"],
        "include_stop_str_in_output": include,
    }  # fmt: skip
    (choice,) = ask(server, COMPLETIONS, **fields)["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("xxxxx" * include, "xxxxx")
    assert choice["logprobs"]["text_offset"] == ([0, 1, 2, 3, 4] if include else [0] * 5)
    (parts,) = streamed(server, COMPLETIONS, **fields).values()
    assert added(parts, "logprobs", "text_offset") == choice["logprobs"]["text_offset"]
    if not include:
        assert len(parts) <= 2


def test_offsets_of_an_echo(server: Serving) -> None:
    fields = {"prompt": "a\U0001f917b<|user|>c", "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = ask(server, COMPLETIONS, **fields)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 11, 12]
    fields["prompt"] = [*"a\U0001f917b".encode(), 259, ord("c")]
    (choice,) = ask(server, COMPLETIONS, **fields)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 3, 4]
    (choice,) = ask(server, COMPLETIONS, **fields, skip_special_tokens=False)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 11, 12]
