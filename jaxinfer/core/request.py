"""``SamplingParams`` and ``Request``: fields, and defaults (vLLM's names and values)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import RequestError
from jaxinfer.core.sampling_checks import (
    ABOVE_ZERO_BOUNDS,
    FLAGS,
    NEUTRAL,
    OPTIONAL,
    PRIORITY_BOUNDS,
    REAL_BOUNDS,
    WHOLE_BOUNDS,
    allowed_token_ids,
    bad_words,
    check_flag,
    check_neutral,
    items_of,
    logit_bias,
    logprob_token_ids,
    real,
    stop_strings,
    stop_token_ids,
    tap_names,
    whole,
)
from jaxinfer.core.steering import Steer, Steering, as_steer
from jaxinfer.core.structured import StructuredOutputsParams, Thinking


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

    @property
    def reuses_prefix(self) -> bool:
        """False if every prompt token is computed: for its logprobs or activations."""
        return self.prompt_logprobs is None and not self.taps

    def _checked(self) -> dict[str, Any]:
        """Every field in canonical form (vLLM accepts several); raises for an invalid one."""
        given = msgspec.structs.asdict(self)  # not of inner structs
        for name, allowed in NEUTRAL.items():
            check_neutral(name, given.pop(name), allowed)
        for name in FLAGS:
            check_flag(name, given[name])
        for name, bounds in WHOLE_BOUNDS.items():
            if given[name] is not None or name not in OPTIONAL:
                given[name] = whole(name, given[name], *bounds)
        for name, bounds in REAL_BOUNDS.items():
            given[name] = real(name, given[name], *bounds)
        for name, high in ABOVE_ZERO_BOUNDS.items():
            given[name] = real(name, given[name], 0.0, high, open_low=True)
        given["top_k"] = max(given["top_k"], 0)
        given["stop"] = stop_strings(given["stop"])
        given["stop_token_ids"] = stop_token_ids(given["stop_token_ids"])
        given["logit_bias"] = logit_bias(given["logit_bias"])
        given["taps"] = tap_names(given["taps"])
        given["steer"] = tuple(as_steer(item) for item in items_of("steer", given["steer"]))
        given["bad_words"] = bad_words(given["bad_words"])
        given["allowed_token_ids"] = allowed_token_ids(given["allowed_token_ids"])
        given["logprob_token_ids"] = logprob_token_ids(given["logprob_token_ids"])
        if given["logprob_token_ids"] and given["logprobs"] is None:
            given["logprobs"] = 0
        older = given["guided_decoding"]
        if older is not None and given["structured_outputs"] is not None:
            raise RequestError("guided_decoding is set next to structured_outputs; leave it out")
        chosen = given["structured_outputs"] if older is None else older
        given |= {"guided_decoding": None, "structured_outputs": StructuredOutputsParams.of(chosen)}
        return given


class RequestSpec(msgspec.Struct, frozen=True):
    """A prompt and its options, as an engine gets them: made where an API begins, carried whole.

    Raises ``RequestError`` for a priority or a salt that cannot be used.
    """

    prompt_token_ids: Sequence[int]  # the scheduler does not copy an ``IntLog``
    sampling: SamplingParams
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""  # prefixes are shared only by requests with equal salts
    pools: bool = False  # it yields one vector of its prompt and draws no token

    def __post_init__(self) -> None:
        _check_salt(self.cache_salt)
        priority = whole("priority", self.priority, *PRIORITY_BOUNDS)
        msgspec.structs.force_setattr(self, "priority", priority)


class Request(RequestSpec, frozen=True, kw_only=True):
    """One sequence to continue, tokenised and validated; ``n`` > 1 becomes n of these.

    ``max_tokens`` and ``seed`` are resolved (never None). ``eos_token_ids`` are the model's, empty
    under ``ignore_eos``. ``arrival`` is a counter of the engine: lower is older.
    """

    request_id: str
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    arrival: int = 0
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


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, got {salt!r}")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise RequestError(f"cache_salt {salt!r} has no UTF-8 form; use plain text") from None
