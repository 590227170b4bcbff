"""Agents with two tools, one for each client library: a loop of model and tools over HTTP.

Owns: ``Tools``, ``AGENTS`` and ``FRAMEWORKS``. The libraries of ``FRAMEWORKS`` run the loop
themselves and are not in the extra ``dev``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from anthropic import Anthropic
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI

from kit.openai_server import SECONDS

MAX_TURNS = 4  # of the model, for one question
GREEDY: dict[str, Any] = {"temperature": 0}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SCHEMAS = {"get_weather": CITY, "add": NUMBERS}

type Ask = Callable[[str], str]  # a question of the user to the final text of the model


class Connection(NamedTuple):
    """A server's model, and the most tokens of an answer."""

    url: str
    model: str
    max_tokens: int
    key: str = "none"

    @property
    def options(self) -> dict[str, Any]:
        """The options that all clients have."""
        return {"api_key": self.key, "max_retries": 0, "timeout": SECONDS}


class Tools:
    """The functions, and the calls since the last ``take``. ``on_call`` is called in each."""

    def __init__(self, on_call: Callable[[], None] = lambda: None) -> None:
        self._calls: list[tuple[str, dict[str, Any]]] = []

        def get_weather(city: str) -> str:
            """The weather of a city."""
            self._calls.append(("get_weather", {"city": city}))
            on_call()
            return "18 degrees, cloudy"

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            self._calls.append(("add", {"a": a, "b": b}))
            on_call()
            return a + b

        self.functions: list[Callable[..., Any]] = [get_weather, add]

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """The calls so far, which are forgotten; sorted, as frameworks run several at once."""
        calls, self._calls[:] = sorted(self._calls, key=str), []
        return calls

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call as text."""
        (function,) = [one for one in self.functions if one.__name__ == name]
        return str(function(**arguments))

    def described(self, key: str) -> list[dict[str, Any]]:
        """The functions for an API, with their schemas under this key."""
        return [
            {"name": one.__name__, "description": one.__doc__, key: SCHEMAS[one.__name__]}
            for one in self.functions
        ]


# loops that are written here


@contextmanager
def chat_agent(to: Connection, tools: Tools, *, stream: bool) -> Iterator[Ask]:
    """The openai client's chat completions."""
    described = [{"type": "function", "function": one} for one in tools.described("parameters")]
    options: Any = {"model": to.model, "max_tokens": to.max_tokens, "tools": described, **GREEDY}
    messages: list[Any] = []

    def ask(question: str) -> str:
        messages.append({"role": "user", "content": question})
        for _ in range(MAX_TURNS):
            if stream:
                with client.chat.completions.stream(messages=messages, **options) as events:
                    events.until_done()
                    message = events.current_completion_snapshot.choices[0].message
            else:
                answer = client.chat.completions.create(messages=messages, **options)
                message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                assert call.type == "function"
                result = tools.run(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return messages[-1]["content"]

    with OpenAI(base_url=f"{to.url}/v1", **to.options) as client:
        yield ask


@contextmanager
def responses_agent(to: Connection, tools: Tools, *, stream: bool) -> Iterator[Ask]:
    """The openai client's Responses; each turn names the one before it."""
    described = [{"type": "function", **one} for one in tools.described("parameters")]
    options: Any = {
        "model": to.model,
        "max_output_tokens": to.max_tokens,
        "tools": described,
        **GREEDY,
    }
    last: Any = None

    def ask(question: str) -> str:
        nonlocal last
        given: Any = [{"role": "user", "content": question}]
        for _ in range(MAX_TURNS):
            fields = {**options, "input": given, "previous_response_id": last and last.id}
            if stream:
                with client.responses.stream(**fields) as events:
                    last = next(one for one in reversed(list(events)) if hasattr(one, "response"))
                    last = last.response
            else:
                last = client.responses.create(**fields)
            calls = [one for one in last.output if one.type == "function_call"]
            if not calls:
                break
            given = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": tools.run(call.name, json.loads(call.arguments)),
                }
                for call in calls
            ]
        return last.output_text

    with OpenAI(base_url=f"{to.url}/v1", **to.options) as client:
        yield ask


@contextmanager
def anthropic_agent(to: Connection, tools: Tools, *, stream: bool) -> Iterator[Ask]:
    """The anthropic client."""
    options: Any = {"model": to.model, "max_tokens": to.max_tokens, "extra_body": GREEDY}
    options["tools"] = tools.described("input_schema")
    messages: list[Any] = []

    def ask(question: str) -> str:
        content: Any = question
        answer: Any = None
        for _ in range(MAX_TURNS):
            messages.append({"role": "user", "content": content})
            if stream:
                with client.messages.stream(messages=messages, **options) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(messages=messages, **options)
            messages.append({"role": "assistant", "content": answer.content})
            used = [block for block in answer.content if block.type == "tool_use"]
            if not used:
                break
            content = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": tools.run(block.name, block.input),
                }
                for block in used
            ]
        return "".join(block.text for block in answer.content if block.type == "text")

    with Anthropic(base_url=to.url, **to.options) as client:
        yield ask


