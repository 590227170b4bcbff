"""API keys: those of the settings, and those of a file that is read again on SIGHUP.

A key is kept only as its SHA-256 digest. Its name, which the file may give, is shown in logs,
metrics and traces.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig, is_usable_key

# Each request is compared with every key: 0.1 ms for 1,000 keys.
MAX_KEYS = 1000
_NAME = re.compile("[A-Za-z0-9._-]{1,64}")


class Key(NamedTuple):
    """A key's digest and its name, which is empty unless the file gives one."""

    digest: bytes  # 32 bytes
    name: str = ""

    @property
    def salt(self) -> str:
        """A text of 32 characters that differs from key to key, and from which none is found."""
        return hashlib.blake2b(self.digest, digest_size=16, person=b"prefix cache").hexdigest()


class Keys:
    """Keys, one of which a request must have.

    ``path`` is a file with further keys. Raises ``ConfigError`` if it cannot be used.
    """

    def __init__(self, keys: Iterable[str], path: str | None = None) -> None:
        self._given = tuple(Key(_digest(key)) for key in keys)
        self._path = path
        self._keys = self._given
        self.reload()

    def __len__(self) -> int:
        return len(self._keys)

    def reload(self) -> None:
        """Read the file again. Raises ``ConfigError`` and keeps the old keys if it is unusable."""
        if self._path is None:
            return
        given = {key.digest for key in self._given}
        found = [Key(_digest(key), name) for key, name in read_key_file(self._path).items()]
        if any(key.digest in given for key in found):
            raise ConfigError(
                f"the key file {self._path} has a key that api_key or admin_api_key has as well; "
                "remove it from one of them"
            )
        self._keys = (*self._given, *found)

    def find(self, headers: Headers) -> Key | None:
        """The key that the headers have, as a bearer's or, as Anthropic's clients send it, as
        ``x-api-key``; compares all digests, each in constant time.
        """
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else None, headers.get("x-api-key")]
        digests = [_digest(key.strip(" ")) for key in given if key is not None]
        matches = [
            known
            for digest, known in product(digests, self._keys)
            if hmac.compare_digest(digest, known.digest)
        ]
        return matches[0] if matches else None

    def accept(self, headers: Headers) -> bool:
        """True if the headers have one of the keys."""
        return self.find(headers) is not None


def api_keys(config: ServerConfig) -> Keys | None:
    """The keys that the settings name, or None if requests need none.

    An admin key is accepted too. Raises ``ConfigError`` for an unusable file.
    """
    if not config.api_key and config.api_key_file is None:
        return None
    return Keys((*config.api_key, *config.admin_api_key), config.api_key_file)


def read_key_file(path: str) -> Mapping[str, str]:
    """The keys in a file, each with its name or an empty text.

    A line is ``KEY`` or ``KEY NAME``; empty lines and lines that begin with # are skipped. Several
    keys may have the same name, so that a key can be replaced without an interruption. Raises
    ``ConfigError`` with the number of the invalid line, and never with its text.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the key file {path} cannot be read: {why}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        key, *names = line.split()[:3] or ("#",)
        if key.startswith("#"):
            continue
        where = f"line {number} of the key file {path}"
        if not is_usable_key(key):
            raise ConfigError(f"the key in {where} must be printable ASCII")
        if len(names) > 1 or not all(_NAME.fullmatch(name) for name in names):
            raise ConfigError(
                f"{where} must be KEY or KEY NAME; a name has up to 64 letters, digits, -, _ and ."
            )
        if key in keys:
            raise ConfigError(f"the key in {where} is there twice; remove one of the lines")
        keys[key] = names[0] if names else ""
    if not keys:
        raise ConfigError(f"the key file {path} has no keys; write one into each line")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"the key file {path} has {len(keys)} keys, and {MAX_KEYS} are allowed")
    return keys


def _digest(key: str) -> bytes:
    """The digest of a key. Headers are Latin-1; all known keys are ASCII."""
    return hashlib.sha256(key.encode("latin-1")).digest()
