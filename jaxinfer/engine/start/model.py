"""The model of a source as an engine keeps it: its config, and the weights that stay quantised."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxinfer.core.config import EngineConfig
from jaxinfer.models.base import Model
from jaxinfer.models.registry import build_model
from jaxinfer.weights.sources import ModelSource
from pallas_kernels.arrangements import LANES, TILES
from pallas_kernels.checks import not_hopper
from pallas_kernels.native.library import variants

if TYPE_CHECKING:
    from jaxinfer.weights.quantised.choose import Forms


def model_of(source: ModelSource, config: EngineConfig, platform: str) -> tuple[ModelSource, Model]:
    """The source, with weights that are quantised on loading if the settings say so, and its model.

    ``config`` has its device's defaults. Raises ``ConfigError`` or ``SourceError``.
    """
    model = build_model(source.hf_config, config.dtype, config.max_model_len)
    if source.scheme or source.forms or config.quantization:
        from jaxinfer.weights.quantised.choose import quantised_source  # 40 ms

        source, forms = quantised_source(source, model, config.quantization)
        model = replace(model, **_kept(config, forms, platform))
    return source, model


def _kept(config: EngineConfig, forms: Forms, platform: str) -> dict[str, Any]:
    """The fields of a model for weights that stay quantised, and the order that kernels read."""
    if platform != "cpu":
        return {"forms": forms, "arrangement": TILES.name if not_hopper() is None else None}
    native = bool(variants())
    kept = native if config.cpu_weights == "auto" else config.cpu_weights == "quantised"
    if not kept:
        return {}
    return {"forms": forms, "arrangement": LANES.name if native else None}
