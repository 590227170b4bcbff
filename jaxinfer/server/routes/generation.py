"""Handlers of the routes that generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import ASGIApp

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.version import VERSION
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.engine.requests.validate import check_task
from jaxinfer.server.api.answer import Answer
from jaxinfer.server.api.custom_tools import enforceable
from jaxinfer.server.api.fields import (
    GenerationFields,
    field_error,
    limit_max_tokens,
    to_sampling,
)
from jaxinfer.server.api.structured import has_whole_form
from jaxinfer.server.api.tools import AnswerReading, check_names, num_calls
from jaxinfer.server.openai.chat_writer import ChatWriter
from jaxinfer.server.openai.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    GenerateResponse,
    TokensResponse,
)
from jaxinfer.server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    TokensRequest,
)
from jaxinfer.server.openai.writer import ResponseContext, Writer
from jaxinfer.server.openai.writers import CompletionWriter, GenerateWriter, TokensWriter
from jaxinfer.server.routes.tokens import chat_prompt, chosen_template
from jaxinfer.server.service.endpoint import Call, Route, json_response
from jaxinfer.server.service.limits import bounded_answers
from jaxinfer.server.service.service import Service, run_off_loop

# of an answer that is written in the event loop: with 20 logprobs each about 5 ms
INLINE_TOKENS = 256


async def completions(call: Call) -> ASGIApp:
    """Continue prompts."""
    request = await call.parse(CompletionRequest)
    with_offsets = request.echo and request.logprobs is not None
    prompts = await _prompts(call, request.prompts, request.add_special_tokens, with_offsets)
    return await answer_prompts(call, request, prompts, CompletionWriter)


async def chat_completions(call: Call) -> ASGIApp:
    """Continue a conversation."""
    call.prompt_field = "messages"
    return await answer_chat(call, await call.parse(ChatCompletionRequest), ChatWriter)


async def answer_chat[R: ChatCompletionRequest](
    call: Call, request: R, kind: type[Writer[R]]
) -> ASGIApp:
    """Answer a chat of any API, in the form of its writer."""
    service, special = call.service, request.add_special_tokens
    check_task(service.client.limits, pools=False)
    prompt = await chat_prompt(call, request, request.messages, special)
    reading = chat_reading(service, request, prompt)
    return await answer_prompts(call, request, [prompt], kind, reading)


def chat_reading(
    service: Service, request: ChatCompletionRequest, prompt: Prompt
) -> AnswerReading | None:
    """How the answers to a chat are read; None: they are plain text. Raises ``ApiError`` for tools
    that the model's answers cannot call.
    """
    choice = request.chosen_tools
    found = service.answer_format(chosen_template(service, request), choice.tools)
    if choice.tools and (found is None or not found.has_calls):
        raise field_error(
            "tools",
            "the form of tool calls is not known for this model's chat template; start the server "
            "with --tool-call-parser, or leave tools out",
        )
    check_names(found, choice)
    if found is not None and not choice.tools:
        found = found.without_calls()
    if found is not None and not _reads_bare_calls(service, request):
        found = found.with_marked_calls()
    if found is not None and found.is_generic and choice.tools and request.form_field is None:
        found = found.without_text()
    if found is None or not (found.has_calls or found.has_reasoning):
        return None
    return AnswerReading(
        found,
        prompt.text or "",
        choice.functions,
        service.hidden if request.skip_special_tokens else None,
        request.parallel_tool_calls and not choice.is_named,
        num_calls(request.messages),
        choice.custom,
        content_is_last=has_whole_form(request.chosen_form()),
    )


def _reads_bare_calls(service: Service, request: ChatCompletionRequest) -> bool:
    """True if an answer that is the JSON of a call is one without the marks of calls, too. It is
    not where the text has a form, or where a grammar follows the marks.
    """
    choice = request.chosen_tools
    is_free = choice.mode == "auto" and not choice.has_strict and request.form_field is None
    return is_free and not service.config.strict_tool_calls


async def generate(call: Call) -> ASGIApp:
    """Continue one prompt; respond with plain text, ids and times."""
    request = await call.parse(GenerateRequest)
    prompts = await _prompts(call, [request.prompt], request.add_special_tokens)
    return await answer_prompts(call, request, prompts, GenerateWriter)


async def generate_tokens(call: Call) -> ASGIApp:
    """Continue token ids; respond with token ids, in vLLM's form."""
    call.prompt_field = "token_ids"
    request = await call.parse(TokensRequest)
    return await answer_prompts(
        call, request.fields, [Prompt(None, request.token_ids)], TokensWriter
    )


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


