"""The requests of ollama's routes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.server.api.fields import (
    JSON_OR_EMPTY_TEXT,
    AnyRequest,
    Neutral,
    RequestPart,
    bounds,
    field_error,
    one_of,
)
from jaxinfer.server.ollama.chat import (
    OllamaChat,
    OllamaText,
    chat_messages,
    form_of,
    refuse_images,
    thinking_fields,
)
from jaxinfer.server.ollama.inputs import MessageInput, Options
from jaxinfer.server.openai.pooling import EmbeddingRequest
from jaxinfer.server.openai.schema import MAX_PROMPTS, Tools

Model = Annotated[
    str, Meta(min_length=1, description="A name of /api/tags, with or without :latest.")
]


class _OllamaRequest(AnyRequest, frozen=True, kw_only=True, dict=True):
    """The fields of all requests."""

    # the model stays loaded
    ignored: ClassVar[tuple[str, ...]] = ("keep_alive",)
    nested: ClassVar[Mapping[str, type[RequestPart]]] = MappingProxyType({"options": Options})

    model: Model  # type: ignore[assignment] # pyright: ignore[reportIncompatibleVariableOverride]
    options: Annotated[Options | None, Meta(description="How to draw the answer.")] = None

    @property
    def chosen_options(self) -> Options:
        """The options; all are absent if there are none."""
        return self.options or Options()


class _AnswerRequest(_OllamaRequest, frozen=True, kw_only=True, dict=True):
    """The fields of requests for text."""

    # a prompt that is longer than the context is refused, and never cut
    ignored: ClassVar[tuple[str, ...]] = (*_OllamaRequest.ignored, "shift", "truncate")

    format: Annotated[
        Annotated[str, Meta(pattern=JSON_OR_EMPTY_TEXT)] | dict[str, Any] | None,
        Meta(description="json: any JSON object; or a JSON schema."),
    ] = None
    stream: Annotated[bool, Meta(description="False answers with one whole object.")] = True
    think: Annotated[
        bool | Annotated[str, one_of("low", "medium", "high", "max")] | None,
        Meta(description="Whether, or how much, to think; absent: as the chat template has it."),
    ] = None
    logprobs: Annotated[bool, Meta(description="List the logprob of each token.")] = False
    top_logprobs: Annotated[
        Annotated[int, bounds("logprobs")] | None,
        Meta(description="Likeliest tokens to list at each position; needs logprobs=true."),
    ] = None

    def check(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs needs logprobs=true; set it")

    def _answer_fields(self) -> dict[str, Any]:
        """The fields of the chat, or the prompt, besides its texts and tools."""
        return {
            **self.chosen_options.fields,
            "model": self.model,
            "form_of_answer": form_of(self.format),
            "stream": self.stream,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
        }


class OllamaChatRequest(_AnswerRequest, frozen=True, kw_only=True, dict=True):
    """``POST /api/chat``; without messages it only asks whether the model is there."""

    messages: Annotated[
        tuple[MessageInput, ...], Meta(description="The chat; empty: no answer is generated.")
    ] = ()
    tools: Annotated[
        Tools | None, Meta(description="The functions that the model may call, in OpenAI's form.")
    ] = None

    @cached_property
    def chat(self) -> OllamaChat:
        """The same request as one of ``/v1/chat/completions``; raises ``ApiError``."""
        return OllamaChat(
            messages=chat_messages(self.messages),
            tools=self.tools,
            **thinking_fields(self.think),
            **self._answer_fields(),
        )

    def check(self) -> None:
        super().check()
        refuse_images(self.messages)
        self.chat.check()


class OllamaGenerateRequest(_AnswerRequest, frozen=True, kw_only=True, dict=True):
    """``POST /api/generate``: one question; without a prompt as a chat without messages."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {
            "context": (None, []),
            "images": (None, []),
            "suffix": (None, ""),
            "template": (None, ""),
            **dict.fromkeys(("width", "height", "steps"), (None, 0)),
        }
    )

    prompt: Annotated[str, Meta(description="The text of the user; empty: no answer.")] = ""
    system: Annotated[str, Meta(description="The system prompt.")] = ""
    raw: Annotated[bool, Meta(description="Continue the prompt itself, without a template.")] = (
        False
    )

    @cached_property
    def chat(self) -> OllamaChat:
        """The request as a chat."""
        system = MessageInput(role="system", content=self.system)
        question = MessageInput(role="user", content=self.prompt)
        return OllamaChat(
            messages=chat_messages([system, question] if self.system else [question]),
            **thinking_fields(self.think),
            **self._answer_fields(),
        )

    @cached_property
    def text(self) -> OllamaText:
        """The request as a prompt."""
        return OllamaText(**self._answer_fields())

    def check(self) -> None:
        super().check()
        if self.raw and (self.system or self.think):
            name = "system" if self.system else "think"
            raise field_error(name, f"{name} cannot be used with raw, which has no template")
        (self.text if self.raw else self.chat).check()


class OllamaEmbedRequest(_OllamaRequest, frozen=True, kw_only=True, dict=True):
    """``POST /api/embed``."""

    input: Annotated[
        str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_PROMPTS)],
        Meta(description=f"A text, or up to {MAX_PROMPTS} of them."),
    ]
    truncate: Annotated[
        bool, Meta(description="Read only the beginning of a text that is too long.")
    ] = True
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None

    @property
    def embedding(self) -> EmbeddingRequest:
        """The same as a request of ``/v1/embeddings``."""
        return EmbeddingRequest(
            model=self.model,
            input=self.input,
            dimensions=self.dimensions,
            truncate_prompt_tokens=-1 if self.truncate else None,
        )


class OllamaEmbeddingsRequest(_OllamaRequest, frozen=True, kw_only=True, dict=True):
    """``POST /api/embeddings``, the older form."""

    prompt: Annotated[str, Meta(description="The text.")]

    @property
    def embedding(self) -> EmbeddingRequest:
        """The same as a request of ``/v1/embeddings``."""
        return EmbeddingRequest(model=self.model, input=self.prompt, truncate_prompt_tokens=-1)


class OllamaShowRequest(_OllamaRequest, frozen=True, kw_only=True, dict=True):
    """``POST /api/show``; older clients send the model's name as ``name``."""

    ignored: ClassVar[tuple[str, ...]] = (*_OllamaRequest.ignored, "system", "template", "verbose")

    model: Model | None = None  # type: ignore[assignment] # pyright: ignore[reportIncompatibleVariableOverride]
    name: Annotated[Model | None, Meta(description="The older field for the model.")] = None

    @property
    def named_models(self) -> tuple[str | None, ...]:
        return (self.model or self.name,)

    def check(self) -> None:
        if self.model is None and self.name is None:
            raise field_error("model", "model is required")
