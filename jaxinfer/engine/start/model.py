"""The model of a source as an engine keeps it: its config, and the weights that stay quantised."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.models.base import Model
from jaxinfer.models.registry import build_model
from jaxinfer.weights.sources import ModelSource
from pallas_kernels.lib.arrangements import LANES, TILES
from pallas_kernels.lib.checks import not_hopper
from pallas_kernels.native.library import variants
from pallas_kernels.quantised_gemm.native import misfit_of

if TYPE_CHECKING:
    from jaxinfer.weights.quantised.choose import Forms


def model_of(source: ModelSource, config: EngineConfig, platform: str) -> tuple[ModelSource, Model]:
    """The source, with weights that are quantised on loading if the settings say so, and its model.

    ``config`` has its device's defaults. Raises ``ConfigError`` or ``SourceError``.
    """
    model = build_model(source.hf_config, config.dtype, config.max_model_len)
    if config.dummy_routing != "auto":
        model = _dummy_routed(source, model, config.dummy_routing)
    if source.scheme or source.forms or config.quantization:
        from jaxinfer.weights.quantised.choose import quantised_source  # 40 ms

        source, forms = quantised_source(source, model, config.quantization)
        model = replace(model, **_kept(config, forms, platform))
    return source, model


def _dummy_routed(source: ModelSource, model: Model, routing: str) -> Model:
    """The model with forced choices of experts, which only random weights may have."""
    if source.checkpoint is not None:
        raise ConfigError(
            f"dummy_routing is {routing!r}, but {source.reference} has weights whose routers "
            "choose; use it with load_format='dummy'"
        )
    layers = tuple(
        replace(layer, ffn=layer.ffn.with_dummy_routing(routing)) for layer in model.config.layers
    )
    if layers == model.config.layers:
        raise ConfigError(
            f"dummy_routing is {routing!r}, but {model.architecture} has no experts; leave it out"
        )
    return replace(model, config=replace(model.config, layers=layers))


def _kept(config: EngineConfig, forms: Forms, platform: str) -> dict[str, Any]:
    """The fields of a model for weights that stay quantised, and the order that kernels read."""
    if platform != "cpu":
        return {"forms": forms, "arrangement": TILES.name if not_hopper() is None else None}
    native = bool(variants())
    if config.cpu_weights == "auto":  # XLA dequantises a matrix of another form at each call
        forms = tuple((name, form) for name, form in forms if native and misfit_of(form) is None)
    elif config.cpu_weights == "float32":
        forms = ()
    return {"forms": forms, "arrangement": LANES.name if native and forms else None}
