"""Typed access to the keys of a Hugging Face ``config.json``; every error names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.core.errors import ConfigError
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.nn.activations import ACTIVATIONS, OTHER_NAMES

type HFConfig = Mapping[str, Any]


def positive_int(config: HFConfig, key: str, default: int | None = None) -> int:
    """``config[key]``, or ``default`` if it is absent or null; an int above 0."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config key {key!r} must be a positive integer, got {value!r}")
    return value


def layer_index(config: HFConfig, key: str, default: int) -> int:
    """``config[key]``, or ``default`` if it is absent or null; an int from 0."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"config key {key!r} must be an integer from 0, got {value!r}")
    return value


def positive_float(config: HFConfig, key: str, default: float | None = None) -> float:
    """``config[key]``, or ``default`` if it is absent or null; a number above 0."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config key {key!r} must be a positive number, got {value!r}")
    return float(value)


def flag(config: HFConfig, key: str, default: bool) -> bool:
    """``config[key]``, or ``default`` if it is absent or null; true or false."""
    value = _get(config, key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"config key {key!r} must be true or false, got {value!r}")
    return value


def supported_only(config: HFConfig, key: str, *supported: object) -> None:
    """Refuse a value that is not ``supported``; absent or null means ``supported[0]``."""
    value = _get(config, key, supported[0])
    if value not in supported:
        known = " or ".join(repr(s) for s in supported)
        raise ConfigError(
            f"config key {key!r} is {value!r}, and this family supports only {known}; {REMOVE_KEY}"
        )


def activation(config: HFConfig, key: str, default: str) -> str:
    """The name in ``ACTIVATIONS`` for ``config[key]``, or for ``default`` if it is absent."""
    value = _get(config, key, default)
    name = OTHER_NAMES.get(value, value) if isinstance(value, str) else ""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS.keys() - {"gelu_tanh"} | OTHER_NAMES.keys()))
        raise ConfigError(f"config key {key!r} is {value!r}; known activations are {known}")
    return name


def _get(config: HFConfig, key: str, default: object) -> object:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config key {key!r} is missing; add it to config.json")
    return value
