"""The requests and responses of each route, for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.server.anthropic import answers
from jaxinfer.server.anthropic.schema import CountTokensRequest, MessagesRequest
from jaxinfer.server.http.errors import ErrorBody, error_body
from jaxinfer.server.ollama import answers as ollama
from jaxinfer.server.ollama import models
from jaxinfer.server.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from jaxinfer.server.openai import pooling, responses
from jaxinfer.server.openai.fields import AnyRequest
from jaxinfer.server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    TokensRequest,
)
from jaxinfer.server.responses import objects
from jaxinfer.server.responses.listing import MAX_LISTED
from jaxinfer.server.responses.schema import ResponsesRequest


class Operation(NamedTuple):
    """One method of one path. ``response`` is a struct, or the media type of another body."""

    name: str
    summary: str
    response: type[msgspec.Struct] | str | None  # None: an empty body
    request: type[AnyRequest] | None = None
    events: tuple[type[msgspec.Struct], ...] = ()  # the data of the events of a stream
    named_events: bool = False  # their names are the types of the data; no [DONE] follows
    has_lines: bool = False  # a stream has lines of ``response``, and is the default
    error: type[msgspec.Struct] = ErrorBody  # in OPERATIONS: that of the path
    query: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # parameters with their schemas
    errors: tuple[int, ...] = ()  # besides those of all such operations


_OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("POST", "/v1/completions"): Operation(
            "createCompletion",
            "Continue prompts.",
            responses.Completion,
            CompletionRequest,
            (responses.CompletionChunk,),
        ),
        ("POST", "/v1/chat/completions"): Operation(
            "createChatCompletion",
            "Answer a chat.",
            responses.ChatCompletion,
            ChatCompletionRequest,
            (responses.ChatChunk,),
        ),
        ("POST", "/v1/generate"): Operation(
            "generate",
            "Continue one prompt; text, token ids and times come back plainly.",
            responses.GenerateResponse,
            GenerateRequest,
            (responses.GenerateResponse,),
        ),
        ("POST", "/inference/v1/generate"): Operation(
            "generateTokens",
            "Continue token ids with token ids, in the form of vLLM's route.",
            responses.TokensResponse,
            TokensRequest,
            (responses.TokensResponse,),
        ),
        **{
            ("POST", path): Operation(name, summary, response, request, errors=(429,))
            for path, name, summary, response, request in pooling.OPERATIONS
        },
        ("POST", "/tokenize"): Operation(
            "tokenize",
            "Token ids of a prompt, or of messages as the model would see them.",
            responses.Tokenized,
            TokenizeRequest,
        ),
        ("POST", "/detokenize"): Operation(
            "detokenize", "The text of token ids.", responses.Detokenized, DetokenizeRequest
        ),
        ("POST", "/v1/messages"): Operation(
            "createMessage",
            "Answer a conversation, in the form of Anthropic's API.",
            answers.AnswerMessage,
            MessagesRequest,
            answers.EVENTS,
            named_events=True,
        ),
        ("POST", "/v1/messages/count_tokens"): Operation(
            "countTokens",
            "Tokens of the prompt that /v1/messages would make of the same fields.",
            answers.TokenCount,
            CountTokensRequest,
        ),
        ("POST", "/v1/responses"): Operation(
            "createResponse",
            "Answer input items with output items, in the form of OpenAI's Responses API.",
            objects.ResponseObject,
            ResponsesRequest,
            objects.EVENTS,
            named_events=True,
        ),
        ("GET", "/v1/responses/{response_id}"): Operation(
            "getResponse",
            "A stored response, or its events if it was created in the background.",
            objects.ResponseObject,
            query=MappingProxyType(
                {
                    "stream": {"type": "boolean"},
                    "starting_after": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
                }
            ),
            errors=(400,),
        ),
        ("DELETE", "/v1/responses/{response_id}"): Operation(
            "deleteResponse", "Forget a stored response.", objects.DeletedResponse
        ),
        ("POST", "/v1/responses/{response_id}/cancel"): Operation(
            "cancelResponse",
            "End a background response early.",
            objects.ResponseObject,
            errors=(400,),
        ),
        ("GET", "/v1/responses/{response_id}/input_items"): Operation(
            "listInputItems",
            "The items that a stored response answers, those of earlier turns too.",
            objects.InputItemList,
            query=MappingProxyType(
                {
                    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
                    "order": {"enum": ["asc", "desc"]},
                    "after": {"type": "string"},
                    "include": {"type": "array", "items": {"type": "string"}},
                }
            ),
            errors=(400,),
        ),
        ("GET", "/v1/models"): Operation(
            "listModels", "The names under which the model is served.", responses.ModelList
        ),
        ("GET", "/v1/models/{model}"): Operation(
            "retrieveModel", "One of the names that /v1/models lists.", responses.ModelCard
        ),
        ("GET", "/health"): Operation("health", "Whether the engine's loop answers.", None),
        ("GET", "/ping"): Operation("ping", "As /health, under SageMaker's name.", None),
        ("POST", "/ping"): Operation("postPing", "As GET /ping.", None),
        ("GET", "/ready"): Operation("ready", "Whether new requests are taken.", None),
        ("GET", "/metrics"): Operation(
            "metrics", "Counters, gauges and histograms for Prometheus.", "text/plain"
        ),
        ("GET", "/stats"): Operation(
            "stats", "The same counters as JSON, with quantiles.", "application/json"
        ),
        ("GET", "/version"): Operation("version", "The server's version.", responses.Version),
        ("GET", "/openapi.json"): Operation("openapi", "This document.", "application/json"),
        ("GET", "/props"): Operation(
            "props", "Context, slots and template, in llama.cpp's form.", models.Props
        ),
        ("GET", "/api/version"): Operation(
            "ollamaVersion",
            "The version of ollama whose API /api is.",
            models.OllamaVersion,
        ),
        ("GET", "/api/tags"): Operation(
            "ollamaTags",
            "The names under which the model is served, in ollama's form.",
            models.OllamaModels,
        ),
        ("GET", "/api/ps"): Operation(
            "ollamaPs",
            "The same, with the memory of the model.",
            models.OllamaRunningModels,
        ),
        ("POST", "/api/show"): Operation(
            "ollamaShow",
            "What the model is made of, and what it can do.",
            models.OllamaModelInfo,
            OllamaShowRequest,
        ),
        ("POST", "/api/chat"): Operation(
            "ollamaChat",
            "Answer a chat, in ollama's form.",
            ollama.OllamaChatAnswer,
            OllamaChatRequest,
            has_lines=True,
            errors=(429,),
        ),
        ("POST", "/api/generate"): Operation(
            "ollamaGenerate",
            "Answer one question, or continue a text, in ollama's form.",
            ollama.OllamaGenerateAnswer,
            OllamaGenerateRequest,
            has_lines=True,
            errors=(429,),
        ),
        ("POST", "/api/embed"): Operation(
            "ollamaEmbed",
            "A vector of each text, in ollama's form; needs a model for embeddings.",
            ollama.OllamaEmbeddings,
            OllamaEmbedRequest,
            errors=(429,),
        ),
        ("POST", "/api/embeddings"): Operation(
            "ollamaEmbeddings",
            "The vector of one text, in ollama's older form.",
            ollama.OllamaEmbedding,
            OllamaEmbeddingsRequest,
            errors=(429,),
        ),
    }
)
OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {key: one._replace(error=error_body(key[1])) for key, one in _OPERATIONS.items()}
)
