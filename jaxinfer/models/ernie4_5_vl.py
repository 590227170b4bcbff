"""ERNIE 4.5 VL's text decoder: ERNIE 4.5's mixture, in whose files experts of images follow those
of text.

Source: ``modeling_ernie4_5_vl_moe`` of Hugging Face transformers. Tokens of text have equal
positions in all sections of the rope, which then is ERNIE 4.5's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.ernie_parts import ERNIE_TENSORS, dense_network, ernie_config
from jaxinfer.models.experts import expert_specs
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_param_specs
from jaxinfer.models.params import ParamSpec, transposed
from jaxinfer.models.sources import Source
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig

# Numbers for text and for images: transformers has a list of the second one alone.
_PAIRS = (
    *("moe_intermediate_size", "moe_num_experts", "moe_layer_start_index", "moe_layer_end_index"),
    "moe_capacity",
)
_WIDTH, _COUNT = 1536, 64  # transformers' defaults
_UNUSED = (  # of training, and of images
    *("moe_all_to_all_dropout", "moe_aux_loss_lambda", "moe_dropout_prob", "moe_group"),
    *(
        "moe_group_experts",
        "moe_group_orthogonal_loss",
        "moe_norm_gate_logits",
        "use_recompute_moe",
    ),
    *("moe_multimodal_dispatch_use_allgather", "moe_orthogonal_loss_lambda", "moe_z_loss_lambda"),
    *("moe_reverse_token_drop", "moe_use_hard_gate", "moe_with_send_router_loss"),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key in _UNUSED:
        config.get(key)
    hf.supported_only(config, "moe_gate_act", "softmax")
    hf.supported_only(config, "rope_3d", True)
    hf.supported_only(config, "use_rmsnorm", True)
    given = hf.with_defaults(config, {"moe_intermediate_size": _WIDTH, "moe_num_experts": _COUNT})
    own = {key: _of_text(given, key) for key in _PAIRS if given.get(key) is not None}
    kinds = hf.layer_kinds(
        config,
        "mlp_layer_types",
        hf.positive_int(config, "num_hidden_layers"),
        ("dense", "sparse"),
    )
    own["architectures"] = ["Ernie4_5_MoeForCausalLM"]
    if kinds is not None:
        own |= {"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 1}
    decoder = ernie_config(hf.with_values(given, own), dtype)
    layers, dense = list(decoder.layers), dense_network(given)
    for i, kind in enumerate(kinds or ()):
        layers[i] = replace(layers[i], ffn=dense) if kind == "dense" else layers[i]
    return replace(decoder, layers=tuple(layers))


def _of_text(config: Mapping[str, Any], key: str) -> Any:
    """The number for text of a key that may have one for images, too."""
    value = config[key]
    if not isinstance(value, list):
        return value
    if len(value) not in (2, 3) or not all(type(one) in (int, float) for one in value):
        raise ConfigError(
            f"config key {key!r} is {short(value)}; it must be a number, or a list of one for text "
            "and one for images"
        )
    return value[0]


def of_text(biases: np.ndarray) -> np.ndarray:  # [2, E] -> [E]
    """The biases of experts of text."""
    return biases[0]


def _with_images(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    del sources
    return [np.stack((array, np.zeros_like(array)))]


of_text.inverse = _with_images


def _expert_specs(path: str, source: str, ffn: ExpertsConfig, width: int) -> Iterator[ParamSpec]:
    """ERNIE 4.5's parameters, with the router's inputs before its outputs."""
    for spec in expert_specs(path, source, ffn, width, ERNIE_TENSORS):
        (first, *_), (count, inputs) = spec.sources, (ffn.count, width)
        if spec.path == f"{path}router":
            own = (first._replace(shape=(inputs, count)),)
            yield replace(spec, sources=own, build=transposed)
        elif spec.path == f"{path}choice_bias":
            yield replace(spec, sources=(first._replace(shape=(2, count)),), build=of_text)
        else:
            yield spec


FAMILY = ModelFamily(
    name="ernie4_5_vl",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, interleaved=True, experts=_expert_specs),
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"(model\.)?(vision_model|resampler_model)\..*",
        # of images
        r"model\.layers\.\d+\.mlp\.(gate\.weight_1|experts\.\d+\.(gate|up|down)_proj\.weight)",
    ),
)
