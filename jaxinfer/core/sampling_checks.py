"""The bounds of the fields of ``SamplingParams``, and the checks of their values.

Each check returns the value in its canonical form (vLLM accepts several) or raises ``RequestError``
with the field's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from jaxinfer.core.checks import as_float, as_int
from jaxinfer.core.errors import RequestError

MAX_LOGPROBS = 20  # the most logprobs that a compiled step returns (OpenAI's and vLLM's cap)
MAX_LOGIT_BIAS = 512  # entries that a slot holds on the device; OpenAI's cap is 300
MAX_STOP_TOKEN_IDS = 64  # stop ids that a slot can mask until min_tokens is reached
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 65536  # of all bad words
MAX_STOP_CHARACTERS = 65536  # of all stop strings; their automaton takes about 0.1 s to build
INT32_MAX = 2**31 - 1

# bounds, both included: [low, high]
WHOLE_BOUNDS = MappingProxyType(
    {
        "n": (1, 16384),
        "top_k": (-1, INT32_MAX),
        "min_tokens": (0, INT32_MAX),
        "max_tokens": (1, INT32_MAX),
        "seed": (-(2**63), 2**63 - 1),
        "logprobs": (0, MAX_LOGPROBS),
        "prompt_logprobs": (0, MAX_LOGPROBS),
    }
)
PRIORITY_BOUNDS = (-INT32_MAX - 1, INT32_MAX)
BIAS_BOUNDS = (-100.0, 100.0)
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")  # a whole number or None
# logits must stay finite in float32 when divided or multiplied by these; 1e30 is far beyond use
REAL_BOUNDS = MappingProxyType(
    {
        "temperature": (0.0, 1e30),
        "repetition_penalty": (1e-30, 1e30),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
    }
)
ABOVE_ZERO_BOUNDS = MappingProxyType({"top_p": 1.0})  # (0, high]
FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"),
    "temperature_scaled_logprobs",
)
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {  # vLLM's fields that are not supported, with the values that change nothing
        "best_of": (None, 1),
        "logits_processors": (None, []),
        "truncate_prompt_tokens": (None,),
        "output_kind": (None,),
        "extra_args": (None, {}),
        "spaces_between_special_tokens": (True,),
        "flat_logprobs": (False,),
        "skip_clone": (False, True),
        "skip_reading_prefix_cache": (None, False),
    }
)


def stop_strings(value: Any) -> tuple[str, ...]:
    """At most ``MAX_STOP_CHARACTERS`` characters; one string alone is a list of it."""
    strings = (value,) if isinstance(value, str) else items_of("stop", value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop must hold non-empty strings, got {string!r}")
    if (total := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop holds {total} characters in all; at most {MAX_STOP_CHARACTERS} are possible"
        )
    return strings


def stop_token_ids(value: Any) -> tuple[int, ...]:
    """At most ``MAX_STOP_TOKEN_IDS`` token ids."""
    token_ids = tuple(
        _token_id("stop_token_ids", item) for item in items_of("stop_token_ids", value)
    )
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids holds {len(token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are possible"
        )
    return token_ids


def bad_words(value: Any) -> tuple[str, ...]:
    """At most ``MAX_BAD_WORDS`` texts."""
    words = items_of("bad_words", value)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"bad_words must hold texts that are not empty, got {word!r}")
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
        raise RequestError(
            f"bad_words holds {len(words)} words of {sum(map(len, words))} characters in all; at "
            f"most {MAX_BAD_WORDS} of {MAX_BAD_WORD_CHARACTERS} are possible"
        )
    return words


def allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    """At least one token id, or None."""
    if value is None:
        return None
    token_ids = tuple(
        _token_id("allowed_token_ids", item) for item in items_of("allowed_token_ids", value)
    )
    if not token_ids:
        raise RequestError("allowed_token_ids is empty; name a token, or leave it out")
    return token_ids


def logprob_token_ids(value: Any) -> tuple[int, ...]:
    """At most ``MAX_LOGPROBS`` token ids, each once."""
    items = items_of("logprob_token_ids", value)
    token_ids = tuple(dict.fromkeys(_token_id("logprob_token_ids", item) for item in items))
    if len(token_ids) > MAX_LOGPROBS:
        raise RequestError(
            f"logprob_token_ids holds {len(token_ids)} ids; at most {MAX_LOGPROBS} are possible"
        )
    return token_ids


def logit_bias(value: Any) -> dict[int, float] | None:
    """A bias by token id; JSON's keys are text."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r}")
    given = cast("Mapping[Any, Any]", value)
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias holds {len(given)} entries; at most {MAX_LOGIT_BIAS} are possible"
        )
    biases: dict[int, float] = {}
    for key, bias in given.items():
        # the keys of JSON objects, and so of OpenAI's API, are strings
        spelt = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id = _token_id("logit_bias", int(key) if spelt else key)
        biases[token_id] = real(f"logit_bias[{token_id}]", bias, *BIAS_BOUNDS)
    return biases


def tap_names(value: Any) -> tuple[str, ...]:
    """Names of points, each once."""
    names = (value,) if isinstance(value, str) else items_of("taps", value)
    for name in names:
        if not isinstance(name, str):
            raise RequestError(f"taps must hold names of points, got {name!r}")
    return tuple(dict.fromkeys(names))


def items_of(name: str, value: Any) -> tuple[Any, ...]:
    """The items of a list, set or other iterable; none for None."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list, got {value!r}")
    return tuple(cast("Iterable[Any]", value))


def _token_id(name: str, value: object) -> int:
    token_id = as_int(value)
    if token_id is None:
        raise RequestError(f"{name} holds {value!r}; token ids are integers")
    if not 0 <= token_id <= INT32_MAX:
        raise RequestError(f"{name} holds {token_id}; token ids start at 0 and fit 31 bits")
    return token_id


def whole(name: str, value: object, low: int, high: int) -> int:
    """``value`` as a whole number in [low, high]; raises ``RequestError``."""
    found = as_int(value)
    if found is None:
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    if not low <= found <= high:
        raise RequestError(f"{name} must be a number in [{low}, {high}], got {found}")
    return found


def real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """``value`` as a finite number in [low, high], or (low, high]; raises ``RequestError``."""
    found = as_float(value)
    if (
        found is not None
        and math.isfinite(found)
        and low <= found <= high
        and not (open_low and found == low)
    ):
        return found
    bound = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    raise RequestError(f"{name} must be a number in {bound}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise for a value other than True and False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {value!r}")


def check_neutral(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise for a value that would change something."""
    if value is allowed[0]:  # the default, which every HTTP request has
        return
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise RequestError(f"{name}={value!r} is not supported; leave {name} out")
