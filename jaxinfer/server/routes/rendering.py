"""Renders chats in processes of their own, which a template that runs too long does not survive.

The event loop only passes messages, so every other route answers while a template runs.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import msgspec

from jaxinfer.core.errors import TokenizerError
from jaxinfer.engine.link.spawn import Spawned, spawn
from jaxinfer.server.http.errors import ApiError
from jaxinfer.text.render_process import (
    LENGTH_BYTES,
    SECONDS,
    WALL_SECONDS,
    Rendered,
    RenderRequest,
)

PROGRAM = (sys.executable, "-m", "jaxinfer.text.render_process")
MAX_SENT = 32  # chats that a process has at a time: it need not wait for the loop between two
MAX_WAITING = 64  # chats with templates of their own, each of which may take 2 s of CPU time


class Renderer:
    """The processes of a server: one for its own templates, one for those that requests bring.

    A process is started for the first chat, and again after it has ended. Use it in one loop.
    """

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._own = _Process(program, MAX_SENT)
        # one at a time, so that a chat whose client has left is not rendered
        self._foreign = _Process(program, 1)

    @property
    def num_waiting(self) -> int:
        """Chats with templates of their own that are not rendered yet."""
        return len(self._foreign)

    def start(self) -> None:
        """Start the process for the server's templates before the first chat."""
        self._own.start()

    async def render(self, request: RenderRequest, *, is_own: bool) -> str:
        """The prompt of a chat. ``is_own``: the template is the server's, not the request's.

        Raises ``RequestError``, and ``TokenizerError`` if the template fails or takes too long;
        ``ApiError`` 429 if too many requests with templates of their own wait.
        """
        if is_own:
            return await self._own.render(request)
        if self.num_waiting >= MAX_WAITING:
            raise ApiError(
                429,
                f"{MAX_WAITING} requests with a chat_template of their own wait; try again later, "
                "or leave chat_template out",
                param="chat_template",
                code="queue_full",
                headers={"Retry-After": "2"},
            )
        return await self._foreign.render(request)

    async def close(self) -> None:
        """End the processes; chats that wait are cancelled."""
        await asyncio.gather(self._own.close(), self._foreign.close())


class _Process(asyncio.Protocol):
    """One process, and the chats that wait for it, oldest first."""

    def __init__(self, program: Sequence[str], max_sent: int) -> None:
        self._program = program
        self._max_sent = max_sent
        self._waiting: deque[tuple[bytes, asyncio.Future[str]]] = deque()
        self._num_sent = 0  # the first of those that wait
        self._received = bytearray()
        self._spawned: Spawned | None = None
        self._transport: asyncio.WriteTransport | None = None  # once it is connected
        self._connecting: asyncio.Task[object] | None = None
        self._ended = asyncio.Event()  # and reaped

    def __len__(self) -> int:
        """The chats that wait."""
        return len(self._waiting)

    async def render(self, request: RenderRequest) -> str:
        """See ``Renderer``; a cancelled call is not rendered if it has not begun."""
        frame = msgspec.json.encode(request)
        self.start()
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((frame, future))
        self._send()
        return await future

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._spawned is not None:
            return
        spawned = self._spawned = spawn(program=self._program)
        self._ended.clear()
        loop = asyncio.get_running_loop()
        connected = loop.create_unix_connection(lambda: self, sock=spawned.end)
        self._connecting = loop.create_task(connected)

    async def close(self) -> None:
        """End the process."""
        waiting, self._waiting = self._waiting, deque()
        self._num_sent = 0
        for _, future in waiting:
            future.cancel()
        if self._spawned is not None:
            self._spawned.process.kill()
            await self._ended.wait()

    # of the protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if len(self._received) < end:
                break
            frame = bytes(self._received[LENGTH_BYTES:end])
            del self._received[:end]
            self._end_first(frame)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended: the chat that it rendered gets an error, the others a new one."""
        spawned, self._spawned, self._transport = self._spawned, None, None
        self._received.clear()
        assert spawned is not None
        with spawned, suppress(subprocess.TimeoutExpired):
            spawned.process.wait(1.0)  # at once: its end has closed the socket
        self._ended.set()
        if self._num_sent and spawned.process.returncode != 0:
            self._end_first(spawned.process.returncode)
        self._num_sent = 0
        if self._waiting:
            self.start()

    def _end_first(self, answer: bytes | int) -> None:
        """End the oldest chat with the process's answer, or its exit code if it has ended."""
        _, future = self._waiting.popleft()
        self._num_sent -= 1
        if future.done():  # the client has left
            return
        try:
            if isinstance(answer, int):
                raise _killed(answer)
            future.set_result(msgspec.json.decode(answer, type=Rendered).prompt())
        except Exception as error:
            future.set_exception(error)

    def _send(self) -> None:
        """Send as many of the waiting chats as the process may have."""
        if self._transport is None:
            return
        while self._num_sent < min(self._max_sent, len(self._waiting)):
            frame, future = self._waiting[self._num_sent]
            if future.done():
                del self._waiting[self._num_sent]
                continue
            self._transport.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
            self._num_sent += 1


def _killed(code: int) -> TokenizerError:
    """The error for a chat whose process has ended with this code."""
    limits: dict[int, float] = {signal.SIGPROF: SECONDS, signal.SIGALRM: WALL_SECONDS}
    if seconds := limits.get(-code):
        return TokenizerError(
            f"The chat template takes more than {seconds:g} s for these messages; send fewer, or "
            "use another template"
        )
    return TokenizerError(f"The chat template ended its process (code {code})")
