"""The facts of a model, from its config files, and the validation of requests against them.

The fields of ``generation_config.json`` that vLLM uses are used. vLLM ignores all other fields;
here one that would change the text is refused by name, since otherwise the answers would silently
differ from those that the file describes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import ConfigError, ContextLengthError, RequestError, TaskError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.pooling import Pooling
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.steering import Steering
from jaxinfer.engine.requests.points import check_points
from jaxinfer.sched.admit import refusal

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

_USED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LIMIT = "max_new_tokens"  # vLLM's server generates no more than this for a request
# Fields that change the text, and the values, besides null, at which they do not.
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "bad_words_ids": ([],),
        "begin_suppress_tokens": ([],),
        "constraints": ([],),
        "diversity_penalty": (0,),
        "encoder_no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "exponential_decay_length_penalty": (),
        "force_words_ids": ([],),
        "forced_bos_token_id": (),
        "forced_decoder_ids": ([],),
        "forced_eos_token_id": (),
        "guidance_scale": (1,),
        "min_length": (0,),
        "min_new_tokens": (0,),
        "no_repeat_ngram_size": (0,),
        "num_beam_groups": (1,),
        "num_beams": (1,),
        "penalty_alpha": (0,),
        "sequence_bias": ({}, []),
        "stop_strings": ([], ""),
        "suppress_tokens": ([],),
        "top_h": (),
        "typical_p": (1,),
        "watermarking_config": ({},),
    }
)
# Any other field whose name says that it changes the text
_MATTERS = re.compile(r"penalty|suppress|force|bias|ngram|cutoff|temperature|sampl|stop")
# except those of beam search and of drafts, and do_sample: vLLM samples unless the temperature is 0
_NO_EFFECT = ("do_sample", "early_stopping", "length_penalty", "max_matching_ngram_size")
_MAX_ENDS = 1000
_REMEDY = "remove it from the file, or start with generation_config 'vllm', which takes nothing"


@dataclass(frozen=True)
class ModelDetails:
    """The parts of a model, for clients that list models."""

    family: str = ""
    num_parameters: int = 0
    weight_bytes: int = 0
    gpu_bytes: int = 0  # of them in a GPU's memory
    form: str = ""  # of most of the weights: a dtype, or such as "int4 g128"


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that requests are validated against."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams  # vLLM's defaults, overridden by generation_config
    max_new_tokens: int | None = None  # a server's limit for each request, as in vLLM
    pooling: Pooling | None = None  # if it makes embeddings
    score_token_ids: tuple[int, ...] = ()  # for and against, if it scores documents
    details: ModelDetails = ModelDetails()


class ValidatedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that passed validation."""

    spec: RequestSpec  # its prompt is an ``IntLog``
    constraint: Constraint | None = None
    steering: Steering | None = None


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
        sampling, most = _sampling_of(generation_config, hf_config)
    eos_token_ids = _eos_ids_of(generation_config, hf_config)
    return ModelFacts(name, vocab_size, eos_token_ids, sampling, most)


def _sampling_of(
    generation_config: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> tuple[SamplingParams, int | None]:
    """vLLM's sampling defaults overridden by the model's, and a server's limit of new tokens.

    Without a generation_config the fields are read from config.json, their old place. Raises
    ``ConfigError`` naming the unusable field.
    """
    known = (*_USED, _LIMIT, *_NEUTRAL)
    given = generation_config or {key: hf_config.get(key) for key in known}
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        _check_unused(key, value)
    values = {key: given[key] for key in _USED if key in given}
    if _LIMIT in given:
        values["max_tokens"] = given[_LIMIT]
    try:
        sampling = SamplingParams(**values)
    except RequestError as error:
        reason = str(error).replace("max_tokens", _LIMIT)
        raise ConfigError(
            f"the model's generation_config is unusable: {reason}; correct the file, or start with "
            "generation_config 'vllm', which takes nothing from it"
        ) from error
    return sampling, sampling.max_tokens if _LIMIT in given else None


def _check_unused(key: str, value: object) -> None:
    """Raise ``ConfigError`` if a field is not used and its value would change the text."""
    if key in _USED or key == _LIMIT or key in _NO_EFFECT:
        return
    if key in _NEUTRAL:
        changes = value not in _NEUTRAL[key]
    else:
        changes = value not in (False, "", [], {}) and _MATTERS.search(key) is not None
    if changes:
        raise ConfigError(
            f"the model's generation_config has {key} {short(value)}, which is not supported; "
            f"{_REMEDY}"
        )


def _eos_ids_of(
    generation_config: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The token ids that end a text: generation_config's, or else config.json's.

    Raises ``ConfigError`` for a value that is not a token id or a list of them.
    """
    place, eos = "generation_config", generation_config.get("eos_token_id")
    if eos is None:  # absent, or an explicit null
        place, eos = "config.json", hf_config.get("eos_token_id")
    listed: list[Any] = cast("list[Any]", eos) if isinstance(eos, list) else [eos]
    ids = [token_id for token_id in listed if token_id is not None]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < 2**31 or len(ids) > _MAX_ENDS:
            raise ConfigError(
                f"eos_token_id {short(cast('object', eos))} of the model's {place} is no token id "
                f"or list of up to {_MAX_ENDS} of them; correct the file"
            )
    return tuple(dict.fromkeys(ids))


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
