"""Routes that report on the server: health, readiness, models, counters, version."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from jaxinfer.core.version import VERSION
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.responses import ModelCard, ModelList, Version
from jaxinfer.server.service.endpoint import Call, Route, json_response
from jaxinfer.server.service.service import Service


async def health(call: Call) -> ASGIApp:
    """200 while the engine's loop is idle, or finishes steps in the time that they may take."""
    await check_engine(call.service)
    return Response(status_code=200)


async def check_engine(service: Service) -> None:
    """Raise ``ApiError`` 503 if the engine has ended, or finishes no step in the time for it."""
    client, seconds = service.client, service.config.health_timeout
    stalled = await client.stalled_seconds()
    if not client.alive or stalled >= seconds + client.longest_step:
        why = f"has finished no step for {stalled:.0f} s" if client.alive else "has stopped"
        raise ApiError(503, f"the engine {why}; restart the server", code="engine_dead")


async def ready(call: Call) -> ASGIApp:
    """200 while new requests are accepted."""
    if not call.service.ready:
        raise ApiError(503, "the server takes no new requests", code="not_ready")
    return Response(status_code=200)


async def models(call: Call) -> ASGIApp:
    """The names under which the model is served."""
    cards = [_card(call.service, name) for name in call.service.model_names]
    return json_response(ModelList(data=cards))


async def model(call: Call) -> ASGIApp:
    """One of the names of ``/v1/models``."""
    name = call.path_parameters["model"]
    call.service.check_model(name)
    return json_response(_card(call.service, name))


async def metrics(call: Call) -> ASGIApp:
    """The metrics in Prometheus's text format."""
    content_type, body = call.service.loaded.metrics.render(call.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def stats(call: Call) -> ASGIApp:
    """The same counters as JSON for people, with quantiles."""
    service = call.service
    counted: dict[str, Any] = {"model": service.model_names[0], **service.loaded.metrics.snapshot()}
    return json_response(counted)


async def version(call: Call) -> ASGIApp:
    """The server's version."""
    del call
    return json_response(Version(version=VERSION))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.created,
        root=service.client.facts.name,
        max_model_len=service.client.limits.max_model_len,
        tool_call_parser=service.form_of_calls,
    )


ROUTES = (
    Route("GET", "/health", health, "health", "Whether the engine's loop answers."),
    Route("GET", "/ping", health, "ping", "As /health, under SageMaker's name."),
    Route("POST", "/ping", health, "postPing", "As GET /ping."),
    Route("GET", "/ready", ready, "ready", "Whether new requests are taken."),
    Route(
        "GET",
        "/v1/models",
        models,
        "listModels",
        "The names under which the model is served.",
        ModelList,
    ),
    Route(
        "GET",
        "/v1/models/{model:path}",  # names may contain slashes
        model,
        "retrieveModel",
        "One of the names that /v1/models lists.",
        ModelCard,
    ),
    Route(
        "GET",
        "/metrics",
        metrics,
        "metrics",
        "Counters, gauges and histograms for Prometheus.",
        "text/plain",
    ),
    Route(
        "GET",
        "/stats",
        stats,
        "stats",
        "The same counters as JSON, with quantiles.",
        "application/json",
    ),
    Route("GET", "/version", version, "version", "The server's version.", Version),
)
