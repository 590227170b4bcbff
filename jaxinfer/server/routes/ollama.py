"""Handlers of ollama's API, and of llama.cpp's ``/props``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from jaxinfer.core.version import VERSION
from jaxinfer.server.api.fields import field_error
from jaxinfer.server.http.errors import OLLAMA_PATH, is_below
from jaxinfer.server.ollama.answers import (
    API_VERSION,
    OllamaChatAnswer,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaGenerateAnswer,
    OllamaMessage,
    timestamp,
)
from jaxinfer.server.ollama.chat import OllamaChat
from jaxinfer.server.ollama.inputs import Options
from jaxinfer.server.ollama.models import (
    Capability,
    GenerationSettings,
    Modalities,
    OllamaDetails,
    OllamaModel,
    OllamaModelInfo,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaVersion,
    Props,
)
from jaxinfer.server.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from jaxinfer.server.ollama.writer import OllamaChatWriter, OllamaGenerateWriter
from jaxinfer.server.routes.generation import answer_chat, answer_prompts
from jaxinfer.server.routes.pooling import INLINE_NUMBERS, vectors
from jaxinfer.server.service.endpoint import Call, Route, json_response
from jaxinfer.server.service.names import LATEST
from jaxinfer.server.service.service import Service, run_off_loop

NEVER = "9999-01-01T00:00:00Z"  # when the model is unloaded; a year that all time zones have
_ONE_MODEL = "a server has the one model that it was started with; start another with"
# routes of ollama that manage models, and what to do instead
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        f"{OLLAMA_PATH}/{name}": f"{_ONE_MODEL} `jaxinfer serve MODEL`"
        for name in ("blobs", "copy", "create", "delete", "pull", "push")
    }
)
_SHOWN = ("temperature", "top_k", "top_p", "min_p")  # of sampling defaults, always
_PENALTIES = MappingProxyType(  # and these with ollama's and llama.cpp's names
    {
        "repetition_penalty": "repeat_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
    }
)


def absent(path: str) -> str | None:
    """The remedy for a request to a route of ollama that does not exist here."""
    return next((ABSENT[one] for one in ABSENT if is_below(path, one)), None)


async def version(call: Call) -> ASGIApp:
    """The version of ollama whose API these routes have."""
    del call
    return json_response(OllamaVersion(version=API_VERSION))


async def tags(call: Call) -> ASGIApp:
    """The names of the model."""
    service = call.service
    cards = [OllamaModel(**_card(service, name)) for name in service.model_names]
    return json_response(OllamaModels(models=cards))


async def running(call: Call) -> ASGIApp:
    """The same: the model is always loaded."""
    service = call.service
    cards = [
        OllamaRunningModel(
            **_card(service, name),
            expires_at=NEVER,
            size_vram=service.client.facts.details.gpu_bytes,
            context_length=service.client.limits.max_model_len,
        )
        for name in service.model_names
    ]
    return json_response(OllamaRunningModels(models=cards))


async def show(call: Call) -> ASGIApp:
    """The parts of the model, and its capabilities."""
    await call.parse(OllamaShowRequest)
    service = call.service
    facts, limits = service.client.facts, service.client.limits
    family = facts.details.family
    lines = [f"{name} {value}" for name, value in _sampling(service).items()]
    return json_response(
        OllamaModelInfo(
            parameters="\n".join(lines),
            template=_chat_template(service),
            details=_details(service),
            model_info={
                "general.architecture": family,
                "general.basename": service.model_names[0],
                "general.parameter_count": facts.details.num_parameters,
                f"{family}.context_length": limits.max_model_len,
                f"{family}.vocab_size": facts.vocab_size,
            },
            capabilities=_capabilities(service),
            modified_at=timestamp(service.created),
        )
    )


async def props(call: Call) -> ASGIApp:
    """The context, the slots, the template and the sampling defaults, in llama.cpp's form."""
    service = call.service
    client, tokenizer = service.client, service.client.tokenizer
    special = {} if tokenizer is None else tokenizer.special_tokens_map
    tokens = {name: special[name] for name in ("bos_token", "eos_token") if special.get(name)}
    most = service.loaded.max_new_tokens
    return json_response(
        Props(
            default_generation_settings=GenerationSettings(
                n_ctx=client.limits.max_model_len,
                params={**_sampling(service), "n_predict": -1 if most is None else most},
            ),
            total_slots=client.limits.max_num_seqs,
            model_alias=service.model_names[0],
            model_path=service.model_names[0],
            chat_template=_chat_template(service),
            modalities=Modalities(),
            build_info=f"jaxinfer-{VERSION}",
            **tokens,
        )
    )


async def chat(call: Call) -> ASGIApp:
    """Answer a chat."""
    call.prompt_field = "messages"
    request = await call.parse(OllamaChatRequest)
    _check_context(call.service, request.chosen_options)
    if not request.messages:
        return json_response(OllamaChatAnswer(message=OllamaMessage(content=""), **_load(call)))
    _check_thinking(call.service, request.think, request.chat)
    return await answer_chat(call, request.chat, OllamaChatWriter)


async def generate(call: Call) -> ASGIApp:
    """Answer one question, or continue a text."""
    request = await call.parse(OllamaGenerateRequest)
    _check_context(call.service, request.chosen_options)
    if not request.prompt:
        return json_response(OllamaGenerateAnswer(response="", **_load(call)))
    if request.raw:
        prompts = await call.service.encode_all([request.prompt])
        return await answer_prompts(call, request.text, prompts, OllamaGenerateWriter)
    _check_thinking(call.service, request.think, request.chat)
    return await answer_chat(call, request.chat, OllamaGenerateWriter)


