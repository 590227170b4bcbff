"""The model of a source as an engine keeps it: its config, and the weights that stay quantised."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.models.base import Model, layer_of
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import slices_experts
from jaxinfer.weights.sources import ModelSource
from pallas_kernels.lib.arrangements import LANES, TILES
from pallas_kernels.lib.checks import not_hopper
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.native.library import missing
from pallas_kernels.quantised_gemm.native import misfit_of

MANY_DEVICES = 16  # up to which an error names the numbers that can have a model
PAGE_DTYPES = MappingProxyType({"bfloat16": jnp.dtype("bfloat16"), "fp8": BITS})

if TYPE_CHECKING:
    from jaxinfer.weights.quantised.choose import Forms


def model_of(
    source: ModelSource, config: EngineConfig, platform: str, devices: int = 1
) -> tuple[ModelSource, Model]:
    """The source, with weights that are quantised on loading if the settings say so, and its model,
    divided among so many devices.

    ``config`` has its device's defaults. Raises ``ConfigError``, also for a model that cannot be
    divided, or ``SourceError``.
    """
    model = build_model(source.hf_config, config.dtype, config.max_model_len)
    model = _with_pages(model, config)
    if config.enable_expert_parallel and not model.config.experts:
        raise ConfigError(
            f"enable_expert_parallel is on, but {model.architecture} has no experts; leave it out"
        )
    if config.dummy_routing != "auto":
        model = _dummy_routed(source, model, config.dummy_routing)
    if source.scheme or source.forms or config.quantization:
        from jaxinfer.weights.quantised.choose import quantised_source  # 40 ms

        source, forms = quantised_source(source, model, config.quantization)
        model = replace(model, **_kept(config, forms, platform))
    return source, model if devices == 1 else _divided(model, config, devices)


def _with_pages(model: Model, config: EngineConfig) -> Model:
    """The model with pages of ``kv_cache_dtype``; raises ``ConfigError`` if it can have none."""
    if (pages := page_dtype(config, model)) == model.config.dtype:
        return model
    refused = f"kv_cache_dtype is {config.kv_cache_dtype}, but {model.architecture} "
    if not any(model.state.bytes_per_entry):
        raise ConfigError(f"{refused}has no KV cache; leave it out")
    if (decoder := model.config.with_pages(pages)) is None:
        raise ConfigError(
            f"{refused}can keep its KV cache only in {model.config.dtype}, the dtype of the model; "
            "leave it out"
        )
    return replace(model, config=decoder)


def page_dtype(config: EngineConfig, model: Model) -> jnp.dtype:
    """The dtype of pages that the settings name, or the model's own."""
    return PAGE_DTYPES.get(config.kv_cache_dtype, model.config.dtype)


def _divided(model: Model, config: EngineConfig, devices: int) -> Model:
    """The model on several devices; raises ``ConfigError``, which names the numbers of devices that
    can have it, since heads, experts and groups all count.
    """
    try:
        return _parts(model, config, devices)
    except ConfigError as error:
        found = [str(n) for n in range(2, MANY_DEVICES + 1) if _is_divisible(model, config, n)]
        sizes = f"choose {' or '.join(found)} as" if found else "leave out"
        raise ConfigError(f"{error}; {sizes} tensor_parallel_size") from error


def _is_divisible(model: Model, config: EngineConfig, devices: int) -> bool:
    try:
        _parts(model, config, devices)
    except ConfigError:
        return False
    return True


def _parts(model: Model, config: EngineConfig, devices: int) -> Model:
    """The model on several devices, with whole experts on each or a part of every expert.

    Raises ``ConfigError`` if it cannot be divided.
    """
    blocks, whole = _expert_blocks(model), bool(config.enable_expert_parallel)
    layers = list(model.config.layers)
    for i, experts in model.config.experts.items():
        own = whole or experts.norms is not None  # of whole outputs
        slices = slices_experts(experts.width, devices, blocks.get(i, 1), whole=own)
        layers[i] = replace(layers[i], ffn=layers[i].ffn.with_experts(slices=slices))
    divided = replace(model, config=replace(model.config, layers=tuple(layers)), devices=devices)
    _ = divided.own_config  # an error for what cannot be divided
    return divided


def _expert_blocks(model: Model) -> dict[int, int]:
    """By layer the columns of an expert that share scales: blocks of outputs of gate and up, groups
    of inputs of down.
    """
    forms, found = dict(model.forms), dict[int, int]()
    for spec in model.declared_specs if forms else ():
        layer = layer_of(spec.path.partition("/")[0])
        if layer is None or spec.pieces is None or spec.sources[0].name not in forms:
            continue
        form = forms[spec.sources[0].name]
        block = form.block_outputs
        if spec.path.endswith("/down"):
            block = lcm(form.group or 1, form.super_group or 1)
        found[layer] = lcm(found.get(layer, 1), block)
    return found


def _dummy_routed(source: ModelSource, model: Model, routing: str) -> Model:
    """The model with forced choices of experts, which only random weights may have."""
    if source.checkpoint is not None:
        raise ConfigError(
            f"dummy_routing is {routing!r}, but {source.reference} has weights whose routers "
            "choose; use it with load_format='dummy'"
        )
    layers = tuple(
        replace(layer, ffn=layer.ffn.with_experts(dummy_routing=routing))
        for layer in model.config.layers
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
    native = missing() is None
    if config.cpu_weights == "auto":  # XLA dequantises a matrix of another form at each call
        forms = tuple((name, form) for name, form in forms if native and misfit_of(form) is None)
    elif config.cpu_weights == "float32":
        forms = ()
    return {"forms": forms, "arrangement": LANES.name if native and forms else None}
