"""Reads the rope section of a Hugging Face ``config.json``, in its old and new spelling.

Missing keys are derived as in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models.hf_config import (
    MAX_SIZE,
    HFConfig,
    flag,
    is_positive,
    positive_float,
    positive_int,
    supported_only,
    with_values,
)
from jaxinfer.nn.block import QueryGrowth
from jaxinfer.nn.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    inverse_frequencies,
)

_LAYER_TYPES = ("full_attention", "sliding_attention")
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
# Kinds whose original length may also be a top-level key.
_TOP_LEVEL_ORIGINAL = ("llama3", "yarn", "longrope")
_LONG_KINDS, _LONG_FACTOR = ("su", "yarn"), "long_factor"  # in older files of Phi-3
_IMAGES = "mrope"  # positions in images: of text the default
_CONTEXT_FIELD = "length"  # the field of a scaling that is set by the engine, not by a file
_TRUNCATE = "truncate"
# Keys that transformers knows. Like transformers, we ignore those that a kind does not use.
_KNOWN = frozenset(
    {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
        *("beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        *("mscale", "mscale_all_dim", _TRUNCATE, "partial_rotary_factor", "finetuned"),
        # positions in images, which are equal in all sections for text
        *("mrope_interleaved", "mrope_section"),
    }
)
# Keys of other engines, and the only values that change nothing.
_NEUTRAL = MappingProxyType({"extrapolation_factor": 1, "apply_yarn_scaling": True})
_BETA = "llama_4_scaling_beta"
_THETA, _PARTIAL, _POSITIONS = "rope_theta", "partial_rotary_factor", "max_position_embeddings"
SECTIONS = ("rope_scaling", "rope_parameters")  # the old and the new name of the section
ROPE_KEYS = (*SECTIONS, _THETA, _PARTIAL, _POSITIONS, _ORIGINAL)  # all that describe a rope


def rope_config(
    config: HFConfig,
    head_dim: int,
    *,
    theta: float = 10000.0,
    theta_key: str = _THETA,
    partial: float | None = None,
    used: bool = True,
) -> RopeConfig:
    """The rope config of ``rope_parameters`` (transformers 5) or ``rope_theta``, ``rope_scaling``.

    A value may be in several of these places if it is the same in all of them. ``theta`` is the
    family's default, ``theta_key`` the top-level key of the base, ``partial`` the family's default
    for the part of a head that rotates, None for a family whose heads rotate whole. A rope that is
    not ``used`` by any layer may be of heads of an odd width. Raises
    ``ConfigError`` for a scaling that is unknown, incomplete, or has unknown keys, and for places
    that differ.
    """
    if used and head_dim % 2:
        raise ConfigError(f"config key 'head_dim' must be even for rope, got {head_dim}")
    section = _section(config)
    kind = section.pop("rope_type", "default")
    kind = "longrope" if kind in _LONG_KINDS and _LONG_FACTOR in section else kind
    kind = "default" if kind == _IMAGES else kind
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"rope type {short(kind)} is unknown; use one of {', '.join(_KINDS)}")
    _add_top_level(section, config, kind, theta_key)
    base = positive_float(section, _THETA, theta)
    for key in (_THETA, _POSITIONS):
        section.pop(key, None)
    _refuse_unknown(kind, section)
    rotary_dim = None
    if kind != "proportional":
        rotary_dim = _rotary_dim(section.get(_PARTIAL), head_dim, partial)
    if kind == "yarn" and rotary_dim is not None:
        even_rotary(RopeConfig(head_dim, base, None, rotary_dim))  # its blend is of pairs
    scaling = _scaling(kind, section, config, rotary_dim or head_dim)
    rope = RopeConfig(head_dim, base, scaling, rotary_dim)
    _check_numbers(rope)
    return rope


def even_rotary(rope: RopeConfig | None) -> RopeConfig | None:
    """The rope of a family whose heads rotate an even number of components: in transformers the
    code of others rounds an odd number up, except with YaRN. Raises ``ConfigError``.
    """
    if rope is not None and rope.dim % 2:
        raise ConfigError(
            f"config key {_PARTIAL!r} gives {rope.dim} of the {rope.head_dim} components of a "
            "head, which must be an even number here; correct it"
        )
    return rope


def with_rope(config: HFConfig, section: HFConfig) -> HFConfig:
    """The config with a family's default rope section if it has none."""
    if any(config.get(place) is not None for place in SECTIONS):
        return config
    return with_values(config, {SECTIONS[0]: section})


