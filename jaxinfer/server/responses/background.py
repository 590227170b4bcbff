"""``BackgroundRun``: a response that is generated whether or not a client reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from jaxinfer.server.api.answer import Answer
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.responses.store import Turn
from jaxinfer.server.responses.writer import ResponseWriter


class BackgroundRun:
    """Runs from its creation until the answer has ended; then ``close`` is called.

    ``asked``: the turn of its request. ``owner``: see ``StoredResponse``.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        answer: Answer,
        asked: Turn,
        explain: Callable[[Exception], ApiError],
        close: Callable[[], None],
    ) -> None:
        self.writer = writer
        self.asked = asked
        self.owner = answer.caller.key_salt
        self._answer = answer
        self._explain = explain
        self._close = close
        self._changed = asyncio.Event()  # replaced after each change
        self._task = asyncio.ensure_future(self._run())

    async def cancel(self) -> None:
        """End the response early, and wait until it has ended."""
        self.writer.is_cancelled = True
        self._answer.stop()
        await asyncio.wait([self._task])

    def reader(self, first: int) -> Callable[[], Awaitable[bytes]]:
        """A function that waits for events and returns those since its last call, beginning with
        event number ``first``; it returns none at the end.
        """
        position = first

        async def read() -> bytes:
            nonlocal position
            while len(self.writer.frames) <= position and not self._task.done():
                await self._changed.wait()
            found = self.writer.frames[position:]
            position += len(found)
            return b"".join(found)

        return read

    async def _run(self) -> None:
        writer, answer = self.writer, self._answer
        writer.begin()
        try:
            while updates := await answer.read():
                writer.add(updates)
                self._notify()
            writer.end(answer)
        except Exception as error:
            writer.fail(self._explain(error))
        finally:
            self._close()
            self._task.add_done_callback(lambda _: self._notify())

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
