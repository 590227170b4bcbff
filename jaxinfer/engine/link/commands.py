"""What is asked of a running engine, whichever thread or process it runs on.

Owns: the commands: plain records that may cross to another thread or process.
"""

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


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A request's reader has left."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer, if you can."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish the step at hand and end."""


type Command = Submission | Leave | Ping | Stop