def _constrained(
    call: Call,
    sampling: SamplingParams,
    request: ChatCompletionRequest,
    reading: AnswerReading | None,
) -> SamplingParams:
    """The sampling parameters of a chat's answers."""
    budget, choice = request.thinking_token_budget, request.chosen_tools
    if budget is not None and (reading is None or not reading.format.has_reasoning):
        unknown = f"{request.budget_field} needs a model whose thoughts have known marks"
        if not request.budget_is_optional:
            remedy = "start the server with --reasoning-parser, or leave it out"
            raise field_error(request.budget_field, f"{unknown}; {remedy}")
        call.warnings.append(f"left out: {unknown}")
        budget = None
    if reading is None:
        return sampling
    choice, broken = enforceable(choice, reading.format.calls)
    call.warnings += [f"not enforced: the format of the tool {one}" for one in broken]
    if request.form_field is None and choice.tools:
        call.form_field = "tools"
    found = reading.constrained(sampling, choice, budget, call.service.tokenizer)
    has_form = found.structured_outputs is not None
    has_budget = found.thinking is not None and found.thinking.budget is not None
    if request.use_beam_search and (has_form or has_budget):
        wrong = "tools" if has_form else request.budget_field
        raise field_error(
            wrong,
            f"{wrong} cannot be used with use_beam_search, which enforces no form of answers; "
            "leave either out",
        )
    return found


async def answer_prompts[R: GenerationFields](
    call: Call,
    request: R,
    prompts: Sequence[Prompt],
    kind: type[Writer[R]],
    reading: AnswerReading | None = None,
) -> ASGIApp:
    """Generate, and respond as a writer of this ``kind`` writes it."""
    answer, writer = open_answer(call, request, prompts, kind, reading)
    if request.stream:
        return call.stream(answer, writer)
    updates = await call.updates(answer)
    return await run_off_loop(
        lambda: json_response(writer.full_response(updates, answer)),
        answer.num_prompt_tokens + answer.num_tokens <= INLINE_TOKENS,
    )


def open_answer[R: GenerationFields, W: Writer[Any]](
    call: Call,
    request: R,
    prompts: Sequence[Prompt],
    make_writer: Callable[[ResponseContext, R, Sequence[Prompt]], W],
    reading: AnswerReading | None,
) -> tuple[Answer, W]:
    """Submit a request, and return its answer and the writer of its response."""
    service, config = call.service, call.service.config
    sampling = to_sampling(request, service.loaded.defaults, max_logprobs=config.max_logprobs)
    if request.form_field is not None:
        call.form_field = request.form_field
    sampling = limit_max_tokens(sampling, service.loaded.max_new_tokens)
    if isinstance(request, ChatCompletionRequest):
        sampling = _constrained(call, sampling, request, reading)
    prompts = [
        _truncated(service, prompt, request.truncate_prompt_tokens, sampling.max_tokens)
        for prompt in prompts
    ]
    limits = service.client.limits
    sampling = bounded_answers(service.client, prompts, sampling, request, config)
    context = ResponseContext(
        request_id=request.request_id or call.request_id,
        created=int(time.time()),
        model=service.model_names[0],
        fingerprint=f"jaxinfer-{VERSION}",
        role=config.response_role,
        sends_usage=request.sends_usage or config.enable_force_include_usage,
        tokens_as_ids=(
            config.return_tokens_as_token_ids
            if request.return_tokens_as_token_ids is None
            else request.return_tokens_as_token_ids
        ),
        tokenizer=service.client.tokenizer,
        points=limits.points,
        reading=reading,
    )
    writer = make_writer(context, request, prompts)
    answer = service.open(context.request_id, call.route, prompts, sampling, request, call.caller)
    return answer, writer


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        "createCompletion",
        "Continue prompts.",
        Completion,
        CompletionRequest,
        (CompletionChunk,),
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "createChatCompletion",
        "Answer a chat.",
        ChatCompletion,
        ChatCompletionRequest,
        (ChatChunk,),
    ),
    Route(
        "POST",
        "/v1/generate",
        generate,
        "generate",
        "Continue one prompt; text, token ids and times come back plainly.",
        GenerateResponse,
        GenerateRequest,
        (GenerateResponse,),
    ),
    Route(
        "POST",
        "/inference/v1/generate",
        generate_tokens,
        "generateTokens",
        "Continue token ids with token ids, in the form of vLLM's route.",
        TokensResponse,
        TokensRequest,
        (TokensResponse,),
    ),
)
