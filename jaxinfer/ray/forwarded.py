"""``Forwarded``: an HTTP request on its way from the ingress to a replica of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

# Of a request's JSON, in the order in which a prompt has them. Every API of the server is covered.
FIELDS = ("system", "instructions", "messages", "prompt", "input", "text_1", "query")
TEXTS = ("text", "content", "arguments", "output")  # of a message, and of a part of its content
MAX_COMPARED = 16_384  # characters of a prompt; Ray's prefix tree compares them in Python
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class Forwarded:
    """A request with its whole body. Ray's prefix-aware router reads ``prompt``."""

    scope: Mapping[str, Any]  # of ASGI, without what only the sender's process has
    body: bytes
    prompt: str  # never empty: the router divides by its length

    @classmethod
    def of(cls, scope: Mapping[str, Any], body: bytes) -> Forwarded:
        """The request of an ASGI scope."""
        kept = {name: scope[name] for name in SCOPE if name in scope}
        return cls(kept, body, compared_text(body))

    def without_header(self, name: bytes) -> Forwarded:
        """The request without the headers of this name."""
        headers = [(key, value) for key, value in self.scope["headers"] if key != name]
        return replace(self, scope={**self.scope, "headers": headers})


def compared_text(body: bytes) -> str:
    """The first characters of the prompt in a request's JSON; a blank if there is none.

    Only the texts count: what JSON has around each would make short prompts look alike.
    """
    try:
        fields = msgspec.json.decode(body)
        found = [_text(fields.get(name)) for name in FIELDS] if isinstance(fields, dict) else []
    except (msgspec.DecodeError, RecursionError):  # the replica refuses it
        return " "
    return "".join(found)[:MAX_COMPARED] or " "


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case int():  # a token
            return f"{value} "
        case list():
            return "".join(_text(item) for item in value)
        case dict():
            return "".join(_text(value.get(name)) for name in TEXTS)
        case _:
            return ""
