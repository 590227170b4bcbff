"""Server-sent events over ASGI: frames out, and the reader's leaving noticed.

Owns: framing, the response's headers, how a failure is told before and after the first event, and
what happens when the client goes away. The response is not cancelled then: ``close`` ends its
answer, so reading ends by itself and its pages are free after the engine's next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.guard import answer_error

DONE = b"data: [DONE]\n\n"
# proxies must pass each event on at once (X-Accel-Buffering is nginx's switch)
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def frame(data: bytes) -> bytes:
    """One event; JSON never holds a bare newline."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """An ASGI response that sends what ``read`` gives until that is nothing, then ``[DONE]``.

    The status waits for the first frame, so that what fails before it is an error like any other;
    later an error is an event. ``close`` is called when the client leaves and at the end, whatever
    the server's ASGI version tells about disconnects: a message, or an ``OSError`` of ``send``.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[bytes]],
        close: Callable[[], None],
        explain: Callable[[Exception], ApiError],
    ) -> None:
        self._read = read
        self._close = close
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        del scope
        try:
            async with leaving_noticed(receive, self._close):
                # a task of its own: each token goes through all that a task waits in, and here
                # that is the guards and the server too, in no cache any more: 4 of 44 us a token
                await asyncio.ensure_future(self._send_all(send))
        except OSError:  # from ASGI 2.4 on, the word for a client that has gone
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            data = await self._read()
        except Exception as error:
            await answer_error(send, self._explain(error))
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                data = await self._read()
            except Exception as error:
                data = b""
                await send(
                    {
                        "type": "http.response.body",
                        "body": frame(self._explain(error).body),
                        "more_body": True,
                    }
                )
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


@asynccontextmanager
async def leaving_noticed(receive: Receive, leave: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``leave`` when the client disconnects inside the block."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    listener = asyncio.ensure_future(listen())
    try:
        yield
    finally:
        listener.cancel()
