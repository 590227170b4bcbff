"""Agent loops of client libraries, over turns that a test gives, in two forms of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from jaxinfer.text.render_process import RenderRequest
from kit.agents import AGENTS, FRAMEWORKS, Connection, Tools
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import LocalRenderer, Serving, serving

WEATHER = ("get_weather", {"city": "Paris"})
SUM = ("add", {"a": 12, "b": 30})
# each question, the calls of one turn, and the final text
CONVERSATION: Sequence[tuple[str, Sequence[tuple[str, dict[str, Any]]], str]] = (
    ("What is the weather in Paris?", [WEATHER], 'It is "cloudy"\nin Paris.'),
    ("What is 12 plus 30?", [SUM], "12 + 30 = 42 {}"),
    ("What is the capital of France?", [], "The capital is Paris."),
)
TWO_CALLS = ("And both again?", [SUM, WEATHER], "Cloudy; 42.")
FORMS = {"qwen2.5": "hermes", "smollm2": "generic"}


class Recording(LocalRenderer):
    """Keeps the last prompt."""

    prompt = ""

    async def render(self, request: RenderRequest, *, is_own: bool, client: str = "") -> str:
        self.prompt = await super().render(request, is_own=is_own, client=client)
        return self.prompt


class Scripted(NamedTuple):
    """A server whose model says the texts of a test."""

    server: Serving
    device: ScriptedDevice
    renderer: Recording
    form: str

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as the model writes it."""
        text = json.dumps({"name": name, "arguments": arguments})
        return text if self.form == "generic" else f"<tool_call>\n{text}\n</tool_call>"

    def answer(self, text: str) -> str:
        """A final answer as the model writes it."""
        if self.form != "generic":
            return text
        return json.dumps({"name": "answer", "arguments": {"text": text}})


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Scripted]]:
    with ExitStack() as stack:
        found: dict[str, Scripted] = {}
        for template, form in FORMS.items():
            engine, device = scripted_engine(template)
            renderer = Recording()
            server = stack.enter_context(serving(engine, renderer=renderer))
            found[template] = Scripted(server, device, renderer, form)
        yield found


def converse(scripted: Scripted, kind: Any, **options: bool) -> None:
    """The conversation: each turn arrives as the model wrote it, and is in the next prompts."""
    device, renderer = scripted.device, scripted.renderer
    turns = [*CONVERSATION, *([TWO_CALLS] if scripted.form != "generic" else [])]
    text = ""
    tools = Tools(on_call=lambda: device.speak(scripted.answer(text)))
    with kind(Connection(scripted.server.url, "scripted", 400), tools, **options) as ask:
        for question, calls, text in turns:
            written = "\n".join(scripted.call(*call) for call in calls)
            device.speak(written or scripted.answer(text))
            assert (ask(question), tools.take()) == (text, calls)
            assert question in renderer.prompt and written in renderer.prompt
    texts = ["18 degrees, cloudy", *(scripted.call(*WEATHER), scripted.call(*SUM))]
    num_calls = 1 if scripted.form == "generic" else 2
    assert [renderer.prompt.count(one) for one in texts] == [num_calls] * len(texts)
    for question, _, text in turns[:-1]:
        assert renderer.prompt.count(scripted.answer(text)) == 1, question


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("template", FORMS)
@pytest.mark.parametrize("kind", AGENTS)
def test_loops(servers: dict[str, Scripted], kind: str, template: str, stream: bool) -> None:
    converse(servers[template], AGENTS[kind], stream=stream)


@pytest.mark.parametrize("template", FORMS)
def test_langchain_over_responses(servers: dict[str, Scripted], template: str) -> None:
    converse(servers[template], AGENTS["langchain"], stream=False, responses=True)


@pytest.mark.nightly
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("template", FORMS)
@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_frameworks(
    servers: dict[str, Scripted], kind: str, template: str, stream: bool, responses: bool
) -> None:
    converse(servers[template], FRAMEWORKS[kind], stream=stream, responses=responses)
