"""The writer of ``/v1/messages``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec.structs import replace

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.anthropic.answers import (
    AnswerMessage,
    Block,
    BlockDelta,
    BlockMore,
    BlockStart,
    BlockStop,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageStopReason,
    MessageUsage,
    Ping,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from jaxinfer.server.anthropic.chat import MessagesChat
from jaxinfer.server.api.answer import Answer, ChoiceUpdate
from jaxinfer.server.api.choice_parts import ChoicePart, ChoiceParts, NumberedCall
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.responses import encode
from jaxinfer.server.openai.writer import (
    ResponseContext,
    Writer,
    broken_off,
    merged_updates,
)
from jaxinfer.text.answers.call_parts import CallArguments, CallEnd, complete_arguments
from jaxinfer.text.answers.parser import Content, Reasoning


class MessagesWriter(Writer[MessagesChat]):
    """Writes the only choice of a chat. A whole message is what its events add up to."""

    stream_end: ClassVar[bytes] = b""

    def __init__(
        self, context: ResponseContext, request: MessagesChat, prompts: Sequence[Prompt]
    ) -> None:
        super().__init__(context, request, prompts)
        self._parts = ChoiceParts(context.reading, context.request_id, 0)
        self._blocks = Blocks(shows_thoughts=request.shows_thoughts)
        self._has_begun = False

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> AnswerMessage:
        (update,) = merged_updates(updates)
        blocks = assembled(self._new_blocks(update.delta))
        return self._message(answer, blocks, self._end(update.delta, answer))

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        return b"".join(map(_framed, self._events(updates, answer)))

    def final_events(self, answer: Answer) -> bytes:
        return b""  # the last update has them

    def failure(self, error: ApiError) -> bytes:
        return frame(error.anthropic_body(self._context.request_id), b"error")

    def _events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> Iterator[Event]:
        (update,) = merged_updates(updates)
        delta = update.delta
        if not self._has_begun:
            self._has_begun = True
            yield MessageStart(message=self._message(answer, [], MessageEnd()))
            yield Ping()
        yield from self._new_blocks(delta)
        if delta.finish_reason is not None:
            yield MessageDelta(delta=self._end(delta, answer), usage=_usage(answer))
            yield MessageStop()

    def _new_blocks(self, delta: Delta) -> Iterator[Event]:
        for part in self._parts.read(delta):
            yield from self._blocks.add(part)
        if delta.finish_reason is not None:
            yield from self._blocks.close()

    def _message(self, answer: Answer, content: list[Block], end: MessageEnd) -> AnswerMessage:
        return AnswerMessage(
            id=f"msg_{self._context.request_id}",
            model=self._context.model,
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=_usage(answer),
        )

    def _end(self, last: Delta, answer: Answer) -> MessageEnd:
        """How the answer ended; raises ``ApiError`` if it is not complete."""
        match last.finish_reason:
            case FinishReason.STOP if self._parts.ends_with_calls(last):
                return MessageEnd(stop_reason=MessageStopReason.TOOL_USE)
            case FinishReason.STOP if isinstance(last.stop_reason, str):
                reason = MessageStopReason.STOP_SEQUENCE
                return MessageEnd(stop_reason=reason, stop_sequence=last.stop_reason)
            case FinishReason.STOP:
                return MessageEnd(stop_reason=MessageStopReason.END_TURN)
            case FinishReason.LENGTH if answer.num_tokens == answer.sampling.max_tokens:
                return MessageEnd(stop_reason=MessageStopReason.MAX_TOKENS)
            case FinishReason.LENGTH:
                return MessageEnd(stop_reason=MessageStopReason.CONTEXT)
            case reason:
                raise broken_off(reason)


class Blocks:
    """The events of an answer's blocks, one of which is open at a time."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._index = -1  # of the last block
        # what it consists of
        self._open: type[Content] | type[Reasoning] | type[NumberedCall] | None = None
        self._digest = hashlib.sha256()  # of the thoughts in it

    def add(self, part: ChoicePart) -> Iterator[Event]:
        """The events of the next part."""
        match part:
            case NumberedCall():
                yield from self.close()
                yield self._start(ToolUseBlock(id=part.id, name=part.name, input={}))
                self._open = NumberedCall
            case CallArguments():
                yield self._more(InputJsonDelta(partial_json=part.text))
            case CallEnd():
                yield from self.close()
            case Content() if part.text:
                if self._open is not Content:
                    yield from self.close()
                    yield self._start(TextBlock(text=""))
                    self._open = Content
                yield self._more(TextDelta(text=part.text))
            case Reasoning() if part.text:
                if self._open is not Reasoning:
                    yield from self.close()
                    yield self._start(ThinkingBlock(thinking="", signature=""))
                    self._open, self._digest = Reasoning, hashlib.sha256()
                self._digest.update(part.text.encode())
                if self._shows_thoughts:
                    yield self._more(ThinkingDelta(thinking=part.text))
            case _:  # text that is held back
                return

    def close(self) -> Iterator[Event]:
        """The events that end the open block, if there is one."""
        if self._open is None:
            return
        if self._open is Reasoning:
            yield self._more(SignatureDelta(signature=self._digest.hexdigest()))
        self._open = None
        yield BlockStop(index=self._index)

    def _start(self, block: Block) -> Event:
        self._index += 1
        return BlockStart(index=self._index, content_block=block)

    def _more(self, delta: BlockDelta) -> Event:
        return BlockMore(index=self._index, delta=delta)


def assembled(events: Iterable[Event]) -> list[Block]:
    """The blocks that events add up to. Since the input of a call must be an object, one that is
    cut off has the arguments before the last one.
    """
    blocks: list[Block] = []
    inputs: list[str] = []
    for event in events:
        match event:
            case BlockStart():
                blocks.append(event.content_block)
                inputs = []
            case BlockMore(delta=InputJsonDelta(partial_json=text)):
                inputs.append(text)
            case BlockMore():
                blocks[-1] = _extended(blocks[-1], event.delta)
            case BlockStop() if isinstance(block := blocks[-1], ToolUseBlock):
                blocks[-1] = replace(block, input=complete_arguments("".join(inputs)))
            case _:
                pass
    return blocks


def _extended(block: Block, delta: BlockDelta) -> Block:
    match block, delta:
        case TextBlock(), TextDelta():
            return replace(block, text=block.text + delta.text)
        case ThinkingBlock(), ThinkingDelta():
            return replace(block, thinking=block.thinking + delta.thinking)
        case ThinkingBlock(), SignatureDelta():
            return replace(block, signature=delta.signature)
        case _:
            raise AssertionError(f"{delta} in {block}")


def _usage(answer: Answer) -> MessageUsage:
    """Tokens of the request so far."""
    num_cached = answer.reported_cached_tokens or 0
    return MessageUsage(
        input_tokens=answer.num_prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=answer.num_tokens,
    )


def _framed(event: Event) -> bytes:
    """The event with its name, which is its tag."""
    return frame(encode(event), str(event.__struct_config__.tag).encode())