async def embed(call: Call) -> ASGIApp:
    """The vector of each text."""
    start = time.monotonic()
    request = await call.parse(OllamaEmbedRequest)
    found, usage = await vectors(call, request.embedding)
    num_numbers = sum(map(len, found))
    return await run_off_loop(
        lambda: json_response(
            OllamaEmbeddings(
                model=call.service.model_names[0],
                embeddings=[vector.tolist() for vector in found],
                total_duration=int((time.monotonic() - start) * 1e9),
                prompt_eval_count=usage.prompt_tokens,
            )
        ),
        num_numbers <= INLINE_NUMBERS,
    )


async def embeddings(call: Call) -> ASGIApp:
    """The vector of one text, in the older form."""
    request = await call.parse(OllamaEmbeddingsRequest)
    (vector,), _ = await vectors(call, request.embedding)
    return json_response(OllamaEmbedding(embedding=vector.tolist()))


def _load(call: Call) -> dict[str, Any]:
    """The fields of an answer to a request that only has the model loaded."""
    service = call.service
    return {
        "model": service.model_names[0],
        "created_at": timestamp(time.time()),
        "done": True,
        "done_reason": "load",
    }


def _check_context(service: Service, options: Options) -> None:
    """Raise ``ApiError`` if the request needs a longer context than there is."""
    most = service.client.limits.max_model_len
    if options.num_ctx is not None and options.num_ctx > most:
        raise field_error(
            "options.num_ctx",
            f"options.num_ctx is {options.num_ctx}, and this server's context has {most} tokens; "
            "leave it out, or start the server with a larger --max-model-len",
        )


def _check_thinking(service: Service, think: bool | str | None, chat: OllamaChat) -> None:
    """Raise ``ApiError`` if the model is to think and has no known marks of thoughts."""
    if think and not _thinks(service, chat.chosen_tools.tools):
        raise field_error(
            "think",
            "think needs a model whose thoughts have known marks; leave it out, or start the "
            "server with --reasoning-parser",
        )


def _thinks(service: Service, tools: Any = ()) -> bool:
    found = service.answer_format(service.config.chat_template, tools)
    return found is not None and found.thinks


def _capabilities(service: Service) -> list[Capability]:
    if service.client.limits.pooling:
        return ["embedding"]
    found: list[Capability] = ["completion"]
    if service.form_of_calls:
        found.append("tools")
    if service.has_chats and _thinks(service):
        found.append("thinking")
    return found


def _sampling(service: Service) -> dict[str, float]:
    """The sampling defaults, with ollama's names."""
    defaults = service.loaded.defaults
    found = {name: getattr(defaults, name) for name in _SHOWN}
    return found | {shown: getattr(defaults, name) for name, shown in _PENALTIES.items()}


def _chat_template(service: Service) -> str:
    if not service.has_chats:
        return ""
    return service.tokenizer.get_chat_template(service.config.chat_template)


def _card(service: Service, name: str) -> dict[str, Any]:
    """The fields of one name of the model."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}{LATEST}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": timestamp(service.created),
        "size": service.client.facts.details.weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> OllamaDetails:
    details = service.client.facts.details
    return OllamaDetails(
        family=details.family,
        families=[details.family],
        parameter_size=_count(details.num_parameters),
        quantization_level=details.form,
    )


def _count(number: int) -> str:
    """A number of parameters as ollama writes it: 134.5M, 7.2B."""
    millions = number / 1e6
    return f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.1f}B"


ROUTES = (
    Route(
        "GET",
        "/props",
        props,
        "props",
        "Context, slots and template, in llama.cpp's form.",
        Props,
    ),
    Route(
        "GET",
        "/api/version",
        version,
        "ollamaVersion",
        "The version of ollama whose API /api is.",
        OllamaVersion,
    ),
    Route(
        "GET",
        "/api/tags",
        tags,
        "ollamaTags",
        "The names under which the model is served, in ollama's form.",
        OllamaModels,
    ),
    Route(
        "GET",
        "/api/ps",
        running,
        "ollamaPs",
        "The same, with the memory of the model.",
        OllamaRunningModels,
    ),
    Route(
        "POST",
        "/api/show",
        show,
        "ollamaShow",
        "What the model is made of, and what it can do.",
        OllamaModelInfo,
        OllamaShowRequest,
    ),
    Route(
        "POST",
        "/api/chat",
        chat,
        "ollamaChat",
        "Answer a chat, in ollama's form.",
        OllamaChatAnswer,
        OllamaChatRequest,
        has_lines=True,
        errors=(429,),
    ),
    Route(
        "POST",
        "/api/generate",
        generate,
        "ollamaGenerate",
        "Answer one question, or continue a text, in ollama's form.",
        OllamaGenerateAnswer,
        OllamaGenerateRequest,
        has_lines=True,
        errors=(429,),
    ),
    Route(
        "POST",
        "/api/embed",
        embed,
        "ollamaEmbed",
        "A vector of each text, in ollama's form; needs a model for embeddings.",
        OllamaEmbeddings,
        OllamaEmbedRequest,
        errors=(429,),
    ),
    Route(
        "POST",
        "/api/embeddings",
        embeddings,
        "ollamaEmbeddings",
        "The vector of one text, in ollama's older form.",
        OllamaEmbedding,
        OllamaEmbeddingsRequest,
        errors=(429,),
    ),
)
