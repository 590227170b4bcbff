"""Reads the rope section of a Hugging Face ``config.json``, in its old and new spelling.

Missing keys are derived as in transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.core.errors import ConfigError
from jaxinfer.models.hf_config import HFConfig, flag, positive_float, positive_int
from jaxinfer.nn.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

_ORIGINAL = "original_max_position_embeddings"
_KINDS: Mapping[str, type[Any] | None] = MappingProxyType(
    {
        "default": None,
        "linear": LinearScaling,
        "dynamic": DynamicScaling,
        "yarn": YarnScaling,
        "llama3": Llama3Scaling,
        "longrope": LongRopeScaling,
        "proportional": ProportionalScaling,
    }
)
# Kinds whose original length may also be a top-level key, which then wins over the section's.
_TOP_LEVEL_ORIGINAL = ("llama3", "yarn", "longrope")
_CONTEXT_FIELD = "length"  # the field of a scaling that is set by the engine, not by a file
# Keys that transformers knows. Like transformers, we ignore those that a kind does not use.
_KNOWN = frozenset(
    {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
        *("beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        *("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned"),
    }
)
# Keys of other engines, and the only values that change nothing.
_NEUTRAL = MappingProxyType({"extrapolation_factor": 1, "apply_yarn_scaling": True})


def rope_config(config: HFConfig, head_dim: int) -> RopeConfig:
    """The rope config of ``rope_parameters`` (transformers 5) or ``rope_theta``, ``rope_scaling``.

    Raises ``ConfigError`` for a scaling that is unknown, incomplete, or has unknown keys.
    """
    if head_dim % 2:
        raise ConfigError(f"config key 'head_dim' must be even for rope, got {head_dim}")
    section = _section(config)
    theta = positive_float(section if "rope_theta" in section else config, "rope_theta", 10000.0)
    top_level = {key: config.get(key) for key in ("partial_rotary_factor", _ORIGINAL)}
    section.pop("rope_theta", None)
    legacy_kind = section.pop("type", "default")
    kind = section.pop("rope_type", legacy_kind)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"rope type {kind!r} is unknown; use one of {', '.join(_KINDS)}")
    if top_level["partial_rotary_factor"] is not None:
        section.setdefault("partial_rotary_factor", top_level["partial_rotary_factor"])
    if kind in _TOP_LEVEL_ORIGINAL and top_level[_ORIGINAL] is not None:
        section[_ORIGINAL] = top_level[_ORIGINAL]
    _refuse_unknown(kind, section)
    if kind != "proportional" and section.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config key 'partial_rotary_factor' is {section['partial_rotary_factor']!r}; heads "
            "that rotate in part are not supported, only 1.0"
        )
    return RopeConfig(head_dim, theta, _scaling(kind, section, config, head_dim))


def _section(config: HFConfig) -> dict[str, Any]:
    """The rope section without nulls. ``rope_scaling`` wins, as in transformers."""
    sections = {key: config.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, given in sections.items():
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"config key {key!r} must be an object, got {given!r}")
    given = sections["rope_scaling"] or sections["rope_parameters"] or {}
    by_layer_type = [value for value in given.values() if isinstance(value, Mapping)]
    if by_layer_type:  # {"full_attention": {...}, "sliding_attention": {...}}
        if len(by_layer_type) < len(given) or any(one != by_layer_type[0] for one in by_layer_type):
            raise ConfigError(
                f"config key 'rope_parameters' has values for {', '.join(given)} that differ; this "
                "family rotates all layers alike"
            )
        given = by_layer_type[0]
    return {key: value for key, value in given.items() if value is not None}


def _refuse_unknown(kind: str, section: Mapping[str, Any]) -> None:
    scaling = _KINDS[kind]
    own = [] if scaling is None else [field.name for field in dataclasses.fields(scaling)]
    own = [name for name in own if name != _CONTEXT_FIELD]
    for key, value in section.items():
        if key in _NEUTRAL and value != _NEUTRAL[key]:
            raise ConfigError(
                f"rope key {key!r} is {value!r}, which is not supported, only {_NEUTRAL[key]}"
            )
        if key not in own and key not in _KNOWN and key not in _NEUTRAL:
            keys = ", ".join(own) or "rope_theta"
            raise ConfigError(f"rope type {kind!r} has no key {key!r}; its keys are {keys}")


def _scaling(
    kind: str, section: dict[str, Any], config: HFConfig, head_dim: int
) -> RopeScaling | None:
    """The scaling, with missing keys derived as in transformers."""
    scaling = _KINDS[kind]
    if scaling is None:
        return None
    values = dict(section)
    if kind == "dynamic" or (kind in _TOP_LEVEL_ORIGINAL and _ORIGINAL not in values):
        values[_ORIGINAL] = positive_int(config, "max_position_embeddings")
    if kind in ("yarn", "longrope") and "factor" not in values and _ORIGINAL in section:
        positions = positive_int(config, "max_position_embeddings")
        values["factor"] = positions / positive_float(values, _ORIGINAL)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(scaling):
        name = field.name
        if name == _CONTEXT_FIELD or not (name in values or field.default is dataclasses.MISSING):
            continue
        given[name] = _value(values, name, head_dim)
    if kind == "llama3" and not given["high_freq_factor"] > given["low_freq_factor"]:
        raise ConfigError("rope key 'high_freq_factor' must be larger than 'low_freq_factor'")
    return scaling(**given)


def _value(values: Mapping[str, Any], name: str, head_dim: int) -> Any:
    """The checked value of one field of a scaling."""
    if name == "truncate":
        return flag(values, name, True)
    if name in ("short_factor", "long_factor"):
        return _factors(values, name, head_dim // 2)
    if name == _ORIGINAL:
        return int(positive_float(values, name))
    if name in ("mscale", "mscale_all_dim") and values[name] == 0:
        return 0.0  # as in transformers, 0 means not used
    return positive_float(values, name)


def _factors(values: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """The checked list of factors, one for each component."""
    given = values.get(name)
    if (
        not isinstance(given, list | tuple)
        or len(given) != count
        or not all(map(_is_factor, given))
    ):
        raise ConfigError(
            f"rope key {name!r} must be a list of {count} positive numbers, one a component"
        )
    return tuple(float(one) for one in given)


def _is_factor(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf
