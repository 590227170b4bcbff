"""Settings of ``jaxinfer chat`` beyond those of an engine: the server that answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from jaxinfer.core.errors import ConfigError

DEFAULT_PORTS = (("http", 80), ("https", 443))
VERSION_PATH = "/v1"


class ServerAddress(NamedTuple):
    """Where an OpenAI-compatible server is; ``path`` is before ``/models`` and the like."""

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """The server that answers instead of an engine in this process; ``url`` None: no server.

    Raises ``ConfigError`` naming the setting.
    """

    url: str | None = None  # http://HOST:PORT, also with /v1
    api_key: tuple[str, ...] = field(default=(), repr=False)  # the first is sent

    def __post_init__(self) -> None:
        if self.url is not None:
            server_address(self.url)
        if not all(key and key.isascii() and key.isprintable() for key in self.api_key):
            raise ConfigError("api_key must be printable ASCII; check the key for line breaks")

    @property
    def address(self) -> ServerAddress | None:
        """The server's, if there is one."""
        return None if self.url is None else server_address(self.url)


def server_address(url: str) -> ServerAddress:
    """The address in a URL; raises ``ConfigError`` if it has none."""
    given = url if "://" in url else f"http://{url}"
    wrong = ConfigError(f"url must be http://HOST:PORT, also with /v1 at its end, got {url!r:.200}")
    if not (given.isascii() and given.isprintable()) or " " in given:
        raise wrong
    try:
        parts = urlsplit(given)
        ports = dict(DEFAULT_PORTS)
        port = parts.port or ports[parts.scheme]
    except (ValueError, KeyError):
        raise wrong from None
    if not parts.hostname or parts.query or parts.fragment or parts.username is not None:
        raise wrong
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    if not path.endswith(VERSION_PATH):
        path += VERSION_PATH
    return ServerAddress(parts.scheme, parts.hostname, port, path)
