"""``SamplingParams`` and ``Request``: fields, defaults (vLLM's names and values) and bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, cast

import msgspec

from jaxinfer.core.checks import as_float, as_int
from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import RequestError
from jaxinfer.core.steering import Steer, Steering, as_steer
from jaxinfer.core.structured import StructuredOutputsParams, Thinking

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
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")  # a whole number or None
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
_FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"),
    "temperature_scaled_logprobs",
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
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


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those of OpenAI's and vLLM's APIs."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """How to continue one prompt. Names, defaults and order of effects follow vLLM's class.

    Logits pass through logit_bias, min_tokens, the penalties, the masks of structured_outputs,
    allowed_token_ids and bad_words, temperature, top_k, min_p and top_p, in that order. Logprobs
    are of the unmodified distribution, or with ``temperature_scaled_logprobs`` (not in vLLM) those
    of drawn tokens are of log_softmax(logits / temperature), as trainers compute them. The token
    drawn at a position is a function of (seed, position), the logits and the mask alone.
    ``guided_decoding`` is the older name of ``structured_outputs``; with either, the answer ends
    when it is complete, also with ignore_eos, and it begins after the thoughts of ``thinking``.

    ``taps`` names points (``nn.points``, "all", ``layers.*.z``) whose activations are returned,
    ``steer`` (``Steer`` or dicts) adds vectors there; both must be among the ``tap_points``.
    Fields from ``best_of`` on exist so that vLLM's scripts run; only their neutral values are
    accepted. Raises ``RequestError`` naming the field if a value is invalid.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    temperature_scaled_logprobs: bool = False
    taps: tuple[str, ...] = ()
    steer: tuple[Steer, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()  # listed at each position besides the likeliest tokens
    guided_decoding: Any = None
    thinking: Thinking | None = None

    best_of: int | None = None
    logits_processors: list[Any] | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: Any = None
    extra_args: dict[str, Any] | None = None
    spaces_between_special_tokens: bool = True
    flat_logprobs: bool = False
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        for name, checked in self._checked().items():
            msgspec.structs.force_setattr(self, name, checked)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}; "
                "lower min_tokens"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is drawn; temperatures under 1e-5 count as 0."""
        return self.temperature < 1e-5

    @property
    def scales_logprobs(self) -> bool:
        """True if logprobs are of logits divided by the temperature; a temperature of 0 is not."""
        return self.temperature_scaled_logprobs and not self.greedy

    @property
    def has_penalties(self) -> bool:
        """True if the sequence's own tokens change its logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def is_constrained(self) -> bool:
        """True if not every token may be drawn at every position: its draws need masks."""
        return bool(
            self.structured_outputs is not None
            or self.allowed_token_ids is not None
            or self.bad_words
            or (self.thinking is not None and self.thinking.budget is not None)
        )

    @property
    def needs_extras(self) -> bool:
        """True if it has logit_bias, min_tokens, penalties or logprobs."""
        return bool(
            self.logit_bias or self.min_tokens or self.has_penalties or self.logprobs is not None
        )

    def _checked(self) -> dict[str, Any]:
        """Every field in canonical form (vLLM accepts several); raises for an invalid one."""
        given = msgspec.structs.asdict(self)  # not of inner structs
        for name, allowed in _NEUTRAL.items():
            _neutral(name, given.pop(name), allowed)
        for name in _FLAGS:
            _flag(name, given[name])
        for name, bounds in WHOLE_BOUNDS.items():
            if given[name] is not None or name not in _OPTIONAL:
                given[name] = _whole(name, given[name], *bounds)
        for name, bounds in REAL_BOUNDS.items():
            given[name] = _real(name, given[name], *bounds)
        for name, high in ABOVE_ZERO_BOUNDS.items():
            given[name] = _real(name, given[name], 0.0, high, open_low=True)
        given["top_k"] = max(given["top_k"], 0)
        given["stop"] = _stop_strings(given["stop"])
        given["stop_token_ids"] = _stop_token_ids(given["stop_token_ids"])
        given["logit_bias"] = _logit_bias(given["logit_bias"])
        given["taps"] = _taps(given["taps"])
        given["steer"] = tuple(as_steer(item) for item in _items("steer", given["steer"]))
        given["bad_words"] = _bad_words(given["bad_words"])
        given["allowed_token_ids"] = _allowed_token_ids(given["allowed_token_ids"])
        given["logprob_token_ids"] = _logprob_token_ids(given["logprob_token_ids"])
        if given["logprob_token_ids"] and given["logprobs"] is None:
            given["logprobs"] = 0
        older = given["guided_decoding"]
        if older is not None and given["structured_outputs"] is not None:
            raise RequestError("guided_decoding is set next to structured_outputs; leave it out")
        chosen = given["structured_outputs"] if older is None else older
        given |= {"guided_decoding": None, "structured_outputs": StructuredOutputsParams.of(chosen)}
        return given


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue, tokenised and validated; ``n`` > 1 becomes n of these.

    ``max_tokens`` and ``seed`` are resolved (never None). ``eos_token_ids`` are the model's, empty
    under ``ignore_eos``. ``arrival`` is a counter of the engine: lower is older.
    """

    request_id: str
    prompt_token_ids: Sequence[int]  # the scheduler does not copy an ``IntLog``
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    arrival: int = 0
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""
    pools: bool = False  # it yields one vector of its prompt and draws no token
    constraint: Constraint | None = None  # compiled, if ``sampling.is_constrained``
    steering: Steering | None = None  # ``sampling.steer``, with the vectors of its names

    @property
    def cache_root(self) -> bytes:
        """The root of its page hashes: salt, a byte that is in no text, and steering."""
        salt = self.cache_salt.encode()
        return salt if self.steering is None else salt + b"\xff" + self.steering.digest

    @property
    def has_extras(self) -> bool:
        """True if more than the settings of a plain draw decide on its tokens."""
        return self.sampling.needs_extras or self.constraint is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token id that ends this request."""
        return (*self.eos_token_ids, *self.sampling.stop_token_ids)


