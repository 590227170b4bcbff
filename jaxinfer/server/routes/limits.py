"""A request's limits of tokens and of time."""

from __future__ import annotations

from jaxinfer.core.errors import ContextLengthError
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.fields import RequestedTokens


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
