"""A request of Anthropic's API as one of OpenAI's chats, which the rest of the server answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from jaxinfer.server.anthropic.inputs import (
    AssistantInput,
    InputMessage,
    RedactedThoughtsInput,
    TextInput,
    ThoughtsInput,
    ToolChoiceInput,
    ToolInput,
    ToolResultInput,
    ToolUseInput,
    UserInput,
)
from jaxinfer.server.api.fields import RequestedTokens, field_error
from jaxinfer.server.api.tools import check_function
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.schema import ChatCompletionRequest

# The block that Claude Code puts before its system prompt. It has a number that differs from
# request to request, with which no prefix would ever be found in the cache.
BILLING = "x-anthropic-billing-header:"
CUSTOM = "custom"  # the type of the client's own tools
SCHEMA_FIELD = "output_config.format.schema"


class MessagesChat(ChatCompletionRequest, frozen=True, kw_only=True, dict=True):
    """A chat with the differences of Anthropic's API."""

    budget_field: ClassVar[str] = "thinking.budget_tokens"
    budget_is_optional: ClassVar[bool] = True  # Claude Code always sends it

    schema: dict[str, Any] | None = None  # of the answer
    shows_thoughts: bool = True  # False: blocks of thoughts are sent without their text

    def output_limit(self) -> int | None:
        return self.max_tokens

    def requested_tokens(self) -> RequestedTokens | None:
        """None: an answer may end sooner, with the context, and then says so."""
        return None

    def chosen_form(self) -> tuple[str, Mapping[str, Any]] | None:
        return None if self.schema is None else (SCHEMA_FIELD, {"json": self.schema})

    def check(self) -> None:
        super().check()
        if self.schema is not None and self.chosen_tools.mode == "required":
            raise field_error(
                "tool_choice",
                "tool_choice requires a call, which has its own form; leave out "
                "output_config.format",
            )


def chat_messages(
    system: str | Sequence[TextInput] | None, messages: Sequence[InputMessage]
) -> tuple[dict[str, Any], ...]:
    """The messages of the chat. Neighbouring messages of one role are one turn. Raises ``ApiError``
    for a result whose call is not in it.
    """
    _check_results(messages)
    chat: list[dict[str, Any]] = []
    if system and (content := _system(_blocks(system))):
        chat.append({"role": "system", "content": content})
    for kind, turn in groupby(messages, type):
        blocks = [block for message in turn for block in _blocks(message.content)]
        if kind is AssistantInput:
            chat.append(_assistant(blocks))
        elif kind is UserInput:
            chat += _user(blocks)
        else:
            chat.append({"role": "system", "content": _system(blocks)})
    return tuple(chat)


def continues_answer(messages: Sequence[InputMessage]) -> bool:
    """True if the answer goes on with the last message; raises ``ApiError`` if it cannot."""
    last = messages[-1]
    if not isinstance(last, AssistantInput):
        return False
    if any(isinstance(block, ToolUseInput) for block in _blocks(last.content)):
        where = f"messages[{len(messages) - 1}]"
        raise field_error(where, f"{where} has calls, so their results must follow it")
    return True


def chat_tools(tools: Sequence[ToolInput]) -> tuple[dict[str, Any], ...]:
    """The tools in OpenAI's form; raises ``ApiError`` naming the field that is wrong."""
    functions: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        if tool.type not in (None, CUSTOM):
            continue
        if tool.input_schema is None:
            where = f"tools[{number}].input_schema"
            raise field_error(where, f"{where} is required")
        described = {} if tool.description is None else {"description": tool.description}
        strict = {} if tool.strict is None else {"strict": tool.strict}
        function = {"name": tool.name, **described, "parameters": tool.input_schema, **strict}
        try:
            check_function(f"tools[{number}]", function, functions)
        except ApiError as error:
            raise _with_input_schema(error) from None
        functions[tool.name] = function
    return tuple({"type": "function", "function": one} for one in functions.values())


def hosted_tools(tools: Sequence[ToolInput]) -> list[tuple[str, str]]:
    """The path and kind of each tool that only Anthropic's servers or models know."""
    return [
        (f"tools[{number}]", tool.type)
        for number, tool in enumerate(tools)
        if tool.type is not None and tool.type != CUSTOM
    ]


def chat_tool_choice(choice: ToolChoiceInput, tools: Sequence[Any]) -> str | dict[str, Any]:
    """The choice in OpenAI's form; raises ``ApiError``."""
    if choice.type in ("any", "tool") and not tools:
        raise field_error("tool_choice", f"tool_choice is {choice.type}, but tools is empty")
    if choice.type == "tool":
        if choice.name is None:
            raise field_error("tool_choice.name", "tool_choice.name is required if type is tool")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _with_input_schema(error: ApiError) -> ApiError:
    """An error about a tool in OpenAI's form with the name that its schema has here."""
    name = re.compile(r"^(tools\[\d+\])\.parameters\b")
    error.message = name.sub(r"\1.input_schema", error.message)
    error.param = name.sub(r"\1.input_schema", error.param or "")
    return error


def _check_results(messages: Sequence[InputMessage]) -> None:
    ids = set[str]()
    for number, message in enumerate(messages):
        for index, block in enumerate(_blocks(message.content)):
            if isinstance(block, ToolUseInput):
                ids.add(block.id)
            elif isinstance(block, ToolResultInput) and block.tool_use_id not in ids:
                where = f"messages[{number}].content[{index}].tool_use_id"
                raise field_error(
                    where,
                    f"{where} {block.tool_use_id!r:.60} is not the id of an earlier tool_use; send "
                    "that block too",
                )


def _blocks[B](content: str | Sequence[B]) -> Sequence[B | TextInput]:
    return [TextInput(text=content)] if isinstance(content, str) else content


def _system(blocks: Iterable[Any]) -> str | list[dict[str, str]]:
    texts = [_without_billing(block.text) for block in blocks]
    return _content([text for text in texts if text])


def _without_billing(text: str) -> str:
    if not text.startswith(BILLING):
        return text
    return text.partition("\n")[2]


def _user(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Messages of the user, and of each tool, in the order of the blocks."""
    if not blocks:
        yield {"role": "user", "content": ""}
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResultInput)):
        if not is_result:
            yield {"role": "user", "content": _content([block.text for block in group])}
            continue
        for block in group:
            texts = [part.text for part in _blocks(block.content or "")]
            failed = {"is_error": True} if block.is_error else {}
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _content(texts),
                **failed,
            }


def _assistant(blocks: Iterable[Any]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextInput():
                texts.append(block.text)
            case ThoughtsInput():
                thoughts.append(block.thinking)
            case ToolUseInput():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case RedactedThoughtsInput():
                pass
    return {
        "role": "assistant",
        "content": _content(texts),
        "reasoning_content": "\n".join(thoughts),
        "tool_calls": calls,
    }


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """One text as text, which every template takes, and several as parts."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