def ropes_by_kind(
    config: HFConfig,
    head_dim: int,
    *,
    theta: float,
    local_theta: float | None = None,
    local_key: str = _THETA,
    partials: tuple[float | None, float | None] = (None, None),
) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers without a window, and of layers with one, which have a section of their
    own or none: a scaling is only that of layers without a window.

    ``local_key`` is the top-level key of the base for layers with a window, ``partials`` are the
    defaults for the part of a head that rotates, see ``rope_config``. Raises ``ConfigError`` as
    that does, and for a section of another kind of layers.
    """
    full = {key: config.get(key) for key in ROPE_KEYS}
    local = {key: config.get(key) for key in (_POSITIONS, local_key)}
    for place in SECTIONS:
        full[place], local[place] = _sections_by_kind(place, config.get(place))
    return (
        rope_config(full, head_dim, theta=theta, partial=partials[0]),
        rope_config(
            local,
            head_dim,
            theta=local_theta or theta,
            theta_key=local_key,
            partial=partials[1],
        ),
    )


def query_growth(config: HFConfig) -> tuple[HFConfig, QueryGrowth | None]:
    """The config without the key of the growth of queries in its rope section, and the growth."""
    section = next((s for s in _sections(config).values() if s.get(_BETA) is not None), None)
    if section is None:
        return config, None
    if section[_BETA] == 0:  # no growth
        return _without(config, _BETA), None
    growth = QueryGrowth(positive_float(section, _BETA), positive_int(section, _ORIGINAL))
    return _without(config, _BETA), growth


def without_partial(config: HFConfig, derived: float) -> HFConfig:
    """The config of a family that derives the part of heads that rotates, without its key.

    Raises ``ConfigError`` for another value than the ``derived`` one.
    """
    for section in (config, *_sections(config).values()):
        supported_only(section, _PARTIAL, derived)
    return with_values(_without(config, _PARTIAL), {_PARTIAL: None})


def section_theta(config: HFConfig) -> HFConfig:
    """The config without a base beside that of ``rope_parameters``: transformers writes the
    default of some families there.
    """
    given, _ = config.get(SECTIONS[1]), config.get(_THETA)
    has_one = isinstance(given, Mapping) and given.get(_THETA) is not None
    return with_values(config, {_THETA: None}) if has_one else config


def _sections(config: HFConfig) -> dict[str, Mapping[str, Any]]:
    found = {place: config.get(place) for place in SECTIONS}
    return {place: section for place, section in found.items() if isinstance(section, Mapping)}


def _without(config: HFConfig, key: str) -> HFConfig:
    """The config whose rope sections do not have the key."""
    sections = _sections(config).items()
    return with_values(config, {p: {k: v for k, v in s.items() if k != key} for p, s in sections})


def _sections_by_kind(place: str, given: Any) -> tuple[Any, Any]:
    """The section for layers without a window, and for layers with one.

    Next to sections of types of layers transformers reads nothing but ``truncate``, which it reads
    only there.
    """
    sections = given if isinstance(given, Mapping) else {}
    by_type = {kind: own for kind, own in sections.items() if isinstance(own, Mapping)}
    if not by_type or any(sections.get(kind, by_type) is None for kind in _LAYER_TYPES):
        return given, None  # as in published files
    if unknown := by_type.keys() - {*_LAYER_TYPES}:
        raise ConfigError(
            f"config key {place!r} has values for {short(', '.join(sorted(unknown)))}; this family "
            f"has layers of {' and '.join(_LAYER_TYPES)}"
        )
    truncate = {_TRUNCATE: sections.get(_TRUNCATE)}
    full, local = ({**by_type.get(name, {}), **truncate} for name in _LAYER_TYPES)
    return full, local


def _rotary_dim(given: Any, head_dim: int, default: float | None) -> int | None:
    """``RopeConfig.rotary_dim``; None if all components of a head rotate."""
    if default is None and given not in (None, 1.0):
        raise ConfigError(
            f"config key {_PARTIAL!r} is {short(given)}, and heads of this family rotate whole; "
            "set it to 1.0"
        )
    part = default if given is None else given
    if part is None or part == 1.0:
        return None
    found = int(head_dim * part) if is_positive(part) and part < 1 else 0
    if not found:
        raise ConfigError(
            f"config key {_PARTIAL!r} is {short(part)}; it must be a number up to 1 that gives at "
            f"least one of the {head_dim} components of a head"
        )
    return found


def _section(config: HFConfig) -> dict[str, Any]:
    """The entries of both sections, without nulls."""
    merged: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place in SECTIONS:
        for key, value in _of_all_layers(config, place).items():
            if value is None:
                continue
            name = "rope_type" if key == "type" else key
            if name in merged and merged[name] != value:
                raise ConfigError(
                    f"rope key {name!r} is {short(merged[name])} in config key {places[name]!r} "
                    f"and {short(value)} in {place!r}; make them equal or remove one"
                )
            merged[name], places[name] = value, places.get(name, place)
    return merged


def _of_all_layers(config: HFConfig, place: str) -> Mapping[str, Any]:
    """A section, which may have an equal one for each type of layers."""
    given = config.get(place)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"config key {place!r} must be an object, got {short(given)}")
    # {"full_attention": {...}, "sliding_attention": {...}}
    by_layer_type = [value for value in given.values() if isinstance(value, Mapping)]
    if not by_layer_type:
        return given
    if len(by_layer_type) < len(given) or any(one != by_layer_type[0] for one in by_layer_type):
        raise ConfigError(
            f"config key {place!r} has values for {short(', '.join(given))} that differ; this "
            "family rotates all layers alike"
        )
    return by_layer_type[0]


def _add_top_level(section: dict[str, Any], config: HFConfig, kind: str, theta_key: str) -> None:
    """Add the top-level keys that a rope of this kind has, and compare those that are there."""
    used = (_THETA, _PARTIAL, *((_ORIGINAL,) if kind in _TOP_LEVEL_ORIGINAL else ()))
    for key in (_THETA, _PARTIAL, _ORIGINAL, _POSITIONS):
        name = theta_key if key == _THETA else key
        value = config.get(name)
        if value is None:
            continue
        if key in section and section[key] != value:
            raise ConfigError(
                f"config key {name!r} is {short(value)}, and {key!r} of the rope section "
                f"('rope_scaling' or 'rope_parameters') is {short(section[key])}; make them equal "
                "or remove one"
            )
        if key in used:
            section[key] = value


def _check_numbers(rope: RopeConfig) -> None:
    """Raise ``ConfigError`` if the numbers give no frequencies, for a short or a long context."""
    longest = rope.for_context(max(rope.lengths(MAX_SIZE)))
    try:
        with np.errstate(all="ignore"):
            made = [inverse_frequencies(one) * one.attention_scale for one in (rope, longest)]
        finite = all(np.isfinite(one).all() for one in made)
    except (ArithmeticError, ValueError):  # a logarithm of 0, a division by 0
        finite = False
    if not finite:
        raise ConfigError(
            f"the numbers of the rope section, {short(rope.scaling)}, give angles that are not "
            "finite; correct them"
        )


def _refuse_unknown(kind: str, section: Mapping[str, Any]) -> None:
    scaling = _KINDS[kind]
    own = [] if scaling is None else [field.name for field in dataclasses.fields(scaling)]
    own = [name for name in own if name != _CONTEXT_FIELD]
    for key, value in section.items():
        if key in _NEUTRAL and value != _NEUTRAL[key]:
            raise ConfigError(
                f"rope key {key!r} is {short(value)}, which is not supported, only {_NEUTRAL[key]}"
            )
        if key not in own and key not in _KNOWN and key not in _NEUTRAL:
            keys = ", ".join(own) or "rope_theta"
            raise ConfigError(f"rope type {kind!r} has no key {short(key)}; its keys are {keys}")


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
    if kind == "llama3" and not given["high_freq_factor"] >= given["low_freq_factor"]:
        raise ConfigError("rope key 'high_freq_factor' must not be below 'low_freq_factor'")
    return scaling(**given)


def _value(values: Mapping[str, Any], name: str, head_dim: int) -> Any:
    """The checked value of one field of a scaling."""
    if name == _TRUNCATE:
        return flag(values, name, True)
    if name in ("short_factor", "long_factor"):
        return _factors(values, name, -(-head_dim // 2))
    if name == _ORIGINAL:
        given: Any = values.get(name)
        whole = isinstance(given, float) and given.is_integer()  # some files have 4096.0
        return positive_int({name: int(given)} if whole else values, name)
    if name in ("mscale", "mscale_all_dim") and values[name] == 0:
        return 0.0  # as in transformers, 0 means not used
    if name == _PARTIAL and is_positive(values[name]) and values[name] > 1:
        raise ConfigError(f"config key {_PARTIAL!r} is {short(values[name])}; it must be up to 1")
    return positive_float(values, name)


def _factors(values: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """The checked list of factors, one for each component."""
    given = values.get(name)
    if (
        not isinstance(given, list | tuple)
        or len(given) != count
        or not all(map(is_positive, given))
    ):
        raise ConfigError(
            f"rope key {name!r} must be a list of {count} positive numbers, one a component"
        )
    return tuple(float(one) for one in given)
