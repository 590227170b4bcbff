"""The parts of a request: messages with their blocks, tools, and settings.

Other kinds of blocks (images, documents, results of Anthropic's own tools) and of tools are refused
by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.server.api.fields import KIND_TEXT, RequestPart, one_of

NO_EFFECT = Meta(description="Accepted, without an effect.")


class _Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all blocks."""

    cache_control: Annotated[Any, NO_EFFECT] = None


class TextInput(_Block, frozen=True, kw_only=True, tag="text"):
    """Text."""

    text: Annotated[str, Meta(description="The text.")]


class ThoughtsInput(_Block, frozen=True, kw_only=True, tag="thinking"):
    """Thoughts of an earlier answer."""

    thinking: Annotated[str, Meta(description="The thoughts.")]
    signature: Annotated[str | None, NO_EFFECT] = None


class RedactedThoughtsInput(_Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Thoughts that only Anthropic's servers can read; they are left out of the prompt."""

    data: Annotated[str | None, NO_EFFECT] = None


class ToolUseInput(_Block, frozen=True, kw_only=True, tag="tool_use"):
    """A call in an earlier answer."""

    id: Annotated[str, Meta(min_length=1, description="The id, which its result repeats.")]
    name: Annotated[str, Meta(description="The name of the tool.")]
    input: Annotated[dict[str, Any], Meta(description="The arguments.")]


class ToolReferenceInput(_Block, frozen=True, kw_only=True, tag="tool_reference"):
    """A tool that the client's search has found; the prompt has its definition from the start."""

    tool_name: Annotated[str, Meta(description="The name of the tool.")]

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return f"The tool {self.tool_name} is available."


class ToolResultInput(_Block, frozen=True, kw_only=True, tag="tool_result"):
    """The result of a call."""

    tool_use_id: Annotated[str, Meta(min_length=1, description="The id of the call.")]
    content: Annotated[
        str | tuple[TextInput | ToolReferenceInput, ...] | None,
        Meta(description="What the tool has returned."),
    ] = None
    is_error: Annotated[
        bool | None,
        Meta(description="Whether the call failed; the chat template gets it with the result."),
    ] = None


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """Base of all messages."""


class UserInput(_Message, frozen=True, kw_only=True, tag="user"):
    """A message of the user, or results of tools."""

    content: Annotated[
        str | tuple[TextInput | ToolResultInput, ...],
        Meta(description="Text, or blocks."),
    ]


class AssistantInput(_Message, frozen=True, kw_only=True, tag="assistant"):
    """An earlier answer, or the beginning of the next one."""

    content: Annotated[
        str | tuple[TextInput | ThoughtsInput | RedactedThoughtsInput | ToolUseInput, ...],
        Meta(description="Text, or blocks as an answer has them."),
    ]


class SystemInput(_Message, frozen=True, kw_only=True, tag="system"):
    """Instructions within the conversation; the user's where the chat template takes none there."""

    content: Annotated[str | tuple[TextInput, ...], Meta(description="Text, or blocks of text.")]


type InputMessage = UserInput | AssistantInput | SystemInput


class ToolInput(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[
        str,
        Meta(description="Its name.", extra_json_schema={"pattern": "^[!-~]{1,64}$"}),
    ]
    description: Annotated[str | None, Meta(description="What it does.")] = None
    input_schema: Annotated[
        dict[str, Any] | None,
        Meta(description="The JSON schema of a call's input, an object; hosted tools have none."),
    ] = None
    strict: Annotated[
        bool | None, Meta(description="True: the input of a call follows the schema.")
    ] = None
    type: Annotated[
        Annotated[str, Meta(pattern=KIND_TEXT)] | None,
        Meta(
            description="custom, or the type of a tool that only Anthropic's servers or models "
            "know, with its date; --ignore-hosted-tools leaves such tools out."
        ),
    ] = None
    cache_control: Annotated[Any, NO_EFFECT] = None
    defer_loading: Annotated[
        bool | None, Meta(description="No effect: all tools are in the prompt.")
    ] = None


class ToolChoiceInput(RequestPart, frozen=True, kw_only=True):
    """Which tools the answer may or must call."""

    type: Annotated[
        Annotated[str, one_of("auto", "any", "tool", "none")],
        Meta(description="any: at least one call; tool: a call of the tool of this name."),
    ]
    name: Annotated[str | None, Meta(description="The name of the tool.")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, Meta(description="True: at most one call in an answer.")
    ] = None


class ThinkingInput(RequestPart, frozen=True, kw_only=True):
    """The setting of thoughts before an answer."""

    type: Annotated[
        Annotated[str, one_of("enabled", "adaptive", "between_tools", "disabled")],
        Meta(
            description="enabled has a budget; disabled works with chat templates that know "
            "enable_thinking or thinking."
        ),
    ]
    budget_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32_MAX)] | None,
        Meta(description="Most tokens of the thoughts, which are then ended."),
    ] = None
    display: Annotated[
        Annotated[str, one_of("summarized", "omitted")] | None,
        Meta(description="omitted: blocks of thoughts are sent without their text."),
    ] = None


class OutputFormat(RequestPart, frozen=True, kw_only=True):
    """The form of the answer's text."""

    type: Annotated[Annotated[str, one_of("json_schema")], Meta(description="The only kind.")]
    schema: Annotated[dict[str, Any], Meta(description="The JSON schema.")]


class OutputConfig(RequestPart, frozen=True, kw_only=True):
    """Effort and form of the answer."""

    nested: ClassVar[Mapping[str, type[RequestPart]]] = MappingProxyType({"format": OutputFormat})

    effort: Annotated[
        Annotated[str, one_of("low", "medium", "high", "xhigh", "max")] | None,
        Meta(description="The variable reasoning_effort of the chat template."),
    ] = None
    format: Annotated[OutputFormat | None, Meta(description="The form of the text.")] = None
