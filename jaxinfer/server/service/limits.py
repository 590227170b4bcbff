"""A request's limits of tokens, of time and of the size of its answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from jaxinfer.core.errors import ContextLengthError, RequestError, TaskError
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.requests.points import tap_bytes
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.engine.requests.validate import resolved_max_tokens
from jaxinfer.server.api.fields import GenerationFields, RequestedTokens, field_error
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.schema import ChatCompletionRequest, CompletionRequest

# in the JSON of an answer: 5 of text and of ids, and 59 to 68 in each route
TOKEN_BYTES, LOGPROB_BYTES = 8, 70
SWITCHES = ("echo", "return_token_ids")  # fields that are true or false


def check_fit(num_tokens: int, requested: RequestedTokens, max_model_len: int) -> None:
    """Raise ``ContextLengthError`` if prompt and requested tokens exceed the context."""
    total, available = num_tokens + requested.num_tokens, max_model_len - num_tokens
    if requested.num_tokens > available:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {total} tokens: {num_tokens} in the prompt and {requested.num_tokens} by "
            f"{requested.field}; lower {requested.field} to at most {available}, or leave it out",
            requested.field,
        )


def deadline(requested: float | None, allowed: float | None) -> tuple[float, ApiError] | None:
    """The shorter of the request's and the server's timeout, and the error for when it expires."""
    given = [seconds for seconds in (requested, allowed) if seconds is not None]
    if not given:
        return None
    seconds = min(given)
    return seconds, ApiError(
        408,
        f"the answer was not done within {seconds:g} s; ask for fewer tokens or a longer timeout",
        param="timeout" if requested == seconds else None,
        code="deadline_exceeded",
        # OpenAI's clients repeat a request twice after a 408, which would load a busy server
        # further
        headers={"X-Should-Retry": "false"},
    )


def check_prompts(
    client: EngineClient, specs: Sequence[RequestSpec], requested: RequestedTokens | None
) -> list[RequestSpec]:
    """The prompts of a request as ``EngineClient.checked`` returns them; raises ``RequestError`` if
    one of them cannot be answered.
    """
    checked: list[RequestSpec] = []
    for number, spec in enumerate(specs):
        try:
            checked.append(client.checked(spec))
            if requested is not None:
                check_fit(len(spec.prompt_token_ids), requested, client.limits.max_model_len)
        except RequestError as error:
            if len(specs) == 1 or isinstance(error, TaskError):
                raise
            name = f"prompt[{number}]"
            message = f"{name}: {error}"
            if not isinstance(error, ContextLengthError):
                raise RequestError(message) from None
            field = name if error.field == "prompt" else error.field
            raise ContextLengthError(message, field) from None
    return checked


def check_taps(
    prompts: Sequence[Prompt], sampling: SamplingParams, limits: Limits, max_bytes: int
) -> None:
    """Raise ``ApiError`` if the activations of an answer may be too large."""
    if not sampling.taps:
        return
    lengths = [len(prompt.token_ids) for prompt in prompts]
    size = sum(
        tap_bytes(length, resolved_max_tokens(length, sampling, limits), sampling, limits)
        for length in lengths
    )
    if size > max_bytes:
        raise field_error(
            "taps",
            f"taps of this request may have {size} bytes, and {max_bytes} are allowed "
            "(--max-tap-bytes); ask for fewer points, prompts or tokens",
        )


def bounded_answers(
    client: EngineClient,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    request: GenerationFields,
    config: ServerConfig,
) -> SamplingParams:
    """``sampling`` with answers of at most ``max_answer_bytes`` in all, each as long as it may be.

    A limit of tokens that the request does not set is lowered. Raises ``ApiError`` if that is not
    enough, naming the field that takes most.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    generated = sum(resolved_max_tokens(length, sampling, client.limits) for length in lengths)
    token_bytes = sampling.n * _bytes_of(sampling, sampling.logprobs)
    if request.return_token_ids:
        token_bytes += sampling.n * TOKEN_BYTES
    repeated = _repeated_bytes(client, prompts, sampling, request, config.response_role)
    prompt_bytes, max_bytes = sum(repeated.values()), config.max_answer_bytes
    size = prompt_bytes + generated * token_bytes
    if size <= max_bytes:
        return sampling
    if request.requested_tokens() is None:
        fitting = (max_bytes - prompt_bytes) // (len(prompts) * token_bytes)
        if fitting >= max(sampling.min_tokens, 1):
            return replace(sampling, max_tokens=fitting)
    if prompt_bytes > size - prompt_bytes:
        field = max(repeated, key=lambda name: repeated[name])
    elif sampling.logprobs is not None:
        field = request.logprobs_field
    else:
        field = "n" if sampling.n > 1 else "max_tokens"
    raise too_large(field, size, max_bytes)


def too_large(field: str, size: int, max_bytes: int) -> ApiError:
    """The error for a request whose answers may have ``size`` bytes, mostly because of a field."""
    less = f"leave {field} out" if field in SWITCHES else f"ask for less in {field}"
    return field_error(
        field,
        f"the answers to this request may have {size} bytes, and {max_bytes} are allowed "
        f"(--max-answer-bytes); {less}, or send fewer prompts in a request",
    )


def _repeated_bytes(
    client: EngineClient,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    request: GenerationFields,
    role: str,  # of answers
) -> dict[str, int]:
    """The JSON of what the answers repeat of the prompts, by the field that asks for it."""
    num_tokens, found = sum(len(prompt.token_ids) for prompt in prompts), dict[str, int]()
    times = 1
    if isinstance(request, CompletionRequest):
        times = sampling.n  # each choice repeats its prompt, in other answers it is there once
        if request.echo:
            found["echo"] = times * sum(_text_bytes(client, prompt) for prompt in prompts)
            if request.logprobs is not None:
                scored = times * num_tokens * _bytes_of(sampling, request.logprobs)
                found[request.logprobs_field] = scored
    elif isinstance(request, ChatCompletionRequest):
        found["echo"] = sampling.n * _json_bytes(request.echoed(role))
    if request.return_token_ids:
        found["return_token_ids"] = times * num_tokens * TOKEN_BYTES
    if request.prompt_logprobs is not None:
        scored = times * num_tokens * _bytes_of(sampling, request.prompt_logprobs)
        found["prompt_logprobs"] = scored
    return found


def _text_bytes(client: EngineClient, prompt: Prompt) -> int:
    """The JSON of a prompt's text; that of token ids is at most so many of the longest token."""
    if prompt.text is not None:
        return _json_bytes(prompt.text)
    if client.tokenizer is None:
        return 0
    return len(prompt.token_ids) * client.tokenizer.max_token_characters


def _json_bytes(text: str) -> int:
    return len(msgspec.json.encode(text)) - 2  # without the quotes


def _bytes_of(sampling: SamplingParams, num_logprobs: int | None) -> int:
    """The JSON of one token with so many logprobs and its own; None: without any."""
    if num_logprobs is None:
        return TOKEN_BYTES
    return TOKEN_BYTES + LOGPROB_BYTES * (1 + num_logprobs + len(sampling.logprob_token_ids))
