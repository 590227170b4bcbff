"""The model as editors ask local servers for it: ollama's lists, and llama.cpp's ``/props``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from jaxinfer.server.ollama.answers import ModelName
from jaxinfer.server.openai.responses import AnswerStruct

type Capability = Literal["completion", "embedding", "thinking", "tools"]
ModelBytes = Annotated[int, Meta(description="Bytes of the weights in memory.")]
Time = Annotated[str, Meta(description="The server's start, in RFC 3339.")]


class OllamaDetails(AnswerStruct, frozen=True, kw_only=True):
    """The parts of a model."""

    parent_model: Annotated[Literal[""], Meta(description="Always empty.")] = ""
    format: Annotated[str, Meta(description="Always jaxinfer.")] = "jaxinfer"
    family: Annotated[str, Meta(description="The family of the model.")]
    families: Annotated[list[str], Meta(description="The same in a list.")]
    parameter_size: Annotated[str, Meta(description="The number of parameters.")]
    quantization_level: Annotated[str, Meta(description="The form of most of the weights.")]


class OllamaModel(AnswerStruct, frozen=True, kw_only=True):
    """One name of the model."""

    name: ModelName
    model: ModelName
    modified_at: Time
    size: ModelBytes
    digest: Annotated[str, Meta(description="A digest of the name.")]
    details: Annotated[OllamaDetails, Meta(description="What the model is made of.")]


class OllamaModels(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/api/tags``."""

    models: Annotated[list[OllamaModel], Meta(description="The names of the model.")]


class OllamaRunningModel(OllamaModel, frozen=True, kw_only=True):
    """One name of the model, which stays loaded."""

    expires_at: Annotated[str, Meta(description="Never: a time that is far away.")]
    size_vram: Annotated[int, Meta(description="Bytes of the weights in a GPU's memory.")]
    context_length: Annotated[int, Meta(description="Most tokens of a prompt and its answer.")]


class OllamaRunningModels(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/api/ps``."""

    models: Annotated[list[OllamaRunningModel], Meta(description="The names of the model.")]


class OllamaModelInfo(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/api/show``."""

    modelfile: Annotated[str, Meta(description="Always empty.")] = ""
    license: Annotated[str, Meta(description="Always empty.")] = ""
    parameters: Annotated[str, Meta(description="The sampling defaults, one a line.")]
    template: Annotated[str, Meta(description="The chat template, in Jinja.")]
    details: Annotated[OllamaDetails, Meta(description="What the model is made of.")]
    model_info: Annotated[
        dict[str, Any], Meta(description="Architecture, parameters and context, as in GGUF.")
    ]
    capabilities: Annotated[list[Capability], Meta(description="What the model can do.")]
    modified_at: Time


class OllamaVersion(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/api/version``."""

    version: Annotated[str, Meta(description="The version of ollama whose API this is.")]


class GenerationSettings(AnswerStruct, frozen=True, kw_only=True):
    """``default_generation_settings`` of ``/props``."""

    n_ctx: Annotated[int, Meta(description="Most tokens of a prompt and its answer.")]
    params: Annotated[dict[str, Any], Meta(description="The sampling defaults.")]


class Modalities(AnswerStruct, frozen=True, kw_only=True):
    """The inputs of a model besides text."""

    vision: Annotated[Literal[False], Meta(description="Always false.")] = False
    audio: Annotated[Literal[False], Meta(description="Always false.")] = False


class Props(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/props``."""

    default_generation_settings: Annotated[
        GenerationSettings, Meta(description="The values of requests that set none.")
    ]
    total_slots: Annotated[int, Meta(description="Sequences that run at once.")]
    model_alias: ModelName
    model_path: ModelName
    chat_template: Annotated[str, Meta(description="The chat template, in Jinja.")]
    bos_token: Annotated[str | UnsetType, Meta(description="The token that begins texts.")] = UNSET
    eos_token: Annotated[str | UnsetType, Meta(description="The token that ends texts.")] = UNSET
    modalities: Annotated[Modalities, Meta(description="What it reads besides text: nothing.")]
    build_info: Annotated[str, Meta(description="jaxinfer and its version.")]