def check_identity(priority: object, cache_salt: object) -> tuple[int, str]:
    """Validate a request's priority and cache salt; None, vLLM's "no salt", becomes ""."""
    salt = "" if cache_salt is None else cache_salt
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, got {salt!r}")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise RequestError(f"cache_salt {salt!r} has no UTF-8 form; use plain text") from None
    return _whole("priority", priority, *PRIORITY_BOUNDS), salt


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _items("stop", value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop must hold non-empty strings, got {string!r}")
    if (total := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop holds {total} characters in all; at most {MAX_STOP_CHARACTERS} are possible"
        )
    return strings


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    token_ids = tuple(_token_id("stop_token_ids", item) for item in _items("stop_token_ids", value))
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids holds {len(token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are possible"
        )
    return token_ids


def _bad_words(value: Any) -> tuple[str, ...]:
    words = _items("bad_words", value)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"bad_words must hold texts that are not empty, got {word!r}")
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
        raise RequestError(
            f"bad_words holds {len(words)} words of {sum(map(len, words))} characters in all; at "
            f"most {MAX_BAD_WORDS} of {MAX_BAD_WORD_CHARACTERS} are possible"
        )
    return words


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = tuple(
        _token_id("allowed_token_ids", item) for item in _items("allowed_token_ids", value)
    )
    if not token_ids:
        raise RequestError("allowed_token_ids is empty; name a token, or leave it out")
    return token_ids


def _logprob_token_ids(value: Any) -> tuple[int, ...]:
    items = _items("logprob_token_ids", value)
    token_ids = tuple(dict.fromkeys(_token_id("logprob_token_ids", item) for item in items))
    if len(token_ids) > MAX_LOGPROBS:
        raise RequestError(
            f"logprob_token_ids holds {len(token_ids)} ids; at most {MAX_LOGPROBS} are possible"
        )
    return token_ids


def _logit_bias(value: Any) -> dict[int, float] | None:
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
        biases[token_id] = _real(f"logit_bias[{token_id}]", bias, *BIAS_BOUNDS)
    return biases


def _taps(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else _items("taps", value)
    for name in names:
        if not isinstance(name, str):
            raise RequestError(f"taps must hold names of points, got {name!r}")
    return tuple(dict.fromkeys(names))


def _items(name: str, value: Any) -> tuple[Any, ...]:
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


def _whole(name: str, value: object, low: int, high: int) -> int:
    """``value`` as a whole number in [low, high]; raises ``RequestError``."""
    whole = as_int(value)
    if whole is None:
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    if not low <= whole <= high:
        raise RequestError(f"{name} must be a number in [{low}, {high}], got {whole}")
    return whole


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """``value`` as a finite number in [low, high], or (low, high]; raises ``RequestError``."""
    real = as_float(value)
    if (
        real is not None
        and math.isfinite(real)
        and low <= real <= high
        and not (open_low and real == low)
    ):
        return real
    bound = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    raise RequestError(f"{name} must be a number in {bound}, got {value!r}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {value!r}")


def _neutral(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value is allowed[0]:  # the default, which every HTTP request has
        return
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise RequestError(f"{name}={value!r} is not supported; leave {name} out")
