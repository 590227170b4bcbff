"""jaxinfer: large language models served by pure JAX.

Owns: the version and the public names, loaded on first use, so that ``import jaxinfer`` costs
nothing and the command line starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxinfer.core.version import VERSION

if TYPE_CHECKING:
    from jaxinfer.core.beam_search import BeamSearchParams
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.core.pooling import PoolingParams
    from jaxinfer.core.request import SamplingParams
    from jaxinfer.core.structured import StructuredOutputsParams
    from jaxinfer.engine.api.async_llm import AsyncLLM
    from jaxinfer.engine.api.language_model import LanguageModel
    from jaxinfer.engine.api.llm import LLM
    from jaxinfer.engine.api.load import load
    from jaxinfer.engine.api.save import save
    from jaxinfer.engine.requests.outputs import (
        CompletionOutput,
        Logprob,
        RequestOutput,
        WeightSpan,
    )

__version__ = VERSION

__all__ = (
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LanguageModel",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "WeightSpan",
    "load",
    "save",
)


def __getattr__(name: str) -> Any:
    match name:
        case "BeamSearchParams":
            module = "jaxinfer.core.beam_search"
        case "EngineConfig":
            module = "jaxinfer.core.config"
        case "PoolingParams":
            module = "jaxinfer.core.pooling"
        case "SamplingParams":
            module = "jaxinfer.core.request"
        case "StructuredOutputsParams":
            module = "jaxinfer.core.structured"
        case "LLM":
            module = "jaxinfer.engine.api.llm"
        case "LanguageModel":
            module = "jaxinfer.engine.api.language_model"
        case "load":
            module = "jaxinfer.engine.api.load"
        case "save":
            module = "jaxinfer.engine.api.save"
        case "AsyncLLM":
            module = "jaxinfer.engine.api.async_llm"
        case "CompletionOutput" | "Logprob" | "RequestOutput" | "WeightSpan":
            module = "jaxinfer.engine.requests.outputs"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
