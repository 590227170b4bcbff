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
from typing import NamedTuple, cast

import msgspec

from jaxinfer.core.errors import TokenizerError
from jaxinfer.core.fair_queue import FairQueue
from jaxinfer.engine.link.spawn import Spawned, spawn
from jaxinfer.server.http.errors import ApiError, queue_full
from jaxinfer.text.render_process import LENGTH_BYTES, WALL_TIMES, Rendered, RenderRequest

PROGRAM = (sys.executable, "-m", "jaxinfer.text.render_process")
# that a process has at a time, so that it need not wait for the loop between two short chats; a
# long one may take a while, in which another client's turn may come
MAX_SENT, MAX_SENT_BYTES = 32, 1 << 16
MAX_WAITING = 64  # chats with templates of their own, each of which may take its whole time
MAX_WAITING_BYTES = 1 << 28  # of the chats that wait for the server's templates, or for others


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

    async def render(self, request: RenderRequest, *, is_own: bool, client: str = "") -> str:
        """The prompt of a chat. ``is_own``: the template is the server's, not the request's.

        Clients take turns. Raises ``RequestError``, and ``TokenizerError`` if the template fails or
        takes too long; ``ApiError`` 429 if too much waits.
        """
        if is_own:
            return await self._own.render(request, client)
        if self.num_waiting >= MAX_WAITING:
            raise ApiError(
                429,
                f"{MAX_WAITING} requests with a chat_template of their own wait; try again later, "
                "or leave chat_template out",
                param="chat_template",
                code="queue_full",
                headers={"Retry-After": "2"},
            )
        return await self._foreign.render(request, client)

    async def close(self) -> None:
        """End the processes; chats that wait are cancelled."""
        await asyncio.gather(self._own.close(), self._foreign.close())


class _Chat(NamedTuple):
    """A chat that waits, and its message to the process."""

    frame: bytes
    max_seconds: float
    prompt: asyncio.Future[str]


class _Process(asyncio.Protocol):
    """One process, and the chats that wait for it."""

    def __init__(self, program: Sequence[str], max_sent: int) -> None:
        self._program = program
        self._max_sent = max_sent
        self._sent: deque[_Chat] = deque()  # in order; also to a process that has not begun yet
        self._unsent = FairQueue[_Chat]()
        self._num_chats = 0  # all
        self._num_bytes = 0  # of all
        self._received = bytearray()
        self._spawned: Spawned | None = None
        self._transport: asyncio.WriteTransport | None = None  # once it is connected
        self._connecting: asyncio.Task[object] | None = None
        self._ended = asyncio.Event()  # and reaped

    def __len__(self) -> int:
        """The chats that wait."""
        return self._num_chats

    async def render(self, request: RenderRequest, client: str) -> str:
        """See ``Renderer``; a cancelled call is not rendered if it has not begun."""
        frame = msgspec.json.encode(request)
        if self._num_chats and self._num_bytes + len(frame) > MAX_WAITING_BYTES:
            raise queue_full(
                f"{self._num_chats} chats wait for their prompts, and may have {MAX_WAITING_BYTES} "
                "bytes in all; try again later"
            )
        self.start()
        chat = _Chat(frame, request.max_seconds, asyncio.get_running_loop().create_future())
        self._num_chats += 1
        self._num_bytes += len(frame)
        self._unsent.put(client, chat)
        self._send()
        try:
            return await chat.prompt
        finally:
            self._num_chats -= 1
            self._num_bytes -= len(frame)
            self._unsent.remove(client, chat)

    def start(self) -> None:
        """Start the process unless it runs; raises ``ApiError`` if the system does not let it."""
        if self._spawned is not None:
            return
        try:
            spawned = self._spawned = spawn(program=self._program)
        except OSError as error:
            raise _unavailable(f"cannot start ({error})") from None
        self._ended.clear()
        loop = asyncio.get_running_loop()
        connected = loop.create_unix_connection(lambda: self, sock=spawned.end)
        self._connecting = loop.create_task(connected)

    async def close(self) -> None:
        """End the process."""
        for chat in self._take_all():
            chat.prompt.cancel()
        if self._spawned is not None:
            self._spawned.process.kill()
            await self._ended.wait()

    def _take_all(self) -> list[_Chat]:
        """The chats that wait, which are forgotten."""
        waiting = [*self._sent]
        self._sent.clear()
        while self._unsent:
            waiting.append(self._unsent.take())
        return [chat for chat in waiting if not chat.prompt.done()]

    # of the protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._sent = deque(chat for chat in self._sent if not chat.prompt.done())
        for chat in self._sent:  # that the process before it has not rendered
            self._write(chat)
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
        if self._sent and spawned.process.returncode != 0:
            self._end_first(spawned.process.returncode)
        if not self._sent and not self._unsent:
            return
        try:
            self.start()
        except ApiError as unavailable:  # the next chat tries it again
            for chat in self._take_all():
                chat.prompt.set_exception(unavailable)

    def _end_first(self, answer: bytes | int) -> None:
        """End the oldest chat with the process's answer, or its exit code if it has ended."""
        _, max_seconds, prompt = self._sent.popleft()
        if prompt.done():  # the client has left
            return
        try:
            if isinstance(answer, int):
                raise _killed(answer, max_seconds)
            prompt.set_result(msgspec.json.decode(answer, type=Rendered).prompt())
        except Exception as error:
            prompt.set_exception(error)

    def _send(self) -> None:
        """Send as many of the waiting chats as the process may have."""
        while self._transport is not None and self._unsent and self._takes_more():
            self._sent.append(self._unsent.take())
            self._write(self._sent[-1])

    def _takes_more(self) -> bool:
        num_bytes = sum(len(chat.frame) for chat in self._sent)
        return len(self._sent) < self._max_sent and num_bytes < MAX_SENT_BYTES

    def _write(self, chat: _Chat) -> None:
        assert self._transport is not None
        self._transport.write(len(chat.frame).to_bytes(LENGTH_BYTES, "little") + chat.frame)


def _unavailable(why: str) -> ApiError:
    return ApiError(
        503,
        f"the process that renders chats {why}, perhaps because the system has run out of memory; "
        "send the request again",
        code="renderer_unavailable",
        headers={"Retry-After": "1"},
    )


def _killed(code: int, max_seconds: float) -> TokenizerError | ApiError:
    """The error for a chat whose process has ended with this code."""
    if -code in (signal.SIGKILL, signal.SIGTERM):  # which no template brings about
        return _unavailable("was ended")
    times: dict[int, float] = {signal.SIGPROF: 1.0, signal.SIGALRM: WALL_TIMES}
    if -code in times:
        return TokenizerError(
            f"The chat template takes more than {times[-code] * max_seconds:g} s for these "
            "messages (--max-template-seconds); send fewer, or use another template"
        )
    return TokenizerError(f"The chat template ended its process (code {code})")
