"""``WholeAnswers``: several deltas at a time of answers that are read when they are complete.

A reader that is woken for each token costs the server's process more than its deltas do. So of
answers that are not streamed the first token is sent at once, as metrics need it, and the others
together. They are not joined: the text of a delta is that of its tokens, as usage and logprobs of
parts of an answer count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace

from jaxinfer.engine.requests.news import News
from jaxinfer.engine.requests.outputs import Delta

MAX_HELD = 16  # deltas; an answer that its reader stops lacks at most these


class WholeAnswers:
    """The deltas that are held back, by request and completion; on the engine's thread."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, list[Delta]]] = {}
        self._num_open: dict[str, int] = {}  # completions that have not ended

    def add(self, request_id: str, n: int) -> None:
        """Hold deltas of a request with ``n`` completions back."""
        self._held[request_id], self._num_open[request_id] = {}, n

    def forget(self, request_id: str) -> None:
        """Drop what is held of a request; its later deltas pass."""
        self._held.pop(request_id, None)
        self._num_open.pop(request_id, None)

    def passed(self, news: News) -> News:
        """The news with the deltas that are sent now."""
        if not self._held:
            return news
        return replace(news, deltas=tuple(chain.from_iterable(map(self._passed, news.deltas))))

    def _passed(self, delta: Delta) -> Sequence[Delta]:
        name, ends = delta.request_id, delta.finish_reason is not None
        if (of_request := self._held.get(name)) is None:
            return (delta,)
        is_first = delta.index not in of_request
        held = of_request.setdefault(delta.index, [])
        held.append(delta)
        if not (is_first or ends or len(held) == MAX_HELD):
            return ()
        of_request[delta.index] = []
        if ends:
            self._num_open[name] -= 1
            if not self._num_open[name]:
                self.forget(name)
        return held
