"""Traces: a span for each request, sent to an OpenTelemetry collector.

Attributes have vLLM's names, and for tokens also those of the semantic conventions for generative
AI, which have replaced them. OpenTelemetry is imported only if traces are on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.version import VERSION
from jaxinfer.server.api.answer import Answer
from jaxinfer.server.metrics.registry import SequenceProgress

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
CLOSE_SECONDS = 5.0  # for the last spans, at the end of the server
# gen_ai.operation.name of routes; of others it is text_completion
OPERATIONS = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/messages": "chat",
        "/v1/responses": "chat",
        "/v1/embeddings": "embeddings",
    }
)
# attributes of sampling parameters
_SAMPLING = MappingProxyType(
    {
        "gen_ai.request.max_tokens": "max_tokens",
        "gen_ai.request.temperature": "temperature",
        "gen_ai.request.top_p": "top_p",
        "gen_ai.request.top_k": "top_k",
        "gen_ai.request.n": "n",
        "gen_ai.request.seed": "seed",
    }
)


def otlp_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """The exporter for a collector; raises ``ConfigError`` if OpenTelemetry is not installed.

    It takes further settings from OpenTelemetry's own environment variables, such as
    OTEL_EXPORTER_OTLP_TRACES_HEADERS.
    """
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        return OTLPSpanExporter(endpoint=endpoint)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry, which is not installed ({error}); "
            "install the extra otel, or leave otlp_traces_endpoint out"
        ) from error


class Traces:
    """Sends spans from a thread of its own, in batches; when its queue is full, spans are lost.

    Nothing is global: two servers in one process send to their own collectors.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "jaxinfer"}))
        resource = resource.merge(Resource({"process.pid": os.getpid()}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxinfer", VERSION)
        self._extract = TraceContextTextMapPropagator().extract
        self._kind = SpanKind.SERVER
        self._failed = lambda words: Status(StatusCode.ERROR, words)

    def record(self, answer: Answer, model: str) -> None:
        """Queue the span of an answer that has ended; ``model`` is the served name."""
        seconds = time.monotonic() - answer.received
        end = time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._extract(answer.caller.trace or {}),
            kind=self._kind,
            start_time=end - round(seconds * 1e9),
        )
        if span.is_recording():
            span.set_attributes(dict(_attributes(answer, model, seconds)))
            if answer.error is not None:
                span.set_status(self._failed(str(answer.error)))
        span.end(end)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send the queued spans, for at most ``seconds``."""
        # a daemon, so that a collector that does not answer cannot keep the process alive
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        sender.join(seconds)


def _attributes(answer: Answer, model: str, seconds: float) -> Iterator[tuple[str, Any]]:
    """The attributes of a request's span; times in seconds, of its slowest sequence."""
    num_prompt, num_generated = answer.num_prompt_tokens, answer.num_tokens
    yield "gen_ai.operation.name", OPERATIONS.get(answer.route, "text_completion")
    yield "gen_ai.response.model", model
    yield "gen_ai.request.id", answer.request_id
    yield "http.route", answer.route
    if answer.caller.key_name:
        yield "jaxinfer.api_key.name", answer.caller.key_name
    yield from _sampling_attributes(answer.sampling)
    yield "gen_ai.usage.prompt_tokens", num_prompt
    yield "gen_ai.usage.completion_tokens", num_generated
    yield "gen_ai.usage.input_tokens", num_prompt
    yield "gen_ai.usage.output_tokens", num_generated
    yield "gen_ai.usage.cache_read.input_tokens", answer.num_cached_tokens
    yield "gen_ai.usage.num_sequences", len(answer.sequences)
    yield (
        "gen_ai.response.finish_reasons",
        [str(one.finish_reason or "none") for one in answer.sequences],
    )
    yield "gen_ai.latency.e2e", seconds
    if answer.first_token is not None:
        yield "gen_ai.latency.time_to_first_token", answer.first_token - answer.received
    yield from _phases(answer.sequences).items()
    if answer.error is not None:
        yield "error.type", type(answer.error).__name__


def _sampling_attributes(sampling: SamplingParams) -> Iterator[tuple[str, Any]]:
    for attribute, name in _SAMPLING.items():
        if (value := getattr(sampling, name)) is not None:
            yield attribute, value


def _phases(sequences: list[SequenceProgress]) -> Mapping[str, float]:
    """The seconds in each phase; empty if no sequence had a token and an end."""
    ended = [one.times for one in sequences if one.times is not None]
    if not ended:
        return {}
    return {
        "gen_ai.latency.time_in_queue": max(one.started - one.arrived for one in ended),
        "gen_ai.latency.time_in_model_prefill": max(one.first_token - one.started for one in ended),
        "gen_ai.latency.time_in_model_decode": max(one.finished - one.first_token for one in ended),
        "gen_ai.latency.time_in_model_inference": max(one.finished - one.started for one in ended),
    }
