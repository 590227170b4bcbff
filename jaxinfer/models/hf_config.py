"""Reads Hugging Face ``config.json`` dictionaries; every error names the key and what is possible.

Owns: typed access to keys, the rope section in its old and new spellings.
Must not know: which family asks, weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.core.errors import ConfigError
from jaxinfer.nn.rope import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling

type HFConfig = Mapping[str, Any]


def positive_int(config: HFConfig, key: str, default: int | None = None) -> int:
    """``config[key]``, or ``default`` where it is absent or null; an int above 0."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config key {key!r} must be a positive integer, got {value!r}")
    return value


def layer_index(config: HFConfig, key: str, default: int) -> int:
    """``config[key]``, or ``default`` where it is absent or null; an int from 0."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"config key {key!r} must be an integer from 0, got {value!r}")
    return value


def positive_float(config: HFConfig, key: str, default: float | None = None) -> float:
    """``config[key]``, or ``default`` where it is absent or null; a number above 0."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"config key {key!r} must be a positive number, got {value!r}")
    return float(value)


def flag(config: HFConfig, key: str, default: bool) -> bool:
    """``config[key]``, or ``default`` where it is absent or null; true or false."""
    value = _get(config, key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"config key {key!r} must be true or false, got {value!r}")
    return value


def supported_only(config: HFConfig, key: str, *supported: object) -> None:
    """Refuse a value that would change the arithmetic; absent or null means ``supported[0]``."""
    value = _get(config, key, supported[0])
    if value not in supported:
        known = " or ".join(repr(s) for s in supported)
        raise ConfigError(f"config key {key!r} is {value!r}; this family supports only {known}")


def rope_config(config: HFConfig, head_dim: int) -> RopeConfig:
    """The rope section: ``rope_parameters`` (transformers 5), or ``rope_theta``, ``rope_scaling``.

    Raises ``ConfigError`` for a scaling that is unknown, incomplete, or has unknown keys.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"config key {key!r} must be an object, got {given!r}")
    section = {key: value for key, value in given.items() if value is not None}
    theta = positive_float(section if "rope_theta" in section else config, "rope_theta", 10000.0)
    supported_only({**config, **section}, "partial_rotary_factor", 1.0)
    for key in ("rope_theta", "partial_rotary_factor"):
        section.pop(key, None)
    legacy_kind = section.pop("type", "default")
    kind = section.pop("rope_type", legacy_kind)
    return RopeConfig(head_dim, theta, _rope_scaling(kind, section))


def _rope_scaling(kind: str, values: dict[str, Any]) -> RopeScaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return _from_values(LinearScaling, kind, values)
        case "llama3":
            return _from_values(Llama3Scaling, kind, values)
        case "yarn":
            return _from_values(YarnScaling, kind, values)
        case _:
            raise ConfigError(
                f"rope type {kind!r} is unknown; use one of default, linear, llama3, yarn"
            )


def _from_values[S: RopeScaling](scaling: type[S], kind: str, values: dict[str, Any]) -> S:
    """A scaling whose fields are the section's keys."""
    fields = {field.name: field for field in dataclasses.fields(scaling)}
    if unknown := sorted(values.keys() - fields.keys()):
        raise ConfigError(
            f"rope type {kind!r} has no key {unknown[0]!r}; its keys are {', '.join(fields)}"
        )
    for name, field in fields.items():
        if name in values or field.default is dataclasses.MISSING:
            positive_float(values, name)
    return scaling(**values)


def _get(config: HFConfig, key: str, default: object) -> object:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config key {key!r} is missing; add it to config.json")
    return value
