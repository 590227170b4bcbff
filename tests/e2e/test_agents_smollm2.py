"""Agent loops of SmolLM2 with ``tool_choice`` auto: the model itself calls tools, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kit.agents import AGENTS, FRAMEWORKS, Connection, Tools
from kit.openai_server import KEY

WEATHER = ("get_weather", {"city": "Paris"})
SUM = ("add", {"a": 12, "b": 30})
# Questions and calls that the model decides right at temperature 0, each in a chat of its own: with
# an earlier call in the chat it often repeats that call or its result. They are five turns.
QUESTIONS: Sequence[tuple[str, list[tuple[str, dict[str, Any]]]]] = (
    ("What is the weather in Paris?", [WEATHER]),
    ("What is 12 plus 30?", [SUM]),
    ("What is the capital of France?", []),
)
MAX_TOKENS = 24  # of a turn; a long text is cut off


def answer_all(
    url: str, model: str, kind: Any, max_tokens: int = MAX_TOKENS, **options: bool
) -> None:
    """Each call has its function and arguments, and each loop ends with text."""
    tools = Tools()
    to = Connection(url.removesuffix("/v1"), model, max_tokens, KEY)
    for question, calls in QUESTIONS:
        with kind(to, tools, **options) as ask:
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
