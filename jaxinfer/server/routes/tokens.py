"""Token ids of texts and chats, and the handlers of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from jaxinfer.core.errors import RequestError
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.fields import field_error
from jaxinfer.server.openai.responses import Detokenized, Tokenized
from jaxinfer.server.openai.schema import ChatFields, DetokenizeRequest, TokenizeRequest
from jaxinfer.server.service.endpoint import Call, Route, json_response
from jaxinfer.server.service.limits import too_large
from jaxinfer.server.service.service import Service, run_off_loop


def chosen_template(service: Service, request: ChatFields) -> str | None:
    """The request's chat template, or the server's; None for the model's own. An empty one is as
    absent.
    """
    template = request.chat_template
    if not template:
        return service.config.chat_template
    if not service.config.trust_request_chat_template:
        raise field_error(
            "chat_template",
            "chat_template of a request is a program and not run here; start the server with "
            "--trust-request-chat-template, or with --chat-template",
        )
    return template


async def chat_prompt(
    call: Call, request: ChatFields, messages: Sequence[Any], add_special_tokens: bool
) -> Prompt:
    """The prompt for ``messages``; raises ``RequestError``, ``TokenizerError`` or ``ApiError``."""
    service = call.service
    template = chosen_template(service, request)
    variables = {
        **service.config.default_chat_template_kwargs,
        **request.template_variables,
        **(request.chat_template_kwargs or {}),
    }
    rendered = service.render(
        messages,
        variables,
        template,
        is_own=not request.chat_template,
        client=call.caller.client,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    text = await call.unless_gone(rendered)
    return (await service.encode_all([text], add_special_tokens=add_special_tokens))[0]


async def tokenize(call: Call) -> ASGIApp:
    """Token ids of a prompt, or of messages rendered by the chat template."""
    request = await call.parse(TokenizeRequest)
    service = call.service
    if request.messages is not None:
        call.prompt_field = "messages"
        special = bool(request.add_special_tokens)
        prompt = await chat_prompt(call, request, request.messages, special)
    else:
        special = request.add_special_tokens is not False
        texts = [request.prompt or ""]
        prompt = (await service.encode_all(texts, add_special_tokens=special))[0]
    pieces = None
    if request.return_token_strs:
        piece = service.tokenizer.token_piece
        pieces = await run_off_loop(lambda: list(map(piece, prompt.token_ids)), call.is_small)
    return json_response(
        Tokenized(
            count=len(prompt.token_ids),
            max_model_len=service.client.limits.max_model_len,
            tokens=list(prompt.token_ids),
            token_strs=pieces,
        )
    )


async def detokenize(call: Call) -> ASGIApp:
    """The text of token ids, special tokens included."""
    request = await call.parse(DetokenizeRequest)
    tokenizer = call.service.tokenizer
    last = call.service.client.facts.vocab_size - 1
    if (largest := max(request.tokens, default=0)) > last:
        raise RequestError(f"tokens holds {largest}; the vocabulary ends at {last}")
    size = len(request.tokens) * tokenizer.max_token_characters
    if size > (most := call.service.config.max_answer_bytes):
        raise too_large("tokens", size, most)
    decode = partial(tokenizer.decode, request.tokens, skip_special_tokens=False)
    text = await run_off_loop(decode, call.is_small)
    return json_response(Detokenized(prompt=text))


ROUTES = (
    Route(
        "POST",
        "/tokenize",
        tokenize,
        "tokenize",
        "Token ids of a prompt, or of messages as the model would see them.",
        Tokenized,
        TokenizeRequest,
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        "detokenize",
        "The text of token ids.",
        Detokenized,
        DetokenizeRequest,
    ),
)
