"""Which layers have a window and which rotate, of families that have layers of both kinds.

Owns: ``exaone_windows`` (EXAONE 4 and its mixtures), ``rotating_layers`` (SmolLM3, Llama 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import sliding_window, windows_by_layer

_PATTERN = _INTERVAL = 4  # transformers' defaults


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
