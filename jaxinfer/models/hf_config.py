"""Typed access to the keys of a Hugging Face ``config.json``; every error names the key.

Sizes are bounded where they are read, before anything of their size is made: a file of some lines
could otherwise take all memory.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.nn.activations import OTHER_NAMES
from pallas_kernels.lib.activations import ACTIVATIONS

type HFConfig = Mapping[str, Any]

MAX_LAYERS, MAX_EXPERTS, MAX_HEAD_DIM = 10_000, 100_000, 1 << 16
# Of all layers: each has tensors of its own, which are listed before a file is compared with them.
# Kimi-K2 has 23,040.
MAX_ALL_EXPERTS = 200_000
MAX_SIZE = 2**31 - 1  # widths, heads, positions and the vocabulary
MAX_NUMBER = 3e38  # float32 holds it
_LAYERS = ("num_hidden_layers", "n_layer", "num_nextn_predict_layers", "mtp_num_hidden_layers")
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    "num_shared_experts",
)
_HEAD_DIMS = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOST: Mapping[str, int] = MappingProxyType(
    {
        **{key: MAX_LAYERS for key in _LAYERS},
        **{key: MAX_EXPERTS for key in _EXPERTS},
        **{key: MAX_HEAD_DIM for key in _HEAD_DIMS},
    }
)


def positive_int(config: HFConfig, key: str, default: int | None = None) -> int:
    """``config[key]``, or ``default`` if it is absent or null; an int above 0."""
    return _integer(config, key, default, 1, "a positive integer")


def layer_index(config: HFConfig, key: str, default: int) -> int:
    """``config[key]``, or ``default`` if it is absent or null; an int from 0."""
    return _integer(config, key, default, 0, "an integer from 0")


def _integer(config: HFConfig, key: str, default: int | None, least: int, words: str) -> int:
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"config key {key!r} must be {words}, got {short(value)}")
    if value > (most := _MOST.get(key, MAX_SIZE)):
        raise ConfigError(
            f"config key {key!r} is {short(value)}, and at most {most} is supported; check that "
            "config.json is the model's own"
        )
    return value


def positive_float(config: HFConfig, key: str, default: float | None = None) -> float:
    """``config[key]``, or ``default`` if it is absent or null; a number above 0."""
    value = _get(config, key, default)
    if not is_positive(value):
        raise ConfigError(f"config key {key!r} must be a positive number, got {short(value)}")
    return float(value)


def is_positive(value: Any) -> bool:
    """True for a number above 0 that float32 holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_NUMBER


def head_counts(config: HFConfig, kv_heads: int | None = None) -> tuple[int, int]:
    """The numbers of query heads and of KV heads (by default ``kv_heads``, or one for each query
    head), which must divide the first.
    """
    queries = positive_int(config, "num_attention_heads")
    pairs = positive_int(config, "num_key_value_heads", kv_heads or queries)
    if queries % pairs:
        raise ConfigError(
            f"config key 'num_attention_heads' {queries} is not a multiple of "
            f"'num_key_value_heads' {pairs}"
        )
    return queries, pairs


def head_dim(config: HFConfig, default: int | None = None) -> int:
    """The width of a head: its key, a family's ``default`` if it is absent, or else, and if it is
    null, the width divided by the number of query heads.
    """
    if default is not None and "head_dim" not in config:
        return default
    heads = positive_int(config, "num_attention_heads")
    return positive_int(config, "head_dim", positive_int(config, "hidden_size") // heads)


def flag(config: HFConfig, key: str, default: bool) -> bool:
    """``config[key]``, or ``default`` if it is absent; true or false, which null is as well.

    transformers tests such a key by its truth, or refuses null.
    """
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config key {key!r} must be true or false, got {short(value)}")
    return bool(value)


def supported_only(config: HFConfig, key: str, *supported: object) -> None:
    """Refuse a value that is not ``supported``; absent or null means ``supported[0]``.

    The null of a flag is false, as in ``flag``.
    """
    value = _get(config, key, supported[0])
    if value is True and config.get(key, True) is None:
        value = False
    if value not in supported:
        known = " or ".join(repr(s) for s in supported)
        raise ConfigError(
            f"config key {key!r} is {short(value)}, and this family supports only {known}; "
            f"{REMOVE_KEY}"
        )


def first_of(config: HFConfig, *keys: str) -> str:
    """The first of these keys that is set, or the first one."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def with_values(config: HFConfig, values: HFConfig) -> HFConfig:
    """The config with values under the common keys, which were read from a family's own."""
    return ChainMap(dict(values), cast("dict[str, Any]", config))


def with_defaults(config: HFConfig, defaults: HFConfig) -> HFConfig:
    """The config with values for keys that it does not have, or that are null and no flags."""
    missing = {
        key: value
        for key, value in defaults.items()
        if key not in config or (config[key] is None and not isinstance(value, bool))
    }
    return with_values(config, missing)


def layer_kinds(
    config: HFConfig, key: str, num_layers: int, known: tuple[str, ...]
) -> list[str] | None:
    """``config[key]``, one of the ``known`` kinds for each layer; None if it is absent or null."""
    kinds = config.get(key)
    if kinds is None:
        return None
    fits = isinstance(kinds, list | tuple) and len(kinds) == num_layers
    if not fits or not all(kind in known for kind in kinds):
        raise ConfigError(
            f"config key {key!r} must hold {' or '.join(map(repr, known))} for each of the "
            f"{num_layers} layers"
        )
    return list(kinds)


def activation(config: HFConfig, key: str, default: str) -> str:
    """The name in ``ACTIVATIONS`` for ``config[key]``, or for ``default`` if it is absent."""
    value = _get(config, key, default)
    name = OTHER_NAMES.get(value, value) if isinstance(value, str) else ""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS.keys() - {"gelu_tanh"} | OTHER_NAMES.keys()))
        raise ConfigError(f"config key {key!r} is {short(value)}; known activations are {known}")
    return name


def _get(config: HFConfig, key: str, default: object) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config key {key!r} is missing; add it to config.json")
    return value
