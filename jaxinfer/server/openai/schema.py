"""The requests of each endpoint, and the checks across their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, cast

from msgspec import Meta
from msgspec.structs import replace

from jaxinfer.core.sampling_checks import INT32_MAX, WHOLE_BOUNDS
from jaxinfer.engine.link.wire import MODES, Mode
from jaxinfer.server.api.beams import BeamFields
from jaxinfer.server.api.custom_tools import (
    as_function_choice,
    as_functions,
    without_format,
)
from jaxinfer.server.api.fields import (
    IGNORED,
    NO_BEAMS,
    UNSUPPORTED,
    AnyRequest,
    CacheSalt,
    GenerationFields,
    Neutral,
    Priority,
    RequestedTokens,
    RequestId,
    RequestPart,
    StreamOptions,
    TokenId,
    bounds,
    field_error,
)
from jaxinfer.server.api.tools import ToolChoice, tool_choice
from jaxinfer.text.messages import join_parts

MAX_PROMPTS = 2048  # of one request, as many as OpenAI allows
MAX_TEMPLATE_CHARACTERS = 1 << 18  # models' own have up to some 60,000
MAX_DEPTH = 64  # of lists and objects within messages and chat_template_kwargs
MAX_COMPLETIONS = WHOLE_BOUNDS["n"][1]  # of one request: prompts times n

CHAT_UNSUPPORTED: Neutral = MappingProxyType(
    {
        **UNSUPPORTED,
        "audio": (None,),
        "documents": (None, []),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "mm_processor_kwargs": (None, {}),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }
)
CHAT_IGNORED = (
    *IGNORED,
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
)

TokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1)]
Tools = tuple[dict[str, Any], ...]
Template = Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS)]
Messages = Annotated[tuple[dict[str, Any], ...], Meta(min_length=1)]


class CompletionRequest(BeamFields, frozen=True, kw_only=True, dict=True):
    """``POST /v1/completions``."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {**UNSUPPORTED, "prompt_embeds": (None,), "suffix": (None, "")}
    )

    prompt: str | Annotated[tuple[str | TokenId | tuple[TokenId, ...], ...], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=WHOLE_BOUNDS["max_tokens"][1])] | None = None
    logprobs: Annotated[int, bounds("logprobs")] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def scores_only(self) -> bool:
        """True if only the prompt is scored: one token is generated and not sent."""
        return self.max_tokens == 0

    @cached_property  # it checks every token id
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt, text or token ids; a single prompt is a list of one."""
        return prompt_list(self.prompt)

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "max_tokens must be at least 1 unless echo is true")
        if self.use_beam_search and (
            self.max_tokens == 0 or self.num_prompt_logprobs() is not None
        ):
            raise field_error("echo", "echo scores no prompt with use_beam_search; leave it out")
        num_completions = len(self.prompts) * self.n
        if num_completions > MAX_COMPLETIONS:
            raise field_error(
                "n", f"prompts times n must be at most {MAX_COMPLETIONS}, got {num_completions}"
            )

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """The logprobs of the prompt; with echo, ``logprobs`` sets them too."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs


class ChatCompletionRequest(BeamFields, frozen=True, kw_only=True, dict=True):
    """``POST /v1/chat/completions``."""

    unsupported: ClassVar[Neutral] = CHAT_UNSUPPORTED
    ignored: ClassVar[tuple[str, ...]] = CHAT_IGNORED
    logprobs_field: ClassVar[str] = "top_logprobs"
    default_max_tokens: ClassVar[int | None] = None
    budget_field: ClassVar[str] = "thinking_token_budget"  # the field that sets it
    budget_is_optional: ClassVar[bool] = False  # left out for models without thoughts

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False
    max_completion_tokens: Annotated[int, bounds("max_tokens")] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None
    echo: bool = False
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The fields that are variables of the chat template."""
        return _template_variables(self.chosen_tools.tools, self.reasoning_effort)

    @cached_property
    def chosen_tools(self) -> ToolChoice:
        """The tools that the answer may call, all as functions; raises ``ApiError``."""
        return tool_choice(as_functions(self.tools or ()), as_function_choice(self.tool_choice))

    def check(self) -> None:
        super().check()
        _ = self.chosen_tools
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs needs logprobs=true; set it")
        if self.use_beam_search and self.chosen_tools.mode == "required":
            raise field_error(
                "tool_choice", "tool_choice must be auto or none with use_beam_search"
            )
        _check_depths(self)

    def requested_tokens(self) -> RequestedTokens | None:
        if self.max_completion_tokens is None:
            return super().requested_tokens()
        return RequestedTokens("max_completion_tokens", self.max_completion_tokens)

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def echoed(self, role: str) -> str:
        """The last message, if ``echo`` is set and the message is the beginning of the answer,
        whose role this is.
        """
        last = self.messages[-1]
        if not self.echo or last.get("role") != role:
            return ""
        content = last.get("content")
        # text parts; other parts were refused
        return join_parts(content) if isinstance(content, list) else content or ""


class GenerateRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/generate``: one prompt; the response has plain text and ids."""

    unsupported: ClassVar[Neutral] = MappingProxyType({**UNSUPPORTED, **NO_BEAMS})

    prompt: str | TokenIds
    logprobs: Annotated[int, bounds("logprobs")] | None = None
    add_special_tokens: bool = True

    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenSamplingParams(GenerationFields, frozen=True, kw_only=True):
    """``sampling_params`` of ``TokensRequest``."""

    unsupported: ClassVar[Neutral] = MappingProxyType({**UNSUPPORTED, **NO_BEAMS})

    # of vLLM's class: tokens are returned, and all at once
    ignored: ClassVar[tuple[str, ...]] = (*IGNORED, "detokenize", "output_kind", "skip_clone")
    default_max_tokens: ClassVar[int | None] = None

    logprobs: Annotated[int, bounds("logprobs")] | None = None
    temperature_scaled_logprobs: bool = False

    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scales_logprobs(self) -> bool:
        return self.temperature_scaled_logprobs


