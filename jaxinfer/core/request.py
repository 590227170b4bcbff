"""What a user asks for: ``SamplingParams`` and ``Request``.

Owns: the fields, their defaults (vLLM's names and values) and their bounds.
Must not know: tokenizers, pages, devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from jaxinfer.core.errors import RequestError

MAX_LOGPROBS = 20  # the widest logprobs list that a compiled step returns (OpenAI's and vLLM's cap)
MAX_LOGIT_BIAS = 512  # entries a slot can hold on the device; OpenAI's own cap is 300
MAX_STOP_TOKEN_IDS = 64  # stop ids a slot can mask while min_tokens is not reached


class FinishReason(StrEnum):
    """Why a sequence ended; the values are what OpenAI's and vLLM's clients read."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to continue one prompt. Names, defaults and order of effects follow vLLM's class.

    Logits pass through logit_bias, min_tokens, the penalties, temperature, min_p, top_k and top_p,
    in that order; logprobs are of the unmodified distribution. The token drawn at a position is a
    function of (seed, position) and the logits alone.

    Raises ``RequestError`` naming the field when a value is out of range.
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
    max_tokens: int | None = 16  # None: up to the end of the context
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # vLLM accepts a bare string, lists and None here; store one form.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)
        if self.logit_bias:
            bias = {_token_id("logit_bias", k): float(v) for k, v in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", bias)
        self._check()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; temperatures under 1e-5 count as 0."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether the sequence's own tokens change its logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _check(self) -> None:
        _whole("n", self.n, 1, 16384)
        _between("temperature", self.temperature, 0.0, math.inf)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}; "
                    "lower min_tokens"
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        self._check_lists()

    def _check_lists(self) -> None:
        if not all(self.stop):
            raise RequestError("stop must hold non-empty strings; remove the empty one")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead")
        for token_id in self.stop_token_ids:
            _token_id("stop_token_ids", token_id)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids; "
                f"at most {MAX_STOP_TOKEN_IDS} are possible"
            )
        if self.logit_bias:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise RequestError(
                    f"logit_bias holds {len(self.logit_bias)} entries; "
                    f"at most {MAX_LOGIT_BIAS} are possible"
                )
            for token_id, bias in self.logit_bias.items():
                _between(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue, tokenised and checked. ``n`` > 1 becomes n requests before this.

    ``max_tokens`` is resolved (never None), ``seed`` too; ``eos_token_ids`` are the model's own,
    empty under ``ignore_eos``. ``arrival`` is a counter that the engine gives out: lower is older.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    arrival: int = 0
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token id that ends this request."""
        return (*self.eos_token_ids, *self.sampling.stop_token_ids)


def _token_id(name: str, value: object) -> int:
    try:
        token_id = int(value)  # type: ignore[call-overload]  # OpenAI sends the keys as strings
    except (TypeError, ValueError):
        raise RequestError(f"{name} holds {value!r}; token ids are integers") from None
    if token_id < 0:
        raise RequestError(f"{name} holds {token_id}; token ids start at 0")
    return token_id


def _whole(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is not a whole number in [low, high]."""
    _between(name, value, low, high)
    if not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {value!r}")


def _between(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse what is not a number in [low, high] (or (low, high]); NaN never passes."""
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
        and not (open_low and value == low)
    ):
        return
    bound = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    raise RequestError(f"{name} must be a number in {bound}, got {value!r}")
