"""langchain's ``bind_tools`` and ``with_structured_output``, over answers that a test gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import serving

pytest.importorskip("llguidance")


class weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
WRONG = CALL.replace("3", '"soon"')
QUESTION = HumanMessage("What is the weather in Rome?")


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedDevice, ChatOpenAI]]:
    engine, device = scripted_engine("qwen3")
    with serving(engine) as server:
        model: Any = {"model": "scripted", "api_key": "none", "max_tokens": 400}
        yield device, ChatOpenAI(base_url=f"{server.url}/v1", max_retries=0, **model)
        server.wait_until_idle()


def test_bound_tools(scripted: tuple[ScriptedDevice, ChatOpenAI]) -> None:
    device, chat = scripted
    device.speak(f"I look.{CALL}")
    tools = chat.bind_tools([weather])
    answer = tools.invoke([QUESTION])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rom", "days": 3})
    assert answer.content == "I look."
    chunks = list(tools.stream([QUESTION]))
    whole: Any = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert (whole.tool_calls[0]["args"], whole.content) == (call["args"], answer.content)
    device.speak("It rains.")
    result = ToolMessage("rain", tool_call_id=call["id"])
    assert tools.invoke([QUESTION, answer, result]).content == "It rains."


def test_strict_and_required_tools(scripted: tuple[ScriptedDevice, ChatOpenAI]) -> None:
    device, chat = scripted
    enforced: list[tuple[str, dict[str, Any]]] = [
        (WRONG, {"strict": True}),
        ("<to No.", {"tool_choice": "any"}),
    ]
    for text, options in enforced:
        device.speak(text)
        (call,) = chat.bind_tools([weather], **options).invoke([QUESTION]).tool_calls
        weather(**call["args"])


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("json_schema", '{"city": 3, "days": "soon"}'),
        ("function_calling", "<to No."),
        ("json_mode", '{"city": "Rom", "days": 3}'),
    ],
)
def test_structured_output(
    scripted: tuple[ScriptedDevice, ChatOpenAI], method: Any, text: str
) -> None:
    device, chat = scripted
    device.speak(text)
    found = chat.with_structured_output(weather, method=method).invoke([QUESTION])
    assert isinstance(found, weather)
    assert method != "json_mode" or found == weather(city="Rom", days=3)
