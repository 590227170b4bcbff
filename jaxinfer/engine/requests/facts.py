"""The facts of a model, from its config files.

The fields of ``generation_config.json`` that vLLM uses are used. vLLM ignores all other fields;
here one that would change the text is refused by name, since otherwise the answers would silently
differ from those that the file describes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError, RequestError
from jaxinfer.core.pooling import Pooling
from jaxinfer.core.request import SamplingParams

if TYPE_CHECKING:
    pass

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
