"""The validation of requests against an engine's limits and its model's facts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import ContextLengthError, RequestError, TaskError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.steering import Steering
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.points import check_points
from jaxinfer.sched.admit import refusal

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class ValidatedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that passed validation."""

    spec: RequestSpec  # its prompt is an ``IntLog``
    constraint: Constraint | None = None
    steering: Steering | None = None


def resolved_max_tokens(num_prompt_tokens: int, sampling: SamplingParams, limits: Limits) -> int:
    """The number of tokens to generate: the requested one, limited by the context."""
    left = max(limits.max_model_len - num_prompt_tokens, 0)
    return left if sampling.max_tokens is None else min(sampling.max_tokens, left)


def check_task(limits: Limits, *, pools: bool) -> None:
    """Raise ``TaskError`` if the engine yields text and the request, which ``pools``, asks for a
    vector, or the reverse.
    """
    if pools and not limits.pooling:
        raise TaskError(
            "this model generates text and makes no embeddings here; start it with task 'embed' "
            "(--task embed)"
        )
    if limits.pooling and not pools:
        raise TaskError(
            "this model makes embeddings and generates no text here; ask for embeddings, or start "
            "it with task 'generate' (--task generate)"
        )


def check_request(
    spec: RequestSpec, limits: Limits, facts: ModelFacts, tokenizer: Tokenizer | None
) -> IntLog:
    """Validate a request and return its prompt's token ids.

    Raises ``RequestError`` if an engine with these limits, facts and tokenizer can never answer it.
    """
    sampling = spec.sampling
    check_task(limits, pools=spec.pools)
    num_tokens = len(spec.prompt_token_ids)
    max_tokens = resolved_max_tokens(num_tokens, sampling, limits)
    if reason := refusal(num_tokens, max_tokens, limits):
        too_long = num_tokens >= limits.max_model_len
        raise ContextLengthError(reason) if too_long else RequestError(reason)
    prompt = _prompt(spec.prompt_token_ids, facts.vocab_size)
    # SamplingParams has refused negative ids
    if sampling.stop_token_ids and max(sampling.stop_token_ids) >= facts.vocab_size:
        raise _out_of_vocabulary("stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
    if sampling.logit_bias and max(sampling.logit_bias) >= facts.vocab_size:
        raise _out_of_vocabulary("logit_bias", sampling.logit_bias, facts.vocab_size)
    if sampling.allowed_token_ids and max(sampling.allowed_token_ids) >= facts.vocab_size:
        raise _out_of_vocabulary("allowed_token_ids", sampling.allowed_token_ids, facts.vocab_size)
    if sampling.logprob_token_ids and max(sampling.logprob_token_ids) >= facts.vocab_size:
        raise _out_of_vocabulary("logprob_token_ids", sampling.logprob_token_ids, facts.vocab_size)
    check_points(sampling, limits.points)
    if sampling.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer; use stop_token_ids instead")
    return prompt


def _prompt(token_ids: Sequence[int], vocab_size: int) -> IntLog:
    """The prompt as int32; raises ``RequestError`` for an id outside the vocabulary."""
    try:
        log = IntLog(token_ids)
    except OverflowError:  # an id beyond int32
        raise _out_of_vocabulary("the prompt", token_ids, vocab_size) from None
    if log.array().view(np.uint32).max() >= vocab_size:  # as uint32 negative ids are the largest
        raise _out_of_vocabulary("the prompt", token_ids, vocab_size)
    return log


def _out_of_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> RequestError:
    """Error that names the first out-of-vocabulary id. ``name``: the field, for the message."""
    extremes = min(token_ids), max(token_ids)
    unknown = next(token_id for token_id in extremes if not 0 <= token_id < vocab_size)
    return RequestError(f"{name} holds token id {unknown}; the vocabulary ends at {vocab_size - 1}")
