"""The fields that all generation requests share, and their conversion to ``SamplingParams``.

Owns: names, defaults and bounds (vLLM's and OpenAI's; the bounds come from
``core.sampling_checks``), the known fields that are not supported, and ``to_sampling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.sampling_checks import (
    ABOVE_ZERO_BOUNDS,
    BIAS_BOUNDS,
    INT32_MAX,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    PRIORITY_BOUNDS,
    REAL_BOUNDS,
    WHOLE_BOUNDS,
)
from jaxinfer.server.api.structured import (
    GUIDED,
    Choices,
    Form,
    GrammarText,
    RegexText,
    ResponseFormat,
    form_of,
    form_with,
)
from jaxinfer.server.http.errors import ApiError

# In Python $ also matches before a final newline, in JSON Schema it does not: hence the lookahead.
TOKEN_ID_TEXT = "^[0-9]{1,10}$(?![^0-9])"
VISIBLE_TEXT = "^[!-~]*$(?![^!-~])"
NEVER_TEXT = "^never$(?![^a-z])"
KIND_TEXT = "^[a-z0-9_]{1,64}$(?![^a-z])"
JSON_OR_EMPTY_TEXT = "^(json)?$(?![^a-z])"
NOT_BLANK_TEXT = r"\S"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        TOKEN_ID_TEXT: "a token id",
        VISIBLE_TEXT: "printable ASCII without spaces",
        NEVER_TEXT: "true, false or never",
        JSON_OR_EMPTY_TEXT: "json, a JSON schema or empty",
        NOT_BLANK_TEXT: "a text that is not blank",
        KIND_TEXT: "a word of small letters, digits and _, of at most 64 characters",
    }
)
_CHOICES = ("^(", ")$(?![^a-z])")  # around the alternatives of a pattern
DEFAULT_MAX_TOKENS = 16  # of completions, as with OpenAI and vLLM
MAX_STOP_STRINGS = 64  # of a request; vLLM's default is 4, some clients send dozens

# the values of an unsupported field that have no effect, such as its default
type Neutral = Mapping[str, tuple[Any, ...]]

UNSUPPORTED: Neutral = MappingProxyType(
    {
        "kv_transfer_params": (None,),
        "logits_processors": (None, []),
        "spaces_between_special_tokens": (None, True),
        "stop_regex": (None, "", []),  # SGLang's; stop holds plain texts
        "vllm_xargs": (None, {}),
    }
)
NO_BEAMS: Neutral = MappingProxyType(  # of routes that do not search
    {
        "early_stopping": (None, False),
        "length_penalty": (None, 1, 1.0),
        "use_beam_search": (None, False),
    }
)
IGNORED = ("guided_decoding_backend", "metadata", "session_id", "user")  # without an effect


def bounds(name: str) -> Meta:
    """The bounds of a field of ``SamplingParams``."""
    if name in ABOVE_ZERO_BOUNDS:
        return Meta(gt=0.0, le=ABOVE_ZERO_BOUNDS[name])
    low, high = WHOLE_BOUNDS[name] if name in WHOLE_BOUNDS else REAL_BOUNDS[name]
    return Meta(ge=low, le=high)


def one_of(*names: str) -> Meta:
    """The bound of a text that must be one of these; they are in the document and in errors."""
    alternatives = "|".join(names).replace(".", "[.]")
    return Meta(pattern=alternatives.join(_CHOICES))


def pattern_text(pattern: str) -> str:
    """The condition that a pattern of a field stands for, in words."""
    if pattern in PATTERNS:
        return PATTERNS[pattern]
    names = pattern.removeprefix(_CHOICES[0]).removesuffix(_CHOICES[1]).replace("[.]", ".")
    *others, last = names.split("|")
    return f"{', '.join(others)} or {last}" if others else last


TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, Meta(max_length=MAX_BAD_WORD_CHARACTERS, pattern=NOT_BLANK_TEXT)]
Bias = Annotated[float, Meta(ge=BIAS_BOUNDS[0], le=BIAS_BOUNDS[1])]
BiasKey = Annotated[str, Meta(pattern=TOKEN_ID_TEXT)]
Priority = Annotated[int, Meta(ge=PRIORITY_BOUNDS[0], le=PRIORITY_BOUNDS[1])]
CacheSalt = Annotated[str, Meta(max_length=1024)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern=VISIBLE_TEXT)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream; needs stream=true."""

    # padding that OpenAI's server adds
    ignored: ClassVar[tuple[str, ...]] = ("include_obfuscation",)

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class SteerItem(msgspec.Struct, frozen=True, kw_only=True):
    """A vector that is added to an activation of every token."""

    ignored: ClassVar[tuple[str, ...]] = ()

    point: str
    vector: Annotated[tuple[float, ...], Meta(min_length=1)] | None = None
    name: str | None = None  # of a vector that the server keeps
    scale: float = 1.0


class RequestedTokens(NamedTuple):
    """The number of tokens that a request asks for, and the field that does so."""

    field: str
    num_tokens: int


