"""Validation of requests against a model and its limits: pure, so that any process can run it."""

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
    """The facts of a model that requests are validated against."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams  # vLLM's defaults, overridden by generation_config
    max_new_tokens: int | None = None  # a server's limit for each request, as in vLLM


class ValidatedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that passed validation."""

    prompt_token_ids: IntLog
    sampling: SamplingParams
    priority: int
    cache_salt: str
    pools: bool = False  # it yields the last token's hidden state instead of tokens


def facts_of_configs(
    name: str,
    vocab_size: int,
    hf_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    *,
    use_generation_config: bool,
) -> ModelFacts:
    """The facts of a model, from its config files. Raises ``ConfigError`` for unusable values.

    Without ``use_generation_config`` the sampling defaults are vLLM's.
    """
    sampling, most = SamplingParams(), None
    if use_generation_config:
        sampling, most = sampling_of(generation_config, hf_config)
    eos_token_ids = eos_ids_of(generation_config, hf_config)
    return ModelFacts(name, vocab_size, eos_token_ids, sampling, most)


def resolved_max_tokens(num_prompt_tokens: int, sampling: SamplingParams, limits: Limits) -> int:
    """The number of tokens to generate: the requested one, limited by the context."""
    left = max(limits.max_model_len - num_prompt_tokens, 0)
    return left if sampling.max_tokens is None else min(sampling.max_tokens, left)


def check_request(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    limits: Limits,
    facts: ModelFacts,
    has_tokenizer: bool,
) -> IntLog:
    """Validate a request and return its prompt's token ids.

    Raises ``RequestError`` if an engine with these facts and limits can never answer it.
    """
    num_tokens = len(prompt_token_ids)
    max_tokens = resolved_max_tokens(num_tokens, sampling, limits)
    if reason := refusal(num_tokens, max_tokens, limits):
        too_long = num_tokens >= limits.max_model_len
        raise ContextLengthError(reason) if too_long else RequestError(reason)
    prompt = _prompt(prompt_token_ids, facts.vocab_size)
    # SamplingParams has refused negative ids
    if sampling.stop_token_ids and max(sampling.stop_token_ids) >= facts.vocab_size:
        raise _out_of_vocabulary("stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
    if sampling.logit_bias and max(sampling.logit_bias) >= facts.vocab_size:
        raise _out_of_vocabulary("logit_bias", sampling.logit_bias, facts.vocab_size)
    if sampling.stop and not has_tokenizer:
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
