"""Agent loops of SmolLM2 with ``tool_choice`` auto: the model itself calls tools, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kit.agents import AGENTS, FRAMEWORKS, Connection, Tools
from kit.openai_server import KEY

# Chats of questions, with the call that answers each, which the model decides at temperature 0. The
# first chat is five turns of the model: a call and a text, again, and a text alone. It does not
# change from one function to the other within a chat.
CHATS: Sequence[Sequence[tuple[str, list[tuple[str, dict[str, Any]]]]]] = (
    (
        ("What is 12 plus 30?", [("add", {"a": 12, "b": 30})]),
        ("What is 5 plus 6?", [("add", {"a": 5, "b": 6})]),
        ("Thank you!", []),
    ),
    (("What is the weather in Paris?", [("get_weather", {"city": "Paris"})]),),
)
MAX_TOKENS = 24  # of a turn; a long text is cut off


def answer_all(
    url: str, model: str, kind: Any, max_tokens: int = MAX_TOKENS, **options: bool
) -> None:
    """Each call has its function and arguments, and each loop ends with text."""
    tools = Tools()
    to = Connection(url.removesuffix("/v1"), model, max_tokens, KEY)
    for chat in CHATS:
        with kind(to, tools, **options) as ask:
            for question, calls in chat:
                assert ask(question).strip() and tools.take() == calls, question


@pytest.mark.parametrize("kind", AGENTS)
def test_loops(url: str, model: str, kind: str) -> None:
    answer_all(url, model, AGENTS[kind], stream=kind in ("anthropic", "langchain"))


@pytest.mark.nightly
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_frameworks(url: str, model: str, kind: str, responses: bool) -> None:
    # openai-agents takes an answer that is cut off for an error
    answer_all(url, model, FRAMEWORKS[kind], 200, stream=responses, responses=responses)
