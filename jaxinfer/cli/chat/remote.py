"""Answers of a server over HTTP."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from jaxinfer.cli.chat.events import (
    Event,
    failure,
    no_stream,
    read_events,
    read_models,
    request_body,
)
from jaxinfer.core.chat_config import ServerAddress
from jaxinfer.core.errors import ConfigError, EngineError

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0  # without a byte: a long prompt may take minutes on a CPU
PIECE = 1 << 16
MAX_BODY_BYTES = 1 << 20  # of a response that is no stream


class RemoteAnswerer:
    """See ``Answerer``; each request has a connection of its own."""

    def __init__(self, address: ServerAddress, api_key: str = "", model: str | None = None) -> None:
        """Look the model up, or take the server's first one.

        Raises ``JaxinferError`` if the server cannot be used at all.
        """
        self.where = str(address)
        self._address = address
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        listed = dict(self._models(is_needed=model is None))
        if model is None and not listed:
            raise ConfigError(f"{self.where} lists no model; give its name as MODEL")
        self.model = model or next(iter(listed))
        self.max_model_len = listed.get(self.model)

    def answer(self, request: Mapping[str, Any]) -> Generator[Event]:
        """See ``Answerer``."""
        body = request_body(self.model, request)
        with self._response("POST", "/chat/completions", body) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            if response.status != http.client.OK:
                raise failure(self.where, response.status, headers, response.read(MAX_BODY_BYTES))
            media_type = headers.get("content-type", "").partition(";")[0].strip()
            if media_type != "text/event-stream":
                raise no_stream(self.where, media_type)
            yield from read_events(self._pieces(response), self.where)

    def _models(self, *, is_needed: bool) -> list[tuple[str, int | None]]:
        with self._response("GET", "/models") as response:
            body = response.read(MAX_BODY_BYTES)
            if response.status == http.client.OK:
                return read_models(body)
            refused = response.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
            if is_needed or refused:
                raise failure(self.where, response.status, {}, body)
        return []  # a server without this route may still answer

    def _pieces(self, response: http.client.HTTPResponse) -> Generator[bytes]:
        while piece := response.read1(PIECE):
            yield piece

    @contextmanager
    def _response(
        self, method: str, path: str, body: bytes | None = None
    ) -> Generator[http.client.HTTPResponse]:
        """The head of a response, whose body can be read in the block; its errors are sentences."""
        host, port = self._address.host, self._address.port
        if self._address.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=CONNECT_SECONDS, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        began = False
        with closing(connection):
            try:
                connection.connect()
                if body is not None:
                    connection.sock.settimeout(ANSWER_SECONDS)
                connection.request(method, self._address.path + path, body, self._headers)
                response = connection.getresponse()
                began = True
                yield response
            except (http.client.IncompleteRead, http.client.RemoteDisconnected, OSError) as error:
                raise self._broken(error, began) from error
            except http.client.HTTPException as error:
                raise EngineError(
                    f"{self.where} does not speak HTTP; give the address of an OpenAI-compatible "
                    "server with --url"
                ) from error

    def _broken(self, error: Exception, began: bool) -> EngineError:
        """The error for a connection that failed, or that ended too early."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if began:
            return EngineError(
                f"{self.where} ended the connection before the answer was complete ({reason}); "
                "try again once it runs"
            )
        if isinstance(error, TimeoutError):
            reason = "it does not answer in time"
        return EngineError(
            f"{self.where} cannot be reached ({reason}); start the server, or give another --url"
        )
