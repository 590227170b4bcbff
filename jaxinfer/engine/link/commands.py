"""Commands for a running engine: plain records that may be sent to another thread or process."""

from __future__ import annotations

import msgspec

from jaxinfer.core.request import SamplingParams


class Submission(msgspec.Struct, frozen=True, tag=True):
    """A new request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    cache_salt: str | None


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request whose output is no longer read."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Request a ``pong``."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish the current iteration and end."""


type Command = Submission | AbortRequest | Ping | Stop
