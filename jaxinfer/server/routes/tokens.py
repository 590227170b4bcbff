"""Handlers of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from starlette.types import ASGIApp

from jaxinfer.core.errors import RequestError
from jaxinfer.server.openai.responses import Detokenized, Tokenized
from jaxinfer.server.openai.schema import DetokenizeRequest, TokenizeRequest
from jaxinfer.server.routes.endpoint import Call, json_response
from jaxinfer.server.routes.prompts import chat_prompt


async def tokenize(call: Call) -> ASGIApp:
    """Token ids of a prompt, or of messages rendered by the chat template."""
    request = await call.parse(TokenizeRequest)
    service = call.service
    if request.messages is not None:
        call.prompt_field = "messages"
        special = bool(request.add_special_tokens)
        prompt = await chat_prompt(service, request, request.messages, special)
    else:
        special = request.add_special_tokens is not False
        prompt = await service.encode(request.prompt or "", add_special_tokens=special)
    pieces = None
    if request.return_token_strs:
        piece = service.tokenizer.token_piece
        pieces = await call.run_off_loop(lambda: [piece(token_id) for token_id in prompt.token_ids])
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
    text = await call.run_off_loop(
        lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)
    )
    return json_response(Detokenized(prompt=text))
