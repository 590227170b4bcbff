"""Tool calls of SmolLM2 by three clients.

The server has Qwen2.5's template, and the grammar makes the model call where the request requires
it. With its own template it decides by itself: see test_agents_smollm2.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field

from jaxinfer.bench.server_process import ServerProcess
from kit.openai_server import SECONDS

TEMPLATE = Path(__file__).parents[1] / "data" / "chat_templates" / "qwen2.5.jinja"
MODEL = "smollm2-135m-instruct"
QUESTION: Any = [{"role": "user", "content": "What is the weather in Rome in 3 days?"}]
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "temperature": 0}


class weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


PARAMETERS = weather.model_json_schema()
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": weather.__doc__, "parameters": PARAMETERS},
}


@pytest.fixture(scope="module")
def tools_url() -> Iterator[str]:
    flags = (f"--chat-template={TEMPLATE}", f"--served-model-name={MODEL}")
    with ServerProcess(*flags, "--cpu-weights=float32") as server:  # as ``url``: compiled once
        yield server.url


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_calls_whole_and_streamed(tools_url: str, choice: Any) -> None:
    with OpenAI(base_url=f"{tools_url}/v1", api_key="none", timeout=SECONDS) as client:
        given = {**FIELDS, "messages": QUESTION, "tools": [TOOL], "tool_choice": choice}
        given["parallel_tool_calls"] = False
        whole = client.chat.completions.create(**given).choices[0]
        (call,) = whole.message.tool_calls or ()
        assert call.type == "function" and call.function.name == "weather"
        weather(**json.loads(call.function.arguments))
        parts, name = list[str](), ""
        for chunk in client.chat.completions.create(**given, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                assert delta.function is not None
                name += delta.function.name or ""
                parts.append(delta.function.arguments or "")
    assert (name, "".join(parts)) == ("weather", call.function.arguments)


def test_tool_use_of_messages(tools_url: str) -> None:
    tool: Any = {"name": "weather", "description": weather.__doc__, "input_schema": PARAMETERS}
    with Anthropic(base_url=tools_url, api_key="none", timeout=SECONDS) as client:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        given: Any = {"messages": QUESTION, "tools": [tool], "tool_choice": choice}
        given |= {"model": MODEL, "max_tokens": 120, "extra_body": {"temperature": 0}}
        answer = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
    (used,) = [block for block in answer.content if block.type == "tool_use"]
    weather(**used.input)
    assert (answer.stop_reason, used.name) == ("tool_use", "weather")
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [used.input]


def test_bound_tools_of_langchain(tools_url: str) -> None:
    options: Any = {**FIELDS, "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(base_url=f"{tools_url}/v1", **options)
    (call,) = (
        chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
        .invoke(QUESTION)
        .tool_calls
    )
    assert call["name"] == "weather"
    weather(**call["args"])
