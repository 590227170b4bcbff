"""The requests of each endpoint.

Owns: their structs, the fields only one of them has, and the checks across fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Meta

from jaxinfer.core.request import WHOLE_BOUNDS
from jaxinfer.server.openai.fields import (
    DEFAULT_MAX_TOKENS,
    IGNORED,
    UNSUPPORTED,
    Asked,
    GenerationFields,
    Neutral,
    TokenId,
    about,
    refused,
    whole,
)

MAX_PROMPTS = 2048  # of one request, as many as OpenAI takes
MAX_DEPTH = 64  # of lists and objects within messages and chat_template_kwargs
MAX_COMPLETIONS = WHOLE_BOUNDS["n"][1]  # of one request: prompts times n

CHAT_UNSUPPORTED: Neutral = MappingProxyType(
    {
        **UNSUPPORTED,
        "audio": (None,),
        "documents": (None, []),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "include_reasoning": (None, True),
        "mm_processor_kwargs": (None, {}),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "thinking_token_budget": (None,),
        "tool_choice": (None, "none", "auto"),  # auto chooses among no tools
        "tools": (None, []),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }
)
CHAT_IGNORED = (
    *IGNORED,
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
)

TokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1)]
Messages = Annotated[
    tuple[dict[str, Any], ...],
    Meta(
        min_length=1,
        description="Objects of role and content (text, or a list of text parts), and of an "
        "answer tool_calls, whose arguments are a JSON object as text; fields that are null or "
        "empty count as absent, other keys reach the chat template.",
    ),
]


OpensTurn = Annotated[bool, about("Open the assistant's turn.")]
Continues = Annotated[
    bool, about("Go on with the last message; needs add_generation_prompt=false.")
]
Template = Annotated[str, about("A template, or the name of one of the model's, to use instead.")]
TemplateNames = Annotated[dict[str, Any], about("Further names for the chat template.")]
Name = Annotated[str, about("A name that /v1/models lists; absent: the served model.")]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, dict=True):
    """``POST /v1/completions``."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {**UNSUPPORTED, "prompt_embeds": (None,), "suffix": (None, "")}
    )

    prompt: Annotated[
        str | Annotated[tuple[str | TokenId | tuple[TokenId, ...], ...], Meta(min_length=1)],
        about(f"Text, token ids, or a list of up to {MAX_PROMPTS} of either."),
    ]
    max_tokens: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=WHOLE_BOUNDS["max_tokens"][1],
                description=f"Most tokens to generate, absent {DEFAULT_MAX_TOKENS}; 0, which needs "
                "echo, only scores the prompt.",
            ),
        ]
        | None
    ) = None
    logprobs: (
        Annotated[int, whole("logprobs", "Likeliest tokens to list at each position.")] | None
    ) = None
    echo: Annotated[bool, about("Put the prompt before the text; logprobs cover it too.")] = False
    best_of: (
        Annotated[int, Meta(ge=1, description="1 or the same as n: every completion is sent.")]
        | None
    ) = None
    add_special_tokens: Annotated[
        bool, about("Add the tokenizer's special tokens to a text prompt.")
    ] = True

    @property
    def scores_only(self) -> bool:
        """Whether nothing is generated for the reader: one token is, and is left out."""
        return self.max_tokens == 0

    @cached_property  # it looks at every token id
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt, text or token ids; one of a single form is a list of one."""
        return prompt_list(self.prompt)

    def check(self) -> None:
        """See ``GenerationFields``."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise refused("max_tokens", "max_tokens must be at least 1 unless echo is true")
        if self.best_of not in (None, 1, self.n):
            raise refused("best_of", "best_of is not supported; leave it out")
        num_completions = len(self.prompts) * self.n
        if num_completions > MAX_COMPLETIONS:
            raise refused(
                "n",
                f"prompts times n must be at most {MAX_COMPLETIONS}, got {num_completions}",
            )

    def output_limit(self) -> int | None:
        """See ``GenerationFields``."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)

    def num_logprobs(self) -> int | None:
        """See ``GenerationFields``."""
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """With echo, the logprobs of the prompt are asked for by ``logprobs``."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs


class ChatCompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    unsupported: ClassVar[Neutral] = CHAT_UNSUPPORTED
    ignored: ClassVar[tuple[str, ...]] = CHAT_IGNORED
    logprobs_field: ClassVar[str] = "top_logprobs"

    messages: Messages
    add_generation_prompt: OpensTurn = True
    continue_final_message: Continues = False
    chat_template: Template | None = None
    chat_template_kwargs: TemplateNames | None = None
    add_special_tokens: Annotated[
        bool, about("Add the tokenizer's special tokens to what the template writes.")
    ] = False
    max_completion_tokens: (
        Annotated[
            int,
            whole("max_tokens", "Most tokens to generate; wins over max_tokens."),
        ]
        | None
    ) = None
    logprobs: Annotated[bool, about("List the logprob of each token.")] = False
    top_logprobs: (
        Annotated[
            int,
            whole("logprobs", "Likeliest tokens to list at each position; needs logprobs=true."),
        ]
        | None
    ) = None
    echo: Annotated[
        bool, about("Put the last message before the text if its role is the answer's.")
    ] = False

    def check(self) -> None:
        """See ``GenerationFields``."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs=true; set it")
        _check_depths(self)

    def output_limit(self) -> int | None:
        """The newer name wins; without either it is the rest of the context."""
        asked = self.asked_tokens()
        return None if asked is None else asked.num_tokens

    def asked_tokens(self) -> Asked | None:
        """See ``GenerationFields``."""
        if self.max_completion_tokens is None:
            return super().asked_tokens()
        return Asked("max_completion_tokens", self.max_completion_tokens)

    def num_logprobs(self) -> int | None:
        """See ``GenerationFields``."""
        return (self.top_logprobs or 0) if self.logprobs else None


class GenerateRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/generate``: one prompt, plain text and ids back."""

    prompt: Annotated[str | TokenIds, about("Text, or token ids.")]
    max_tokens: (
        Annotated[
            int, whole("max_tokens", f"Most tokens to generate, absent {DEFAULT_MAX_TOKENS}.")
        ]
        | None
    ) = None
    logprobs: (
        Annotated[int, whole("logprobs", "Likeliest tokens to list at each position.")] | None
    ) = None
    add_special_tokens: Annotated[
        bool, about("Add the tokenizer's special tokens to a text prompt.")
    ] = True

    def output_limit(self) -> int | None:
        """See ``GenerationFields``."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        """See ``GenerationFields``."""
        return self.logprobs


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a prompt, or messages."""

    unsupported: ClassVar[Neutral] = MappingProxyType({"tools": (None, [])})
    ignored: ClassVar[tuple[str, ...]] = ()

    model: Name | None = None
    prompt: Annotated[str, about("The text; either this or messages.")] | None = None
    messages: Messages | None = None
    add_generation_prompt: OpensTurn = True
    continue_final_message: Continues = False
    chat_template: Template | None = None
    chat_template_kwargs: TemplateNames | None = None
    add_special_tokens: (
        Annotated[bool, about("Absent: true for a prompt, false for messages.")] | None
    ) = None
    return_token_strs: Annotated[bool, about("List each token's text too.")] = False

    def check(self) -> None:
        """Raise ``ApiError`` for fields that contradict each other."""
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "prompt or messages must be given, and not both")
        _check_depths(self)


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    unsupported: ClassVar[Neutral] = MappingProxyType({})
    ignored: ClassVar[tuple[str, ...]] = ()

    model: Name | None = None
    tokens: Annotated[tuple[TokenId, ...], about("The token ids.")]

    def check(self) -> None:
        """Nothing here can contradict anything."""


type ChatFields = ChatCompletionRequest | TokenizeRequest
type AnyRequest = GenerationFields | TokenizeRequest | DetokenizeRequest


def prompt_list(prompt: str | Sequence[Any]) -> list[str | tuple[int, ...]]:
    """The prompts in any of the four forms; raises ``ApiError`` for a mixture or an empty one."""
    if isinstance(prompt, str):
        return [prompt]
    if set(map(type, prompt)) == {int}:  # no call of ours for each of many thousands
        return [tuple(prompt)]
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise refused(
                f"prompt[{index}]",
                f"prompt[{index}] is of another kind than prompt[0]; "
                "prompt must be text, token ids, a list of texts or a list of lists of token ids",
            )
        if item == ():
            raise refused(f"prompt[{index}]", f"prompt[{index}] must hold at least 1 token id")
    if len(prompt) > MAX_PROMPTS:
        raise refused(
            "prompt", f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}"
        )
    return list(prompt)


def _check_depths(request: ChatFields) -> None:
    """Refuse what would exhaust the stack of the chat template and of the JSON it writes."""
    for name in ("messages", "chat_template_kwargs"):
        level = [getattr(request, name)]
        for _ in range(MAX_DEPTH):
            level = [inner for outer in level for inner in _containers(outer)]
        if level:
            raise refused(name, f"{name} must be nested at most {MAX_DEPTH} levels deep")


def _containers(value: Any) -> Iterable[Any]:
    """The lists and objects directly within a JSON value."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).values()
    elif not isinstance(value, (list, tuple)):
        return ()
    return [inner for inner in cast("Iterable[Any]", value) if isinstance(inner, (dict, list))]