@contextmanager
def langchain_agent(
    to: Connection, tools: Tools, *, stream: bool, responses: bool = False
) -> Iterator[Ask]:
    """langchain's chat model with bound tools."""
    chat = langchain_chat(to, use_responses_api=responses)
    described = [{"type": "function", "function": one} for one in tools.described("parameters")]
    bound = chat.bind_tools(described)
    messages: list[AnyMessage] = []

    def ask(question: str) -> str:
        messages.append(HumanMessage(question))
        for _ in range(MAX_TURNS):
            if stream:
                first, *others = bound.stream(messages)
                answer: Any = first
                for chunk in others:
                    answer += chunk
            else:
                answer = bound.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                result = tools.run(call["name"], call["args"])
                messages.append(ToolMessage(result, tool_call_id=call["id"]))
        return messages[-1].text

    yield ask


def langchain_chat(to: Connection, **options: Any) -> ChatOpenAI:
    """langchain's chat model."""
    options |= {"model": to.model, "max_tokens": to.max_tokens, **to.options, **GREEDY}
    return ChatOpenAI(base_url=f"{to.url}/v1", **options)


# loops of frameworks


@contextmanager
def langchain_created(
    to: Connection, tools: Tools, *, stream: bool, responses: bool = False
) -> Iterator[Ask]:
    """langchain's ``create_agent``."""
    agents: Any = pytest.importorskip("langchain.agents")
    chat = langchain_chat(to, use_responses_api=responses)
    agent = agents.create_agent(chat, tools.functions)
    limit = {"recursion_limit": 2 * MAX_TURNS}
    messages: list[Any] = []

    def ask(question: str) -> str:
        nonlocal messages
        messages = [*messages, HumanMessage(question)]
        if stream:
            modes = ["messages", "values"]
            for mode, data in agent.stream({"messages": messages}, limit, stream_mode=modes):
                messages = data["messages"] if mode == "values" else messages
        else:
            messages = agent.invoke({"messages": messages}, limit)["messages"]
        return messages[-1].text

    yield ask


@contextmanager
def openai_agents(
    to: Connection, tools: Tools, *, stream: bool, responses: bool = False
) -> Iterator[Ask]:
    """openai-agents."""
    agents: Any = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    client = AsyncOpenAI(base_url=f"{to.url}/v1", **to.options)
    agent = agents.Agent(
        name="agent",
        model=kind(model=to.model, openai_client=client),
        tools=[agents.function_tool(one) for one in tools.functions],
        model_settings=agents.ModelSettings(max_tokens=to.max_tokens, **GREEDY),
    )
    items: list[Any] = []

    async def answered(question: str) -> str:
        nonlocal items
        items = [*items, {"role": "user", "content": question}]
        if stream:
            run = agents.Runner.run_streamed(agent, items, max_turns=MAX_TURNS)
            async for _ in run.stream_events():
                pass
        else:
            run = await agents.Runner.run(agent, items, max_turns=MAX_TURNS)
        items = run.to_input_list()
        return run.final_output

    with asyncio.Runner() as runner:
        try:
            yield lambda question: runner.run(answered(question))
        finally:
            runner.run(client.close())


@contextmanager
def pydantic_ai(
    to: Connection, tools: Tools, *, stream: bool, responses: bool = False
) -> Iterator[Ask]:
    """pydantic-ai."""
    library: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    from openai import AsyncOpenAI
    from pydantic_ai.providers.openai import OpenAIProvider  # pyright: ignore

    client = AsyncOpenAI(base_url=f"{to.url}/v1", **to.options)
    provider: Any = OpenAIProvider(openai_client=client)
    kind = models.OpenAIResponsesModel if responses else models.OpenAIChatModel
    settings = {"max_tokens": to.max_tokens, **GREEDY}
    chosen = kind(to.model, provider=provider)
    agent = library.Agent(chosen, tools=tools.functions, model_settings=settings)
    history: Any = None

    async def answered(question: str) -> str:
        nonlocal history
        limits = library.UsageLimits(request_limit=MAX_TURNS)
        options: Any = {"message_history": history, "usage_limits": limits}
        if stream:
            async with agent.run_stream(question, **options) as run:
                output = await run.get_output()
        else:
            run = await agent.run(question, **options)
            output = run.output
        history = run.all_messages()
        return output

    with asyncio.Runner() as runner:
        try:
            yield lambda question: runner.run(answered(question))
        finally:
            runner.run(client.close())


AGENTS = {
    "chat": chat_agent,
    "responses": responses_agent,
    "anthropic": anthropic_agent,
    "langchain": langchain_agent,
}
FRAMEWORKS = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "create_agent": langchain_created,
}
