"""``ResponseStore``: the last responses of a server, in memory, for later requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxinfer.server.responses.items import Item
from jaxinfer.server.responses.objects import ResponseObject


class Turn:
    """The items of one request or of its response, after those of the turn before it."""

    def __init__(self, before: Turn | None, items: Sequence[Any]) -> None:
        self.before = before
        self.num_users = 0  # the stored response and the stored turns after it
        self._data = msgspec.json.encode(items)

    @property
    def num_bytes(self) -> int:
        """Its size in memory, about."""
        return len(self._data)

    def conversation(self) -> list[Item]:
        """The items of this turn and all before it, in order."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [item for one in reversed(turns) for item in msgspec.json.decode(one._data)]


@dataclass(frozen=True)
class StoredResponse:
    """An ended response as JSON, its turn, and the events of a streamed background response.

    ``owner``: the salt of the key that it was made with, empty without keys.
    """

    id: str
    body: bytes
    turn: Turn
    is_background: bool = False
    frames: tuple[bytes, ...] | None = None
    owner: str = ""

    @classmethod
    def of(
        cls, response: ResponseObject, turn: Turn, frames: tuple[bytes, ...] | None, owner: str
    ) -> StoredResponse:
        """The stored form of a response."""
        body = msgspec.json.encode(response)
        return cls(response.id, body, turn, response.background, frames, owner)

    @property
    def asked(self) -> Turn:
        """The turn of its request."""
        assert self.turn.before is not None, "a response follows its request"
        return self.turn.before

    @property
    def num_bytes(self) -> int:
        """Its size in memory without the turn, about."""
        return len(self.body) + sum(map(len, self.frames or ()))


class ResponseStore:
    """The last ``max_responses`` responses in at most ``max_bytes`` of memory.

    The oldest are forgotten first. Their turns stay, and are counted, while a later response of
    the same conversation is stored.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: dict[str, StoredResponse] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, response_id: str) -> StoredResponse | None:
        """The response with this id, if it is stored."""
        return self._stored.get(response_id)

    def add(self, response: StoredResponse) -> None:
        """Store a response; one that is larger than the whole store is forgotten at once."""
        self._stored[response.id] = response
        self.num_bytes += response.num_bytes
        self._hold(response.turn)
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._stored)))

    def remove(self, response_id: str) -> bool:
        """Forget a response; False if it is not stored."""
        response = self._stored.pop(response_id, None)
        if response is None:
            return False
        self.num_bytes -= response.num_bytes
        self._release(response.turn)
        return True

    def _hold(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_users += 1
            if turn.num_users > 1:
                return
            self.num_bytes += turn.num_bytes
            turn = turn.before

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.num_users -= 1
            if turn.num_users:
                return
            self.num_bytes -= turn.num_bytes
            turn = turn.before
