"""Shared parts of tests that use one server with the official ``openai`` client.

Owns: the server's settings, a first chat, ``endless``.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI, Stream
from openai.types.completion import Completion

KEY = "open sesame"
QUEUE = 16  # requests; a list of many prompts is more
SECONDS = 60.0
QUESTION = "What is the capital of France? Answer in one sentence."
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


def endless(client: OpenAI, model: str) -> Stream[Completion]:
    """A stream that ends only when its reader closes it."""
    return client.completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
