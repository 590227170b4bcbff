"""Hunyuan 4 (Hy4): latent attention to chosen tokens with gates and sinks, four residual streams.

Source: ``modeling_hy_v4`` of Hugging Face transformers. There the head, the router and the
indexer's weights are float32; here they have the dtype of the others, and sums are in float32.
Adjacent components rotate, as in ``modeling_hy_v4_vl``, since published weights need that (vLLM
rotates so, too), while ``modeling_hy_v4`` of 5.24 rotates i with i + half. With the key
"rope_interleave": false that is done here as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.indexed_latent import indexed_config, indexed_param_specs, indexer_kinds
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS, LatentNames
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.models.streams import stream_specs
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.mixers.indexed_latent_spec import IndexedLatentConfig
from jaxinfer.nn.residual_spec import HyperResidual
from pallas_kernels.experts.stack import Activation

# transformers' defaults
_HEADS, _STREAMS, _MAGNITUDE, _EPS, _LIMIT = 16, 4, 2.0, 1e-6, 10.0
_DEFAULTS = MappingProxyType({"routed_scaling_factor": 2.827, "index_topk_freq": 4})
_WITH_IMAGES = "hy_v4_vl_text"  # of Hy4-VL, the norms of whose latents have the common epsilon
_SIZES = MappingProxyType(  # which its "text_config" may leave out
    {
        **{"q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "v_head_dim": 256},
        **{"qk_rope_head_dim": 64, "index_n_heads": 32, "moe_intermediate_size": 2048},
        **{"n_routed_experts": 256, "num_experts_per_tok": 8},
    }
)
_PARTS = MappingProxyType(  # of published files
    {"enable_ihc": True, "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True}
)
_NAMES = LatentNames(gate="linear_gate")
# the starts of the names of tensors of streams, by the paths of their parameters
_BLOCKS = MappingProxyType(
    {"mixer_residual": "hc_attn_layer.hc_pre.hc_", "ffn_residual": "hc_mlp_layer.hc_pre.hc_"}
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in _PARTS.items():
        hf.supported_only(config, key, only)
    config.get("learnable_sink_init")  # of training
    heads = hf.positive_int(config, "num_attention_heads")
    # which transformers replaces, since published files have another number
    hf.positive_int(config, "num_key_value_heads", heads)
    own = hf.with_defaults(hf.with_values(config, {"num_key_value_heads": heads}), _DEFAULTS)
    eps, more = hf.positive_float(config, "rms_norm_eps"), dict[str, Any]()
    pairs = hf.flag(config, "rope_interleave", True)
    if config.get("model_type") == _WITH_IMAGES:
        own = hf.with_defaults(own, _SIZES)
        more["norm_eps"] = eps
    activation = Activation(limit=hf.positive_float(config, "swiglu_limit", _LIMIT))
    experts = replace(biased_experts(own), activation=activation)
    hf.supported_only(config, "hidden_act", "silu")
    ffns = networks_by_layer(config, experts, first=1)
    decoder = indexed_config(
        own,
        dtype,
        heads=_HEADS,
        interleaved=pairs,
        ffns=ffns,
        kinds=indexer_kinds(own, len(ffns)),
        rotates_last=True,
        pairs=pairs,
        index_eps=eps,
        head_gate="components",
        sinks=True,
        always=True,
        **more,
    )
    residual = HyperResidual(
        num_streams=hf.positive_int(config, "hc_mult", _STREAMS),
        magnitude=hf.positive_float(config, "hc_magnitude", _MAGNITUDE),
        eps=hf.positive_float(config, "hc_eps", _EPS),
        norm_eps=eps,
    )
    return replace(decoder, residual=residual)


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with the published names of their sources."""
    specs = [*indexed_param_specs(config, _NAMES)]
    streams, width = config.residual.num_streams, config.stream_width
    for i, layer in enumerate(config.layers):
        mixer, source = layer.mixer, f"model.layers.{i}."
        assert isinstance(mixer, IndexedLatentConfig)
        sinks = Source(f"{source}self_attn.learnable_sink_param", (mixer.num_heads,))
        array = ArraySpec(sinks.shape, ("heads",), jnp.dtype(jnp.float32))
        specs.append(ParamSpec(f"layers_{i}/sinks", array, (sinks,), as_is))
        for block, start in _BLOCKS.items():
            own = f"layers_{i}/{block}/", source + start
            specs += stream_specs(*own, width=width, count=2 * streams, uses=2)
    start = "model.hc_head.hc_head_"
    specs += stream_specs("residual/", start, width=width, count=streams, uses=1)
    return tuple(specs)


FAMILY = ModelFamily(
    name="hy_v4",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(*LATENT_IGNORED_TENSORS, r"model\.mtp_layers\..*"),
    # as transformers saves them, which reverses its reading of published names
    other_names=(
        (r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\.", r".\1.hc_pre."),
        (r"\.(?:hc_pre\.hc_head|hc_head\.hc_pre)\.", ".hc_head."),
        (r"\.mlp\.(shared_experts\.)?linear_gate\.", r".mlp.\1gate_proj."),
    ),
    stacked_experts=True,
)
