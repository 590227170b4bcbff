"""The request of ``POST /v1/responses``, and the chat that it means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.server.api.fields import (
    NO_BEAMS,
    UNSUPPORTED,
    GenerationFields,
    Neutral,
    bounds,
    field_error,
    one_of,
)
from jaxinfer.server.api.structured import GUIDED, JsonSchemaFormat, ResponseFormat
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.schema import ChatCompletionRequest, Tools
from jaxinfer.server.responses.items import (
    Item,
    check_outputs,
    hosted_items,
    input_items,
    messages_of,
)
from jaxinfer.server.responses.tools import Origin, chat_choice, chat_tools, hosted, origins

LOGPROBS = "message.output_text.logprobs"  # of ``include``
# Thoughts are sent as text, which clients can send back.
ENCRYPTED = "reasoning.encrypted_content"

# the fields of the chat that a request means, as the request names them
_RENAMED = (
    (re.compile(r"\bresponse_format\.json_schema\.schema\b"), "text.format.schema"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\btools\[(\d+)\]\.(function|custom)\b"), r"tools[\1]"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
)
# fields of other routes' requests that this one has under another name, or not at all
_FOREIGN = (
    *("max_tokens", "response_format", *GUIDED, "guided_whitespace_pattern", "prompt_logprobs"),
    *("truncate_prompt_tokens",),
)

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """``text.format``. Answers follow a schema with or without ``strict``."""

    type: Annotated[str, one_of("text", "json_object", "json_schema")]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``text``."""

    format: TextFormat | None = None
    verbosity: Annotated[str, one_of("medium")] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``reasoning``. Thoughts are never summarised: a summary has all of their text."""

    effort: str | None = None
    summary: Annotated[str, one_of("auto", "concise", "detailed")] | None = None
    generate_summary: Annotated[str, one_of("auto", "concise", "detailed")] | None = None


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True, dict=True):
    """``POST /v1/responses``: the fields of OpenAI, and the sampling fields of other routes."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {
            **UNSUPPORTED,
            **NO_BEAMS,
            **dict.fromkeys(_FOREIGN, (None,)),
            **dict.fromkeys(("access_programs", "conversation", "image", "moderation"), (None,)),
            "context_management": (None, []),
            "n": (None, 1),
            "prompt": (None,),
            "return_token_ids": (None, False),
            "service_tier": (None, "auto", "default"),
            "taps": (None, []),
        }
    )
    ignored: ClassVar[tuple[str, ...]] = (
        *(
            "client_metadata",
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
        ),
        *("safety_identifier", "session_id", "user"),
    )
    logprobs_field: ClassVar[str] = "top_logprobs"

    input: str | Annotated[tuple[dict[str, Any], ...], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    max_output_tokens: Annotated[int, bounds("max_tokens")] | None = None
    include: tuple[Annotated[str, one_of(LOGPROBS, ENCRYPTED)], ...] = ()
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    truncation: Annotated[str, one_of("auto", "disabled")] = "disabled"
    metadata: Metadata = msgspec.field(default_factory=dict)
    store: bool = True
    background: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The items of ``input``; raises ``ApiError``."""
        return input_items(self.input)

    @property
    def hosted(self) -> list[tuple[str, str]]:
        """The path and kind of each tool, and of each of their items, that this server does not
        run.
        """
        return [*hosted(self.tools or ()), *hosted_items(self.items)]

    @property
    def origins(self) -> Mapping[str, Origin]:
        """The tools by the names of their functions in the chat."""
        return origins(self.tools or ())

    @property
    def has_logprobs(self) -> bool:
        """True if the answer lists the logprobs of its tokens."""
        return LOGPROBS in self.include

    @property
    def summarises(self) -> bool:
        """True if thoughts are sent as a summary."""
        return bool(self.reasoning.summary or self.reasoning.generate_summary)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.has_logprobs:
            raise field_error("top_logprobs", f'top_logprobs needs include=["{LOGPROBS}"]; set it')
        if self.background and not self.store:
            raise field_error("background", "background needs store=true; set it")
        try:
            self.chat().check()
        except ApiError as error:
            raise renamed(error) from None

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.has_logprobs else None

    def chat(self, earlier: Sequence[Item] = ()) -> ChatCompletionRequest:
        """The chat of this request after the ``earlier`` items; raises ``ApiError``."""
        if earlier or self.previous_response_id is None:
            check_outputs(earlier, self.items)
        messages = messages_of((*earlier, *self.items), self.instructions)
        tools, choice = chat_choice(chat_tools(self.tools or ()), self.tool_choice)
        return ChatCompletionRequest(
            **{name: getattr(self, name) for name in _SHARED},
            messages=tuple(messages),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=_response_format(self.text.format),
            tools=tuple(tools) or None,
            tool_choice=choice,
            reasoning_effort=self.reasoning.effort,
        )


_SHARED = tuple(  # fields that have the same name and meaning in a chat
    name
    for name in (
        *GenerationFields.__struct_fields__,
        *("parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget"),
    )
    if name not in ResponsesRequest.unsupported
)


def renamed(error: ApiError) -> ApiError:
    """An error about a field of the chat as one about the request's own field."""
    for pattern, name in _RENAMED:
        error.message = pattern.sub(name, error.message)
        error.param = None if error.param is None else pattern.sub(name, error.param)
    return error


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None or given.type == "text":
        return None
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    if given.schema is None:
        raise field_error("text.format.schema", "text.format.schema is required")
    schema = JsonSchemaFormat(name=given.name, schema=given.schema, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)
