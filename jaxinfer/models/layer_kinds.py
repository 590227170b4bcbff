"""Which layers have a window and which rotate, of families that have layers of both kinds.

Owns: ``windows_by_layer`` and ``sliding_window``, ``upper_layer_windows`` (Qwen),
``pattern_windows`` (Gemma 3, Cohere 2),
``exaone_windows`` (EXAONE 4 and its mixtures), ``rotating_layers`` (SmolLM3, Llama 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf

_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)
_WINDOW = 4096  # transformers' default for Mistral and Qwen
_MAX_WINDOW_LAYERS = 28  # transformers' default for Qwen
_PATTERN = _INTERVAL = 4  # transformers' defaults
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


def upper_layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's windows: layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    first = hf.layer_index(config, "max_window_layers", _MAX_WINDOW_LAYERS)
    window = sliding_window(config)
    if not hf.flag(config, "use_sliding_window", False):
        window = None
    return windows_by_layer(config, window, first)


def sliding_window(config: Mapping[str, Any], default: int | None = _WINDOW) -> int | None:
    """The window in tokens: transformers' ``default`` if the key is absent, None if it is null."""
    if config.get("sliding_window", default) is None:
        return None
    return hf.positive_int(config, "sliding_window", default)


def windows_by_layer(
    config: Mapping[str, Any], window: int | None, first: int = 0
) -> tuple[int | None, ...]:
    """The window of each layer: ``layer_types`` decides, else layers from ``first`` on have one."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else None for i in range(num_layers))
    known = isinstance(kinds, list | tuple) and all(kind in _LAYER_TYPES for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise ConfigError(
            "config key 'layer_types' must hold 'full_attention' or 'sliding_attention' for each "
            f"of the {num_layers} layers"
        )
    if window is None and _SLIDING in kinds:
        raise ConfigError(
            f"config key 'layer_types' holds {_SLIDING!r}, but no window is switched on; set "
            "'sliding_window', and 'use_sliding_window' where the family has it"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def pattern_windows(config: Mapping[str, Any], default: int) -> tuple[int | None, ...]:
    """The window of each layer; layers whose number is a multiple of the pattern have none.

    Files that transformers 4.53 and later ones saved have "_sliding_window_pattern" next to
    "layer_types", which win: a pattern is only checked there.
    """
    window = sliding_window(config)
    if config.get("layer_types") is not None:
        for key in _PATTERNS:
            hf.layer_index(config, key, default)
        return windows_by_layer(config, window)
    pattern = hf.positive_int(config, hf.first_of(config, *_PATTERNS), default)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(window if (i + 1) % pattern else None for i in range(num_layers))


def exaone_windows(config: Mapping[str, Any]) -> tuple[tuple[int | None, ...], list[bool]]:
    """The window of each layer, and whether it rotates: of a model with windows the others do
    not.
    """
    windows, has_windows = _windows(config), config.get("sliding_window", _PATTERN) is not None
    return windows, [window is not None or not has_windows for window in windows]


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fourth layer has none."""
    window, pattern = sliding_window(config), config.get("sliding_window_pattern")
    if window is None or config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    if isinstance(pattern, str) and pattern and not {*pattern} - {"L", "G"}:  # local, global
        letters = (pattern[i % len(pattern)] for i in range(num_layers))
        return tuple(window if letter == "L" else None for letter in letters)
    every = hf.positive_int(config, "sliding_window_pattern", _PATTERN)
    return tuple(window if (i + 1) % every else None for i in range(num_layers))


def rotating_layers(config: Mapping[str, Any]) -> list[bool]:
    """Which layers rotate: by ``no_rope_layers``, or else by ``no_rope_layer_interval``."""
    given, num_layers = config.get("no_rope_layers"), hf.positive_int(config, "num_hidden_layers")
    interval = hf.positive_int(config, "no_rope_layer_interval", _INTERVAL)
    if given is None:
        return [(i + 1) % interval > 0 for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or {*given} - {0, 1}:
        raise ConfigError(
            "config key 'no_rope_layers' must hold 1 (rotates) or 0 for each of the "
            f"{num_layers} layers, got {short(given)}"
        )
    return [one == 1 for one in given]
