"""Which parts of a chat with tools a template renders, found by small chats."""

from __future__ import annotations

import pytest

from kit.chat_histories import compiled
from kit.scripted import TEMPLATES

ALL, NOTHING = (True, True, True), (False, False, False)
CALLS, RESULTS = (False, True, True), (False, False, True)


@pytest.mark.parametrize(
    ("template", "renders"),
    [
        *((name, ALL) for name in ("gpt-oss", "mistral-nemo", "qwen2.5", "qwen3")),
        *((name, ALL) for name in ("qwen3-coder", "qwen3.5")),
        *((name, CALLS) for name in ("deepseek-r1", "deepseek-r1-distill", "deepseek-r1-0528")),
        *((name, CALLS) for name in ("deepseek-v3.1", "own-defined", "own-key-tests")),
        *((name, RESULTS) for name in ("smollm2", "smollm3")),
        ("own-parts", NOTHING),
    ],
)
def test_parts_that_are_rendered(template: str, renders: tuple[bool, bool, bool]) -> None:
    assert compiled(TEMPLATES / f"{template}.jinja").renders == renders
