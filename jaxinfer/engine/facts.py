"""What requests are checked against, and the check: pure, so that any process can do it.

Owns: ``ModelFacts`` and ``check_request``. Must not know: jax, the engine's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import ContextLengthError, RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.sched.admit import refusal


@dataclass(frozen=True)
class ModelFacts:
    """The model as requests see it."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams  # the model's generation_config over vLLM's defaults


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
) -> None:
    """Raise ``RequestError`` for a request that an engine of these facts can never answer."""
    num_tokens = len(prompt_token_ids)
    max_tokens = resolved_max_tokens(num_tokens, sampling, limits)
    if reason := refusal(num_tokens, max_tokens, limits):
        too_long = num_tokens >= limits.max_model_len
        raise ContextLengthError(reason) if too_long else RequestError(reason)
    named = {
        "the prompt": prompt_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": tuple(sampling.logit_bias or ()),
    }
    for name, token_ids in named.items():
        if not _all_below(facts.vocab_size, token_ids):
            for token_id in (min(token_ids), max(token_ids)):
                if not 0 <= token_id < facts.vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token_id}; the vocabulary ends at "
                        f"{facts.vocab_size - 1}"
                    )
    if sampling.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer; use stop_token_ids instead")


def _all_below(vocab_size: int, token_ids: Sequence[int]) -> bool:
    """Whether all are tokens; numpy takes half the time of ``min`` and ``max``."""
    try:
        values = np.fromiter(token_ids, np.int32, len(token_ids))
    except OverflowError:
        return False
    return bool(values.min(initial=0) >= 0 and values.max(initial=0) < vocab_size)
