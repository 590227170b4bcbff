"""What requests are checked against, and the check: pure, so that any process can do it.

Owns: ``ModelFacts``, what a model's configs say of it, and ``check_request``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import ContextLengthError, RequestError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.generation_config import eos_ids_of, sampling_of
from jaxinfer.sched.admit import refusal


@dataclass(frozen=True)
class ModelFacts:
    """The model as requests see it."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams  # the model's generation_config over vLLM's defaults
    max_new_tokens: int | None = None  # the most that a server gives a request, as in vLLM


class CheckedRequest(msgspec.Struct, frozen=True, gc=False):
    """What ``Engine.check`` let pass, so that nobody has to look at it again."""

    prompt_token_ids: IntLog
    sampling: SamplingParams
    priority: int
    cache_salt: str
    pools: bool = False  # it is for the last token's hidden state, not for tokens


def facts_of_configs(
    name: str,
    vocab_size: int,
    hf_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    *,
    samples_as_told: bool,
) -> ModelFacts:
    """What a model's own configs say, its sampling defaults only if asked for; raises
    ``ConfigError`` for what cannot be used.
    """
    sampling, most = SamplingParams(), None
    if samples_as_told:
        sampling, most = sampling_of(generation_config, hf_config)
    return ModelFacts(
        name=name,
        vocab_size=vocab_size,
        eos_token_ids=eos_ids_of(generation_config, hf_config),
        default_sampling=sampling,
        max_new_tokens=most,
    )


def resolved_max_tokens(num_prompt_tokens: int, sampling: SamplingParams, limits: Limits) -> int:
    """How many tokens may be generated: what was asked for, within the context."""
    room = max(limits.max_model_len - num_prompt_tokens, 0)
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def check_request(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    limits: Limits,
    facts: ModelFacts,
    has_tokenizer: bool,
) -> IntLog:
    """The prompt's ids, looked at; raises ``RequestError`` for a request that an engine of these
    facts can never answer.
    """
    num_tokens = len(prompt_token_ids)
    max_tokens = resolved_max_tokens(num_tokens, sampling, limits)
    if reason := refusal(num_tokens, max_tokens, limits):
        too_long = num_tokens >= limits.max_model_len
        raise ContextLengthError(reason) if too_long else RequestError(reason)
    prompt = _prompt(prompt_token_ids, facts.vocab_size)
    # these hold no negative ids
    if sampling.stop_token_ids and max(sampling.stop_token_ids) >= facts.vocab_size:
        raise _unknown("stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
    if sampling.logit_bias and max(sampling.logit_bias) >= facts.vocab_size:
        raise _unknown("logit_bias", sampling.logit_bias, facts.vocab_size)
    if sampling.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer; use stop_token_ids instead")
    return prompt


def _prompt(token_ids: Sequence[int], vocab_size: int) -> IntLog:
    """Ids of which none is beyond the vocabulary."""
    try:
        log = IntLog(token_ids)
    except OverflowError:  # an id that is no int32, and no token
        raise _unknown("the prompt", token_ids, vocab_size) from None
    if log.array().view(np.uint32).max() >= vocab_size:  # there negative ids are the largest
        raise _unknown("the prompt", token_ids, vocab_size)
    return log


def _unknown(name: str, token_ids: Collection[int], vocab_size: int) -> RequestError:
    """Says which of these ids, ``name`` to the user, is none of the vocabulary's."""
    ends = min(token_ids), max(token_ids)
    unknown = next(token_id for token_id in ends if not 0 <= token_id < vocab_size)
    return RequestError(f"{name} holds token id {unknown}; the vocabulary ends at {vocab_size - 1}")
