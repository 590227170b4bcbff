"""The ASGI application: the routes of all modules, and the responses for unknown ones."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.server.document.openapi import openapi_document
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
from jaxinfer.server.routes.page import PAGE_PATHS, page_files, page_handler
from jaxinfer.server.service.endpoint import Call, Endpoint, Route, json_response
from jaxinfer.server.service.service import Service


async def openapi(call: Call) -> ASGIApp:
    """The description of all routes."""
    service = call.service
    return json_response(
        openapi_document(
            ROUTES,
            secured=service.keys is not None,
            models=service.model_names,
            vocab_size=service.client.facts.vocab_size,
            root_path=service.config.root_path,
        )
    )


_DOCUMENT = Route("GET", "/openapi.json", openapi, "openapi", "This document.", "application/json")
ROUTES = (
    *status.ROUTES,
    _DOCUMENT,
    *tokens.ROUTES,
    *generation.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *pooling.ROUTES,
    *ollama.ROUTES,
    *admin.ROUTES,
)


def create_app(service: Service) -> ASGIApp:
    """The whole server as an ASGI app, with its guards."""
    served = [route for route in ROUTES if service.config.admin_api_key or not route.is_admin]
    served += admin.PROFILE_ROUTES if service.config.profiler_dir else ()
    page = page_files(service.config.root_path) if service.config.ui else {}
    if page:
        handler = page_handler(page)
        served += [Route("GET", path, handler) for path in PAGE_PATHS]
    by_path = {one.path: Endpoint(service, one.path, one.handler) for one in served}
    methods = {path: [one.method for one in served if one.path == path] for path in by_path}
    routes = [
        StarletteRoute(path, endpoint, methods=methods[path]) for path, endpoint in by_path.items()
    ]
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
    fixed = [route for route in served if "{" not in route.path]
    known = {(route.method, root + route.path): by_path[route.path] for route in fixed}
    with_body = {root + route.path for route in fixed if route.takes_body}
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
