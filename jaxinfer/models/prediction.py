"""Prediction layers: further layers of a checkpoint, for multi-token prediction, that are not used.

config.json says how many there are. Their tensors are known by their names, of which there are
three kinds: layers after the last one (DeepSeek-V3, GLM-4.5), ``mtp_layers`` (MiMo) and ``mtp``
(Qwen3.5, Qwen3-Next), which is nothing else, so that it counts whatever config.json says: those of
Qwen3-Next and some copies of Qwen3.6 say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.models import hf_config as hf

_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_NAME = re.compile(
    r"(?:model\.)?(?:language_model\.)?"
    r"(?:(?:model\.)?(?:layers\.(?P<layer>\d+)|mtp_layers\.(?P<own>\d+))|(?P<alone>mtp))\..+"
)


def prediction_layers(config: Mapping[str, Any]) -> int:
    """The number of prediction layers; raises ``ConfigError`` for a value that is no number."""
    return max(hf.layer_index(config, key, 0) for key in _KEYS)


def without_prediction_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint whose prediction layers are left out."""
    return {key: 0 if key in _KEYS else value for key, value in config.items()}


def prediction_tensors(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """A function of a tensor's name: whether it belongs to a prediction layer."""
    count = prediction_layers(config)
    first = hf.positive_int(config, "num_hidden_layers") if count else 0

    def is_one(name: str) -> bool:
        match = _NAME.fullmatch(name)
        if match is None:
            return False
        if match["layer"] is not None:
            return first <= int(match["layer"]) < first + count
        return match["alone"] is not None or int(match["own"]) < count

    return is_one


def left_out(count: int) -> str:
    """The line that says so."""
    layers = (
        "prediction layer (multi-token prediction) is"
        if count == 1
        else (f"{count} prediction layers (multi-token prediction) are")
    )
    return f"the checkpoint's {layers} not used"
