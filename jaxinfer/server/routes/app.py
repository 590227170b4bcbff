"""The ASGI application: the table of routes, and the responses for unknown routes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.guard import OPEN_PATHS, guarded
from jaxinfer.server.routes import (
    admin,
    generation,
    messages,
    ollama,
    pooling,
    responses,
    status,
    tokens,
)
from jaxinfer.server.routes.endpoint import Endpoint
from jaxinfer.server.routes.page import PAGE_ROUTES, page_files, page_handler
from jaxinfer.server.routes.service import Service

ROUTES = MappingProxyType(  # all methods of a path have the same handler
    {
        ("GET", "/health"): status.health,
        ("GET", "/ping"): status.health,  # SageMaker's health check, with either method
        ("POST", "/ping"): status.health,
        ("GET", "/ready"): status.ready,
        ("GET", "/metrics"): status.metrics,
        ("GET", "/stats"): status.stats,
        ("GET", "/version"): status.version,
        ("GET", "/openapi.json"): status.openapi,
        ("GET", "/v1/models"): status.models,
        ("GET", "/v1/models/{model:path}"): status.model,  # model names may contain slashes
        ("POST", "/tokenize"): tokens.tokenize,
        ("POST", "/detokenize"): tokens.detokenize,
        ("POST", "/v1/completions"): generation.completions,
        ("POST", "/v1/chat/completions"): generation.chat_completions,
        ("POST", "/v1/generate"): generation.generate,
        ("POST", "/inference/v1/generate"): generation.generate_tokens,
        ("POST", "/v1/messages"): messages.messages,
        ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
        ("POST", "/v1/responses"): responses.create,
        ("GET", "/v1/responses/{response_id}"): responses.stored,
        ("DELETE", "/v1/responses/{response_id}"): responses.stored,
        ("POST", "/v1/responses/{response_id}/cancel"): responses.cancel,
        ("GET", "/v1/responses/{response_id}/input_items"): responses.input_items,
        ("POST", "/v1/embeddings"): pooling.embeddings,
        ("POST", "/pooling"): pooling.pooling,
        ("POST", "/v1/score"): pooling.score,
        ("POST", "/score"): pooling.score,
        ("POST", "/v1/rerank"): pooling.rerank,
        ("POST", "/v2/rerank"): pooling.rerank,
        ("POST", "/rerank"): pooling.rerank,
        ("GET", "/api/version"): ollama.version,
        ("GET", "/api/tags"): ollama.tags,
        ("GET", "/api/ps"): ollama.running,
        ("POST", "/api/show"): ollama.show,
        ("POST", "/api/chat"): ollama.chat,
        ("POST", "/api/generate"): ollama.generate,
        ("POST", "/api/embed"): ollama.embed,
        ("POST", "/api/embeddings"): ollama.embeddings,
        ("GET", "/props"): ollama.props,
    }
)

BODILESS = frozenset(  # POST routes whose requests have no body, besides those with parameters
    {"/ping", "/resume", "/sleep", "/wake_up"}
)
ADMIN_ROUTES = MappingProxyType(  # with --admin-api-key; vLLM has all but /set_steering
    {
        ("POST", "/pause"): admin.pause,
        ("POST", "/resume"): admin.resume,
        ("POST", "/reset_prefix_cache"): admin.reset_prefix_cache,
        ("POST", "/update_weights"): admin.update_weights,
        ("POST", "/sleep"): admin.sleep,
        ("POST", "/wake_up"): admin.wake_up,
        ("GET", "/is_paused"): admin.is_paused,
        ("GET", "/is_sleeping"): admin.is_sleeping,
        ("GET", "/weight_info"): admin.weight_info,
        ("POST", "/set_steering"): admin.set_steering,
    }
)


def create_app(service: Service) -> ASGIApp:
    """The whole server as an ASGI app, with its guards."""
    table = ROUTES | ADMIN_ROUTES if service.config.admin_api_key else ROUTES
    page = page_files(service.config.root_path) if service.config.ui else {}
    if page:
        table = {**table, **dict.fromkeys(PAGE_ROUTES, page_handler(page))}
    by_path = {path: Endpoint(service, path, handler) for (_, path), handler in table.items()}
    methods = {path: [method for method, other in table if other == path] for path in by_path}
    routes = [Route(path, endpoint, methods=methods[path]) for path, endpoint in by_path.items()]
    for route in routes:  # Starlette's pattern ends with $, which a line feed may follow
        pattern = route.path_regex.pattern.removesuffix("$")
        route.path_regex = re.compile(rf"{pattern}\Z")

    async def no_route(request: Request, error: Exception) -> Response:
        """404 and 405."""
        assert isinstance(error, HTTPException)
        service.note_response(None, request.method, error.status_code, 0.0)
        path, headers = request.url.path[:200], error.headers
        if error.status_code == 405:
            allowed = (headers or {}).get("Allow", "")
            message = f"{path} does not take {request.method}; use {allowed}"
            refused = ApiError(405, message, code="method_not_allowed", headers=headers)
            return refused.response(request.scope)
        instead = ollama.absent(path.removeprefix(service.config.root_path))
        instead = instead or "/openapi.json lists the routes"
        message = f"there is no route {path}; {instead}"
        missing = ApiError(error.status_code, message, code="not_found", headers=headers)
        return missing.response(request.scope)

    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False

    def refused(method: str, status: int) -> None:
        service.note_response(None, method, status, 0.0)

    root = service.config.root_path
    known = {(method, root + path): by_path[path] for method, path in table if "{" not in path}
    with_body = {root + path for method, path in table if method == "POST" and path not in BODILESS}
    return guarded(
        ExactPaths(known, app),
        service.config,
        service.log,
        service.keys,
        refused,
        open_paths=(*OPEN_PATHS, *page),
        takes_body=lambda method, path: method == "POST" and path in with_body,
    )


@dataclass(eq=False)
class ExactPaths:
    """Looks endpoints up by method and exact path.

    The router handles all other requests: parameters, HEAD, 404, 405. It tries every route for each
    request, and two of its seven layers handle every event of a stream.
    """

    endpoints: Mapping[tuple[str, str], ASGIApp]
    router: ASGIApp

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self.endpoints.get((scope["method"], scope["path"]), self.router)
        return app(scope, receive, send)
