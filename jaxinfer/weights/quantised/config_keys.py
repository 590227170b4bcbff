"""Reads the keys of a ``quantization_config`` and refuses those that are not known."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import regex

from jaxinfer.core.checks import as_int, short
from jaxinfer.core.errors import ConfigError
from jaxinfer.weights.quantised.scheme import PATTERN

CONFIG = "quantization_config"


class Keys:
    """A config, or one object inside it, whose keys are read one by one.

    ``path`` is its place in config.json, for messages. Each method raises ``ConfigError`` with the
    key for a value that is not supported.
    """

    def __init__(self, config: object, path: str = CONFIG) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(f"config key {path!r} must be an object, got {short(config)}")
        self._config: Mapping[str, Any] = config
        self._path = path
        self._read: set[str] = set()

    def path(self, key: str) -> str:
        """The path of a key."""
        return f"{self._path}.{key}"

    def take(self, *names: str, default: Any = None) -> Any:
        """The value under the first of these names that is there and not null."""
        self._read.update(names)
        for name in names:
            if self._config.get(name) is not None:
                return self._config[name]
        return default

    def choice[T](self, *names: str, of: tuple[T, ...], default: Any = None) -> T:
        """A value that must be one of a few; strings are compared in lower case."""
        value = self.take(*names, default=default)
        plain = value.lower() if isinstance(value, str) else value
        for known in of:
            if type(plain) is type(known) and plain == known:
                return known
        supported = ", ".join(repr(known) for known in of)
        raise ConfigError(
            f"config key {self.path(names[0])!r} is {short(value)}, which is not supported "
            f"(supported: {supported}); use another checkpoint of this model"
        )

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        return self.choice(*names, of=(True, False), default=default)

    def group(self, *names: str, default: int | None = None) -> int | None:
        """A number of inputs that share a scale; None for -1, all of a row."""
        value = self.take(*names, default=default)
        size = as_int(value)
        if size is None or (size <= 0 and size != -1):
            raise ConfigError(
                f"config key {self.path(names[0])!r} must be a positive number or -1, "
                f"got {short(value)}"
            )
        return None if size == -1 else size

    def block(self, name: str) -> tuple[int, int] | None:
        """Numbers of outputs and inputs that share a scale, a list or "128x128"; None if absent."""
        value = self.take(name)
        if value is None:
            return None
        parts = value.split("x") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            parts = ()
        sizes = [int(p) if isinstance(p, str) and p.isdecimal() else as_int(p) for p in parts]
        match sizes:
            case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
                return outputs, inputs
        raise ConfigError(f"config key {self.path(name)!r} must be two sizes, got {short(value)}")

    def targets(self, *names: str) -> tuple[str, ...]:
        """A list of names and patterns, empty if it is absent."""
        value = self.take(*names, default=[])
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise ConfigError(
                f"config key {self.path(names[0])!r} must be a list of names, got {short(value)}"
            )
        for one in value:
            if one.startswith(PATTERN):
                check_pattern(one.removeprefix(PATTERN), f"config key {self.path(names[0])!r}")
        return tuple(value)

    def finish(self, no_effect: Set[str] = frozenset()) -> None:
        """Refuse a key that was not read, is not among ``no_effect``, and is not switched off."""
        for key, value in self._config.items():
            switched_off = value is None or value is False or value in ("", [], {})
            if key not in self._read and key not in no_effect and not switched_off:
                raise ConfigError(
                    f"config key {self.path(key)!r} is {short(value)}, which is not known here "
                    "and may change the weights; remove it if these weights do not need it"
                )


def check_pattern(pattern: str, of: str) -> None:
    """Raise ``ConfigError`` unless the pattern that ``of`` has is a regular expression."""
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{of} has the pattern {short(pattern)}, which is not a regular expression "
            f"({error}); correct it"
        ) from error
