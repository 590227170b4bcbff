"""``Ingress``: the ASGI app that passes each request to a replica of the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from jaxinfer.core.errors import EngineError
from jaxinfer.ray.forwarded import Forwarded
from jaxinfer.ray.merged import merged_metrics
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.sse import on_disconnect

# Seconds before each further try of a request that no replica has begun to answer: the router may
# choose one that is about to end until Ray has noticed that.
RETRY_SECONDS = (0.0, 0.5, 1.0, 2.0)
ALL_SECONDS = 10.0  # for the answers of all replicas
METRICS = "/metrics"  # the route that all replicas answer


class WholeAnswer(NamedTuple):
    """The name of a replica, and all messages of its answer."""

    replica: str
    messages: Sequence[Message]


def body_of(messages: Sequence[Message]) -> bytes:
    """The body of an answer."""
    return b"".join(message.get("body", b"") for message in messages)


class AnswerMessages(Protocol):
    """The messages of an answer, several at a time; a ``DeploymentResponseGenerator`` of Ray."""

    def __aiter__(self) -> AsyncIterator[Sequence[Message]]: ...

    def cancel(self) -> object: ...


class Forwarder:
    """Reads whole requests and sends on what the replica answers, as it comes.

    ``ask`` sends a request to a replica. It raises, as the answer does, one of ``lost`` if the
    replica has ended: a request that has no part of its answer yet then goes to another one.
    ``cancelled`` is the error of an answer that was cancelled. ``ask_all`` sends a request to every
    replica, for the metrics of all.
    """

    def __init__(
        self,
        ask: Callable[[Forwarded], AnswerMessages],
        ask_all: Callable[[Forwarded], Awaitable[Sequence[WholeAnswer]]],
        lost: tuple[type[Exception], ...],
        cancelled: type[BaseException],
        max_body_bytes: int,
    ) -> None:
        self._ask, self._ask_all = ask, ask_all
        self._lost, self._cancelled = lost, cancelled
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no route is a WebSocket
            await WebSocketClose()(scope, receive, send)
            return
        request = Forwarded.of(scope, await self._body(receive))
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        if (scope["method"], path) == ("GET", METRICS):
            answers = await self._ask_all(request.without_header(b"accept"))
            if answers:
                await self._send_metrics(answers, send)
            else:
                await _lost_all(scope)(scope, receive, send)
            return
        for wait in RETRY_SECONDS:
            await asyncio.sleep(wait)
            passing = _Passing(self._ask(request), send)
            try:
                async with on_disconnect(receive, passing.stop):
                    await passing.run()
                return
            except self._cancelled:
                if not passing.stopped:
                    raise
                return  # the client has gone
            except self._lost:
                if passing.started:  # the connection ends before the answer does
                    raise
        await _lost_all(scope)(scope, receive, send)

    async def _send_metrics(self, answers: Sequence[WholeAnswer], send: Send) -> None:
        """Send the metrics of every replica, or the error of one, such as for a missing key."""
        failed = [messages for _, messages in answers if messages[0]["status"] != 200]
        messages = failed[0] if failed else list(answers[0].messages)
        if not failed:
            texts = {name: body_of(messages).decode() for name, messages in answers}
            body = merged_metrics(texts).encode()
            headers = [
                (name, str(len(body)).encode() if name == b"content-length" else value)
                for name, value in messages[0]["headers"]
            ]
            messages = [
                {**messages[0], "headers": headers},
                {"type": "http.response.body", "body": body, "more_body": False},
            ]
        for message in messages:
            await send(message)

    async def _body(self, receive: Receive) -> bytes:
        """The body, or so much of it that the replica refuses it as too long."""
        body = bytearray()
        while len(body) <= self._max_body_bytes:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return bytes(body)


def _lost_all(scope: Scope) -> ASGIApp:
    """The error for a request that no replica has answered."""
    return ApiError(
        503,
        "the replicas for this request have ended before they answered; try again later",
        code="replicas_lost",
        headers={"Retry-After": "5"},
    ).response(scope)


@dataclass(eq=False)
class _Passing:
    """One answer on its way to the client."""

    answer: AnswerMessages
    send: Send
    started: bool = False
    ended: bool = False
    stopped: bool = False  # since the client has gone

    async def run(self) -> None:
        """Send the messages as they come."""
        try:
            async for messages in self.answer:
                self.started = True
                for message in messages:
                    self.ended = message["type"] == "http.response.body" and not message.get(
                        "more_body", False
                    )
                    await self.send(message)
        except BaseException:
            self.answer.cancel()
            raise

    def stop(self) -> None:
        """Cancel the answer, so that its sequences end, unless the client has all of it."""
        if not self.ended:
            self.stopped = True
            self.answer.cancel()


def ingress_app(forwarder: ASGIApp) -> ASGIApp:
    """An app that also answers the events of ASGI's lifespan, which Ray sends."""
    return Router(default=forwarder, redirect_slashes=False)


class Ingress:
    """The deployment that Ray's proxy calls; ``model`` is the handle of ``Replica``."""

    def __init__(self, model: Any, max_body_bytes: int) -> None:
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
        from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
            RequestCancelledError,
        )

        ask = model.options(method_name="answer", stream=True).remote
        lost = (RayActorError, EngineError)

        async def ask_all(request: Forwarded) -> Sequence[WholeAnswer]:
            asked = model.broadcast("whole_answer", request)
            found = await asked.results_async(timeout_s=ALL_SECONDS, return_exceptions=True)
            answers = [one for one in found if not isinstance(one, lost)]
            for one in answers:
                if isinstance(one, BaseException):
                    raise one
            return [WholeAnswer(*one) for one in answers]

        forwarder = Forwarder(ask, ask_all, lost, RequestCancelledError, max_body_bytes)
        self._app = ingress_app(forwarder)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app; Ray calls it once the object exists."""
        return self._app
