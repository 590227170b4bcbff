"""The answers of Anthropic's API, whole and as events.

The tags of the structs are the values of their field ``type``; those of events name them too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxinfer.server.openai.responses import AnswerStruct


class _Tagged(AnswerStruct, frozen=True, kw_only=True, tag_field="type"):
    """Base of structs with a ``type``."""


class TextBlock(_Tagged, frozen=True, kw_only=True, tag="text"):
    """Text for the user."""

    text: str


class ThinkingBlock(_Tagged, frozen=True, kw_only=True, tag="thinking"):
    """Thoughts of the model. Clients send them back only with a signature."""

    thinking: Annotated[str, Meta(description="The thoughts.")]
    signature: Annotated[str, Meta(description="A digest of the thoughts; it is not verified.")]


class ToolUseBlock(_Tagged, frozen=True, kw_only=True, tag="tool_use"):
    """A call of one of the request's tools."""

    id: Annotated[str, Meta(description="The id of the call.")]
    name: Annotated[str, Meta(description="The name of the tool.")]
    input: Annotated[dict[str, Any], Meta(description="The arguments; in a stream they follow.")]


type Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageStopReason(StrEnum):
    """Why an answer ended."""

    END_TURN = "end_turn"
    MAX_TOKENS = "max_tokens"
    STOP_SEQUENCE = "stop_sequence"
    TOOL_USE = "tool_use"
    CONTEXT = "model_context_window_exceeded"


class MessageUsage(AnswerStruct, frozen=True, kw_only=True):
    """Tokens of a request. The prompt's are the sum of the three counts of input."""

    input_tokens: Annotated[
        int, Meta(description="Tokens of the prompt that were computed for this request.")
    ]
    cache_creation_input_tokens: Annotated[
        Literal[0], Meta(description="Always 0: every prefix is cached, at no cost.")
    ] = 0
    cache_read_input_tokens: Annotated[
        int, Meta(description="Tokens of the prompt that came from the prefix cache.")
    ]
    output_tokens: Annotated[int, Meta(description="Tokens that were generated.")]


class MessageEnd(AnswerStruct, frozen=True, kw_only=True):
    """How an answer ended; null in a stream until then."""

    stop_reason: Annotated[MessageStopReason | None, Meta(description="Why the answer ended.")] = (
        None
    )
    stop_sequence: Annotated[
        str | None, Meta(description="The one of stop_sequences that ended it, else null.")
    ] = None


class AnswerMessage(_Tagged, frozen=True, kw_only=True, tag="message"):
    """The answer of ``/v1/messages``."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: Annotated[list[Block], Meta(description="Thoughts, text and calls in order.")]
    stop_reason: Annotated[
        MessageStopReason | None, Meta(description="Why the answer ended; in a stream null.")
    ] = None
    stop_sequence: Annotated[
        str | None, Meta(description="The one of stop_sequences that ended it, else null.")
    ] = None
    usage: Annotated[MessageUsage, Meta(description="Tokens of the request.")]


class TokenCount(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: Annotated[int, Meta(description="Tokens of the prompt.")]


# the events of a stream


class TextDelta(_Tagged, frozen=True, kw_only=True, tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(_Tagged, frozen=True, kw_only=True, tag="thinking_delta"):
    """More of the thoughts."""

    thinking: Annotated[str, Meta(description="More of the thoughts.")]


class SignatureDelta(_Tagged, frozen=True, kw_only=True, tag="signature_delta"):
    """The signature of a block of thoughts, before its end."""

    signature: Annotated[str, Meta(description="The signature of the whole block.")]


class InputJsonDelta(_Tagged, frozen=True, kw_only=True, tag="input_json_delta"):
    """More of the input of a call."""

    partial_json: Annotated[str, Meta(description="More of the input, a JSON object as text.")]


type BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(_Tagged, frozen=True, kw_only=True, tag="message_start"):
    """The first event: the message without content."""

    message: AnswerMessage


class Ping(_Tagged, frozen=True, kw_only=True, tag="ping"):
    """An event without meaning."""


class BlockStart(_Tagged, frozen=True, kw_only=True, tag="content_block_start"):
    """A block begins; its content is empty."""

    index: int
    content_block: Annotated[Block, Meta(description="The empty block.")]


class BlockMore(_Tagged, frozen=True, kw_only=True, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: BlockDelta


class BlockStop(_Tagged, frozen=True, kw_only=True, tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageDelta(_Tagged, frozen=True, kw_only=True, tag="message_delta"):
    """The end of the message, with the tokens of the whole request."""

    delta: MessageEnd
    usage: Annotated[MessageUsage, Meta(description="Tokens of the request.")]


class MessageStop(_Tagged, frozen=True, kw_only=True, tag="message_stop"):
    """The last event."""


EVENTS = (MessageStart, Ping, BlockStart, BlockMore, BlockStop, MessageDelta, MessageStop)
type Event = MessageStart | Ping | BlockStart | BlockMore | BlockStop | MessageDelta | MessageStop