class TokensRequest(AnyRequest, frozen=True, kw_only=True, dict=True):
    """``POST /inference/v1/generate``: token ids in and out, as in vLLM."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {
            "features": (None,),
            **dict.fromkeys(("ec_transfer_params", "kv_transfer_params"), (None, {})),
        }
    )
    ignored: ClassVar[tuple[str, ...]] = IGNORED
    nested: ClassVar[Mapping[str, type[RequestPart]]] = MappingProxyType(
        {"sampling_params": TokenSamplingParams}
    )

    token_ids: TokenIds
    sampling_params: TokenSamplingParams = TokenSamplingParams()
    request_id: RequestId | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None

    @cached_property
    def fields(self) -> TokenSamplingParams:
        """All fields but the prompt, in one struct."""
        names = ("model", "request_id", "stream", "stream_options", "priority", "cache_salt")
        own = {name: value for name in names if (value := getattr(self, name))}
        return replace(self.sampling_params, **own)

    @property
    def named_models(self) -> tuple[str | None, ...]:
        return (self.model, self.sampling_params.model)

    def check(self) -> None:
        super().check()
        self.fields.check()


class TokenizeRequest(AnyRequest, frozen=True, kw_only=True):
    """``POST /tokenize``: a prompt, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Template | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: Tools | None = None
    reasoning_effort: str | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The fields that are variables of the chat template."""
        return _template_variables(
            tool_choice(as_functions(self.tools or ()), None).tools, self.reasoning_effort
        )

    def check(self) -> None:
        tool_choice(as_functions(self.tools or ()), None)
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "prompt or messages must be given, and not both")
        _check_depths(self)


class DetokenizeRequest(AnyRequest, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: tuple[TokenId, ...]


class ChangeRequest(AnyRequest, frozen=True, kw_only=True):
    """``POST /pause``, ``/reset_prefix_cache``; ``mode`` is what becomes of open requests."""

    mode: str = "wait"

    def check(self) -> None:
        change_mode(self.mode)


class SteeringRequest(AnyRequest, frozen=True, kw_only=True):
    """``POST /set_steering``: a vector that requests may name; without one it is removed."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    vector: Annotated[tuple[float, ...], Meta(min_length=1)] | None = None


class UpdateWeightsRequest(ChangeRequest, frozen=True, kw_only=True):
    """``POST /update_weights``: a folder or another reference to a model, on the server."""

    path: str


def change_mode(mode: str) -> Mode:
    """The treatment of open requests; raises ``ApiError`` for an unknown mode."""
    for known in MODES:
        if mode == known:
            return known
    raise field_error("mode", f"mode must be wait, abort or keep, got {mode[:40]!r}")


type ChatFields = ChatCompletionRequest | TokenizeRequest


def _template_variables(tools: Sequence[Any], effort: str | None) -> dict[str, Any]:
    """Tools, and the effort of thinking. Templates without efforts know whether to think at all:
    ``enable_thinking`` (Qwen) or ``thinking`` (DeepSeek).
    """
    variables: dict[str, Any] = {"tools": [_shown(tool) for tool in tools]} if tools else {}
    if effort is not None:
        variables["reasoning_effort"] = effort
        if effort == "none":
            variables |= {"enable_thinking": False, "thinking": False}
    return variables


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool without ``strict`` and patterns of custom tools, which a grammar enforces: the prompt
    would have them in vain.
    """
    if "custom" in tool:
        return {"type": "function", "function": without_format(tool)["function"]}
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}


def prompt_list(prompt: str | Sequence[Any], field: str = "prompt") -> list[str | tuple[int, ...]]:
    """The prompts in any of the four forms; raises ``ApiError`` for a mixture or an empty one."""
    if isinstance(prompt, str):
        return [prompt]
    if set(map(type, prompt)) == {int}:  # for many thousands of ids a call for each would be slow
        return [tuple(prompt)]
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise field_error(
                f"{field}[{index}]",
                f"{field}[{index}] is of another kind than {field}[0]; "
                f"{field} must be text, token ids, a list of texts or a list of lists of token ids",
            )
        if item == ():
            name = f"{field}[{index}]"
            raise field_error(name, f"{name} must hold at least 1 token id")
    if len(prompt) > MAX_PROMPTS:
        raise field_error(
            field, f"{field} must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}"
        )
    return list(prompt)


def _check_depths(request: ChatFields) -> None:
    """Refuse nesting that would exhaust the stack of the chat template or of ``json``."""
    for name in ("messages", "chat_template_kwargs", "tools"):
        level = [getattr(request, name)]
        for _ in range(MAX_DEPTH):
            level = [inner for outer in level for inner in _containers(outer)]
        if level:
            raise field_error(name, f"{name} must be nested at most {MAX_DEPTH} levels deep")


def _containers(value: Any) -> Iterable[Any]:
    """The lists and objects directly within a JSON value."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).values()
    elif not isinstance(value, (list, tuple)):
        return ()
    return [inner for inner in cast("Iterable[Any]", value) if isinstance(inner, (dict, list))]
