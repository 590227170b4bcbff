"""The requests of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from jaxinfer.core.sampling_checks import WHOLE_BOUNDS
from jaxinfer.server.anthropic.chat import (
    MessagesChat,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    continues_answer,
    hosted_tools,
)
from jaxinfer.server.anthropic.inputs import (
    InputMessage,
    OutputConfig,
    TextInput,
    ThinkingInput,
    ToolChoiceInput,
    ToolInput,
)
from jaxinfer.server.api.fields import (
    MAX_STOP_STRINGS,
    AnyRequest,
    CacheSalt,
    Neutral,
    Priority,
    RequestPart,
    StopString,
    bounds,
    field_error,
)
from jaxinfer.server.api.tools import MAX_TOOLS

UNSUPPORTED: Neutral = MappingProxyType(
    {
        "container": (None,),
        "mcp_servers": (None, []),
        "output_format": (None,),  # of older clients; newer ones send output_config.format
        "speed": (None, "standard"),
        "thread": (None,),  # a conversation that the server holds; clients can send it whole
    }
)
# without an effect: prefixes are cached by themselves, and there is one tier of service
IGNORED = (
    *("cache_control", "context_management", "diagnostics", "inference_geo", "metadata"),
    *("service_tier", "user_profile_id", "workspace_id"),
)


class CountTokensRequest(AnyRequest, frozen=True, kw_only=True, dict=True):
    """``POST /v1/messages/count_tokens``: the fields that a prompt is made of."""

    unsupported: ClassVar[Neutral] = UNSUPPORTED
    unsupported_codes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"thread": "thread_unsupported_request"}
    )
    ignored: ClassVar[tuple[str, ...]] = IGNORED
    nested: ClassVar[Mapping[str, type[RequestPart]]] = MappingProxyType(
        {
            "tool_choice": ToolChoiceInput,
            "thinking": ThinkingInput,
            "output_config": OutputConfig,
        }
    )

    messages: Annotated[
        tuple[InputMessage, ...],
        Meta(
            min_length=1,
            description="The turns: neighbouring messages of one role are joined, and a last "
            "message of the assistant is continued.",
        ),
    ]
    system: Annotated[
        str | tuple[TextInput, ...] | None,
        Meta(description="The system prompt. Claude Code's line for its billing is left out."),
    ] = None
    tools: Annotated[
        Annotated[tuple[ToolInput, ...], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="The tools that the model may call."),
    ] = None
    tool_choice: Annotated[
        ToolChoiceInput | None, Meta(description="Which tools it may or must call.")
    ] = None
    thinking: Annotated[
        ThinkingInput | None, Meta(description="Absent: as the chat template has it.")
    ] = None
    output_config: Annotated[
        OutputConfig | None, Meta(description="Effort and form of the answer.")
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None  # not of Anthropic's API

    @cached_property
    def chat(self) -> MessagesChat:
        """The same request as one of ``/v1/chat/completions``; raises ``ApiError``."""
        choice, thinking = self.tool_choice, self.thinking
        tools, continues = chat_tools(self.tools or ()), continues_answer(self.messages)
        variables, effort = self.chat_template_kwargs or {}, None
        if self.output_config is not None:
            effort = self.output_config.effort
        if thinking is not None and thinking.type == "disabled":
            effort = "none"
        elif thinking is not None:  # in some templates it is off unless it is set
            variables = {"enable_thinking": True, "thinking": True, **variables}
        return MessagesChat(
            model=self.model,
            messages=chat_messages(self.system, self.messages),
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tools=tools,
            tool_choice=None if choice is None else chat_tool_choice(choice, tools),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            reasoning_effort=effort,
            chat_template_kwargs=variables,
            **self._answer_fields(),
        )

    @property
    def hosted(self) -> list[tuple[str, str]]:
        """The path and kind of each tool that only Anthropic's servers or models know."""
        return hosted_tools(self.tools or ())

    def check(self) -> None:
        thinking = self.thinking
        if thinking and thinking.type == "enabled" and thinking.budget_tokens is None:
            raise field_error(
                "thinking.budget_tokens",
                "thinking.budget_tokens is required if thinking.type is enabled; adaptive needs "
                "none",
            )
        self.chat.check()

    def _answer_fields(self) -> dict[str, Any]:
        """The chat's fields that do not change its prompt."""
        return {}


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, dict=True):
    """``POST /v1/messages``."""

    max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=WHOLE_BOUNDS["max_tokens"][1],
            description="Most tokens to generate, with those of thoughts. The answer may end "
            "sooner, with the context.",
        ),
    ]
    stop_sequences: Annotated[
        tuple[StopString, ...],
        Meta(max_length=MAX_STOP_STRINGS, description="Texts that end the answer."),
    ] = ()
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    stream: bool = False
    # not of Anthropic's API
    seed: Annotated[int, bounds("seed")] | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    timeout: Annotated[float, Meta(gt=0.0)] | None = None  # seconds

    def _answer_fields(self) -> dict[str, Any]:
        thinking, config = self.thinking, self.output_config
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        own = ("seed", "priority", "cache_salt", "timeout")
        return {
            **{name: getattr(self, name) for name in (*same, *own)},
            "stop": self.stop_sequences,
            "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
            "shows_thoughts": thinking is None or thinking.display != "omitted",
            "schema": config.format.schema if config and config.format else None,
        }
