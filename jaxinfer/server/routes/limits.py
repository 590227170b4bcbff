"""A request's limits of tokens, of time and of the size of its answers."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import ContextLengthError, RequestError, TaskError
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.facts import resolved_max_tokens
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.points import tap_bytes
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.fields import GenerationFields, RequestedTokens, field_error

# in the JSON of an answer: 5 of text and of ids, and 59 to 68 in each route
TOKEN_BYTES, LOGPROB_BYTES = 8, 70


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
    client: EngineClient,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    requested: RequestedTokens | None,
    *,
    pools: bool,
) -> None:
    """Raise ``RequestError`` if one of the prompts cannot be answered with these parameters."""
    for number, prompt in enumerate(prompts):
        try:
            client.check(prompt.token_ids, sampling, pools=pools)
            if requested is not None:
                check_fit(len(prompt.token_ids), requested, client.limits.max_model_len)
        except RequestError as error:
            if len(prompts) == 1 or isinstance(error, TaskError):
                raise
            name = f"prompt[{number}]"
            message = f"{name}: {error}"
            if not isinstance(error, ContextLengthError):
                raise RequestError(message) from None
            field = name if error.field == "prompt" else error.field
            raise ContextLengthError(message, field) from None


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
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    request: GenerationFields,
    limits: Limits,
    max_bytes: int,
) -> SamplingParams:
    """``sampling`` with answers of at most ``max_bytes`` in all, if each is as long as it may be.

    A limit of tokens that the request does not set is lowered. Raises ``ApiError`` if that is not
    enough, naming the field that takes most.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    generated = sum(resolved_max_tokens(length, sampling, limits) for length in lengths)
    prompt_bytes = sampling.n * sum(lengths) * _bytes_of(sampling, sampling.prompt_logprobs)
    token_bytes = sampling.n * _bytes_of(sampling, sampling.logprobs)
    if sampling.prompt_logprobs is None:
        prompt_bytes = 0
    size = prompt_bytes + generated * token_bytes
    if size <= max_bytes:
        return sampling
    if request.requested_tokens() is None:
        fitting = (max_bytes - prompt_bytes) // (len(prompts) * token_bytes)
        if fitting >= max(sampling.min_tokens, 1):
            return replace(sampling, max_tokens=fitting)
    if prompt_bytes > size - prompt_bytes:
        field = "prompt_logprobs"
    elif sampling.logprobs is not None:
        field = request.logprobs_field
    else:
        field = "n" if sampling.n > 1 else "max_tokens"
    raise too_large(field, size, max_bytes)


def too_large(field: str, size: int, max_bytes: int) -> ApiError:
    """The error for a request whose answers may have ``size`` bytes, mostly because of a field."""
    return field_error(
        field,
        f"the answers to this request may have {size} bytes, and {max_bytes} are allowed "
        f"(--max-answer-bytes); ask for less in {field}, or send fewer prompts in a request",
    )


def _bytes_of(sampling: SamplingParams, num_logprobs: int | None) -> int:
    """The JSON of one token with so many logprobs and its own; None: without any."""
    if num_logprobs is None:
        return TOKEN_BYTES
    return TOKEN_BYTES + LOGPROB_BYTES * (1 + num_logprobs + len(sampling.logprob_token_ids))
