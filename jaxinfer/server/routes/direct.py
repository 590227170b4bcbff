"""Requests to the app from its own process, without a socket."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Send

from jaxinfer.server.service.endpoint import MEDIA_TYPE


async def call_app(app: ASGIApp, method: str, path: str, body: bytes, send: Send) -> None:
    """Pass a request with a body of JSON to the app; ``send`` gets the messages of the response.

    Cancelling it ends the request, as a client that disconnects does.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", MEDIA_TYPE.encode())],
        "client": None,
        "state": {"client": ""},  # this process
        "server": None,
    }
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not unread:  # the next message would be a disconnect, which never comes
            await asyncio.get_running_loop().create_future()
        return unread.pop()

    await app(scope, receive, send)
