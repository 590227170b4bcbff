"""The parts of a request: messages with their calls, and options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.server.api.fields import (
    MAX_STOP_STRINGS,
    Neutral,
    RequestPart,
    StopString,
    bounds,
    one_of,
)

Images = Annotated[  # ``refuse_images`` has the error
    Annotated[tuple[Any, ...], Meta(extra_json_schema={"maxItems": 0})] | None,
    Meta(description="Only empty: the models here read text alone."),
]


class CalledInput(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call, and its arguments."""

    name: Annotated[str, Meta(min_length=1, description="The name of the tool.")]
    arguments: Annotated[
        dict[str, Any] | None, Meta(description="The arguments; absent: none.")
    ] = None


class CallInput(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an earlier answer."""

    function: Annotated[CalledInput, Meta(description="The function that is called.")]
    id: Annotated[str | None, Meta(description="Its id, which the result may repeat.")] = None


class MessageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: Annotated[
        Annotated[str, one_of("system", "user", "assistant", "tool")],
        Meta(description="The author."),
    ]
    content: Annotated[str | None, Meta(description="The text.")] = None
    thinking: Annotated[str | None, Meta(description="The thoughts of an earlier answer.")] = None
    tool_calls: Annotated[
        tuple[CallInput, ...] | None, Meta(description="The calls of an earlier answer.")
    ] = None
    tool_name: Annotated[
        str | None, Meta(description="The tool whose result the message of a tool is.")
    ] = None
    tool_call_id: Annotated[
        str | None,
        Meta(description="The id of the call; absent: the next one, of tool_name if that is set."),
    ] = None
    images: Images = None


class Options(RequestPart, frozen=True, kw_only=True):
    """How to draw the answer. An absent value is the model's."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {"mirostat": (None, 0), "tfs_z": (None, 1, 1.0), "typical_p": (None, 1, 1.0)}
    )
    # of how ollama loads a model and fills its context; penalties look at all tokens
    ignored: ClassVar[tuple[str, ...]] = (
        *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu"),
        *("num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
        *("draft_num_predict", "mirostat_eta", "mirostat_tau", "penalize_newline", "repeat_last_n"),
    )

    temperature: Annotated[float, bounds("temperature")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    num_predict: Annotated[
        Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None,
        Meta(description="Most tokens to generate; 0 and less: as many as the context has."),
    ] = None
    num_ctx: Annotated[
        Annotated[int, Meta(ge=0, le=INT32_MAX)] | None,
        Meta(description="No effect: the context is the server's, and a longer one is refused."),
    ] = None
    stop: Annotated[
        StopString | Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] | None,
        Meta(description="Texts that end the answer."),
    ] = None
    seed: Annotated[
        Annotated[int, bounds("seed")] | None,
        Meta(description="The same seed gives the same answer; -1: a random one."),
    ] = None
    repeat_penalty: Annotated[
        Annotated[float, bounds("repetition_penalty")] | None,
        Meta(description="As repetition_penalty."),
    ] = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None

    @property
    def fields(self) -> Mapping[str, Any]:
        """The same as fields of a chat."""
        same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        most = self.num_predict if self.num_predict and self.num_predict > 0 else None
        return {
            **{name: getattr(self, name) for name in same},
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": most,
            "seed": None if self.seed == -1 else self.seed,
            "stop": self.stop or (),
        }
