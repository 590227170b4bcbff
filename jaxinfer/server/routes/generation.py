"""Handlers of ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/generate``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from starlette.types import ASGIApp

from jaxinfer.core.version import VERSION
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.openai.fields import GenerationFields, limit_max_tokens, to_sampling
from jaxinfer.server.openai.schema import ChatCompletionRequest, CompletionRequest, GenerateRequest
from jaxinfer.server.openai.writer import ResponseContext, Writer
from jaxinfer.server.openai.writers import ChatWriter, CompletionWriter, GenerateWriter
from jaxinfer.server.routes.endpoint import Call, json_response
from jaxinfer.server.routes.service import Service, run_off_loop
from jaxinfer.server.routes.tokens import chat_prompt

# of an answer that is written in the event loop: with 20 logprobs each about 5 ms
INLINE_TOKENS = 256


async def completions(call: Call) -> ASGIApp:
    """Continue prompts."""
    request = await call.parse(CompletionRequest)
    with_offsets = request.echo and request.logprobs is not None
    prompts = await _prompts(call, request.prompts, request.add_special_tokens, with_offsets)
    return await _answer(call, request, prompts, CompletionWriter)


async def chat_completions(call: Call) -> ASGIApp:
    """Continue a conversation."""
    call.prompt_field = "messages"
    request = await call.parse(ChatCompletionRequest)
    prompt = await chat_prompt(call.service, request, request.messages, request.add_special_tokens)
    return await _answer(call, request, [prompt], ChatWriter)


async def generate(call: Call) -> ASGIApp:
    """Continue one prompt; respond with plain text, ids and times."""
    request = await call.parse(GenerateRequest)
    prompts = await _prompts(call, [request.prompt], request.add_special_tokens)
    return await _answer(call, request, prompts, GenerateWriter)


async def _prompts(
    call: Call,
    given: Sequence[str | tuple[int, ...]],
    add_special_tokens: bool,
    with_offsets: bool = False,
) -> list[Prompt]:
    """The prompts of a request, which are all texts or all token ids."""
    texts = [one for one in given if isinstance(one, str)]
    if texts:
        return await call.service.encode_all(
            texts, add_special_tokens=add_special_tokens, with_offsets=with_offsets
        )
    return [Prompt(None, tuple(one)) for one in given if not isinstance(one, str)]


def _truncated(
    service: Service, prompt: Prompt, keep: int | None, max_tokens: int | None
) -> Prompt:
    """The last ``keep`` tokens of a prompt; -1 keeps all that leave ``max_tokens`` of context."""
    if keep is None:
        return prompt
    if keep < 0:
        keep = max(service.client.limits.max_model_len - (max_tokens or 1), 1)
    return prompt if len(prompt.token_ids) <= keep else Prompt(None, prompt.token_ids[-keep:])


async def _answer[R: GenerationFields](
    call: Call, request: R, prompts: Sequence[Prompt], kind: type[Writer[R]]
) -> ASGIApp:
    service, config = call.service, call.service.config
    sampling = to_sampling(request, service.loaded.defaults, max_logprobs=config.max_logprobs)
    if (form := request.form()) is not None:
        call.form_field = form.field
    sampling = limit_max_tokens(sampling, service.client.facts.max_new_tokens)
    prompts = [
        _truncated(service, prompt, request.truncate_prompt_tokens, sampling.max_tokens)
        for prompt in prompts
    ]
    context = ResponseContext(
        request_id=request.request_id or call.request_id,
        created=int(time.time()),
        model=request.model or service.model_names[0],
        fingerprint=f"jaxinfer-{VERSION}",
        role=config.response_role,
        sends_usage=request.sends_usage or config.enable_force_include_usage,
        tokens_as_ids=(
            config.return_tokens_as_token_ids
            if request.return_tokens_as_token_ids is None
            else request.return_tokens_as_token_ids
        ),
        tokenizer=service.client.tokenizer,
    )
    writer = kind(context, request, prompts)
    answer = service.open(context.request_id, call.route, prompts, sampling, request)
    if request.stream:
        return call.stream(answer, partial(writer.next_events, answer))
    updates = await call.updates(answer)
    return await run_off_loop(
        lambda: json_response(writer.full_response(updates, answer)),
        answer.num_prompt_tokens + answer.num_tokens <= INLINE_TOKENS,
    )
