"""Handlers of Anthropic's Messages API."""

from __future__ import annotations

from starlette.types import ASGIApp

from jaxinfer.server.anthropic.answers import EVENTS, AnswerMessage, TokenCount
from jaxinfer.server.anthropic.schema import CountTokensRequest, MessagesRequest
from jaxinfer.server.anthropic.writer import MessagesWriter
from jaxinfer.server.routes.generation import answer_chat
from jaxinfer.server.routes.tokens import chat_prompt
from jaxinfer.server.service.endpoint import Call, Route, json_response


async def messages(call: Call) -> ASGIApp:
    """Answer a conversation."""
    call.prompt_field = "messages"
    request = await call.parse(MessagesRequest)
    call.refuse_hosted(request.hosted)
    return await answer_chat(call, request.chat, MessagesWriter)


async def count_tokens(call: Call) -> ASGIApp:
    """The number of tokens of a conversation's prompt."""
    call.prompt_field = "messages"
    request = await call.parse(CountTokensRequest)
    call.refuse_hosted(request.hosted)
    chat = request.chat
    prompt = await chat_prompt(call, chat, chat.messages, chat.add_special_tokens)
    return json_response(TokenCount(input_tokens=len(prompt.token_ids)))


ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        messages,
        "createMessage",
        "Answer a conversation, in the form of Anthropic's API.",
        AnswerMessage,
        MessagesRequest,
        EVENTS,
        named_events=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "countTokens",
        "Tokens of the prompt that /v1/messages would make of the same fields.",
        TokenCount,
        CountTokensRequest,
    ),
)