class RequestPart(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request, or an object in it. A field that is null counts as absent."""

    unsupported: ClassVar[Neutral] = MappingProxyType({})
    # error codes from which clients learn that they can do without the field
    unsupported_codes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    ignored: ClassVar[tuple[str, ...]] = ()
    nested: ClassVar[Mapping[str, type[RequestPart]]] = MappingProxyType({})  # fields with fields


class AnyRequest(RequestPart, frozen=True, kw_only=True):
    """The body of a request."""

    model: str | None = None

    @property
    def named_models(self) -> tuple[str | None, ...]:
        """Every model that the request names."""
        return (self.model,)

    def check(self) -> None:
        """Raise ``ApiError`` for fields that contradict each other."""


class GenerationFields(AnyRequest, frozen=True, kw_only=True):
    """Fields of ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/generate``.

    A field that is absent or null has its default. For a sampling field of type ``| None`` that is
    the model's default (its generation_config over vLLM's defaults).
    """

    unsupported: ClassVar[Neutral] = UNSUPPORTED
    ignored: ClassVar[tuple[str, ...]] = IGNORED
    logprobs_field: ClassVar[str] = "logprobs"  # the field that sets the number of logprobs
    default_max_tokens: ClassVar[int | None] = DEFAULT_MAX_TOKENS  # None: up to the context's end

    max_tokens: Annotated[int, bounds("max_tokens")] | None = None
    min_tokens: Annotated[int, bounds("min_tokens")] = 0
    n: Annotated[int, bounds("n")] = 1
    best_of: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    seed: Annotated[int, bounds("seed")] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: StopString | Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    # the form of the answer, of which at most one may be set: see ``structured``
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: RegexText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: str | None = None
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)] | None = None
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    logprob_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROBS)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, bounds("prompt_logprobs")] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    timeout: Annotated[float, Meta(gt=0.0)] | None = None  # seconds
    taps: tuple[str, ...] = ()
    steer: tuple[SteerItem, ...] = ()

    @property
    def sends_usage(self) -> bool:
        """True if a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage is not False

    @property
    def sends_continuous_usage(self) -> bool:
        """True if every chunk of a stream has usage; needs ``sends_usage``, as in vLLM."""
        return self.sends_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def check(self) -> None:
        if self.best_of not in (None, self.n):
            raise field_error(
                "best_of",
                f"best_of must be the same as n, {self.n}: every completion is sent; leave it out",
            )
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options needs stream=true; leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise field_error(
                "prompt_logprobs", "prompt_logprobs cannot be streamed; set stream to false"
            )
        if self.stream and self.taps:
            raise field_error("taps", "taps cannot be streamed; set stream to false")
        if self.logprob_token_ids and self.num_logprobs() is None:
            raise field_error("logprob_token_ids", "logprob_token_ids needs logprobs; set it too")
        if self.truncate_prompt_tokens == 0:
            raise field_error(
                "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0"
            )

    def output_limit(self) -> int | None:
        """``SamplingParams.max_tokens``."""
        requested = self.requested_tokens()
        return self.default_max_tokens if requested is None else max(requested.num_tokens, 1)

    def requested_tokens(self) -> RequestedTokens | None:
        """The number of tokens that the request itself sets, or None."""
        return None if self.max_tokens is None else RequestedTokens("max_tokens", self.max_tokens)

    def form(self) -> Form | None:
        """The form of the answer, None for plain text; raises ``ApiError``. It writes the form as
        text, which takes some ms for a large schema.
        """
        found = self.chosen_form()
        return None if found is None else form_with(found[1], found[0])

    @property
    def form_field(self) -> str | None:
        """The path of the field that sets the form of the answer; raises ``ApiError``."""
        found = self.chosen_form()
        return None if found is None else found[0]

    def chosen_form(self) -> tuple[str, Mapping[str, Any]] | None:
        """The path of the field that sets the form, and the form's parameters; see ``form_of``."""
        guided = {name: getattr(self, name) for name in GUIDED}
        pattern = self.guided_whitespace_pattern
        return form_of(self.response_format, self.structured_outputs, guided, pattern)

    def num_logprobs(self) -> int | None:
        """``SamplingParams.logprobs``."""
        return None

    @property
    def scales_logprobs(self) -> bool:
        """``SamplingParams.temperature_scaled_logprobs``."""
        return False

    def num_prompt_logprobs(self) -> int | None:
        """``SamplingParams.prompt_logprobs``."""
        return self.prompt_logprobs


# fields with the same name and meaning in SamplingParams; an absent one has the default
_SAME = (
    *("n", "temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words", "logprob_token_ids", "taps"),
)


def to_sampling(
    request: GenerationFields, defaults: SamplingParams, *, max_logprobs: int = MAX_LOGPROBS
) -> SamplingParams:
    """The sampling parameters of ``request``; fields that it does not set are as in ``defaults``.

    ``max_logprobs`` is the server's own limit. Raises ``ApiError`` or ``RequestError``.
    """
    logprobs, prompt_logprobs = request.num_logprobs(), request.num_prompt_logprobs()
    counts = ((request.logprobs_field, logprobs), ("prompt_logprobs", prompt_logprobs))
    for name, count in counts:
        if count is not None and count > max_logprobs:
            raise field_error(name, f"{name} must be at most {max_logprobs} here, got {count}")
    given = {name: getattr(request, name) for name in _SAME}
    form = request.form()
    return msgspec.structs.replace(
        defaults,
        max_tokens=request.output_limit(),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        temperature_scaled_logprobs=request.scales_logprobs,
        structured_outputs=None if form is None else form.params,
        steer=tuple(msgspec.structs.asdict(item) for item in request.steer),
        **{name: value for name, value in given.items() if value is not None},
    )


def limit_max_tokens(sampling: SamplingParams, limit: int | None) -> SamplingParams:
    """``sampling`` with ``max_tokens`` no larger than ``limit``, if that is set."""
    requested = sampling.max_tokens
    if limit is None or (requested is not None and requested <= limit):
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=limit)


def field_error(param: str | None, message: str) -> ApiError:
    """An error 400 about a field."""
    return ApiError(400, message, param=param)
