"""The text of Step 3 (StepFun): queries from latents, one key and value for all heads, experts.

Source: vLLM's ``step3_text.py``; transformers has no class of it. Tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import experts_config, gated_network, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs, with_mixers
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.models.step_parts import sparse_layers, stacked_expert_specs
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, FeedForwardSpec
from jaxinfer.nn.mixers.factored_spec import FactoredAttentionConfig
from pallas_kernels.route.routing import Routing

# the published code's defaults
_HEAD_DIM, _QUERY_RANK, _SHARED_WIDTH, _THETA, _FIRST = 256, 2048, 5120, 500000.0, 1
_POSITIONS = ("max_position_embedding", "max_position_embeddings", "max_seq_len")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in (("num_attention_groups", 1), ("use_moe", True), ("att_impl_type", "MFA")):
        hf.supported_only(config, key, only)
    hf.supported_only(config, "use_mfa", True)
    hf.supported_only(config, "hidden_act", "silu")
    for unused in ("moe_layer_offset", "moe_every_n_layer"):
        config.get(unused)  # which "moe_layers_enum" replaces
    own = hf.with_values(
        config,
        {
            "num_key_value_heads": 1,
            "max_position_embeddings": hf.positive_int(config, hf.first_of(config, *_POSITIONS)),
        },
    )
    decoder = gqa_config(
        own,
        dtype,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        theta=_THETA,
        activation="silu",
        ffns=_networks(own),
    )
    attention = decoder.layers[0].mixer
    assert isinstance(attention, AttentionConfig), "all layers are alike"
    mixer = FactoredAttentionConfig(
        attention=attention,
        query_rank=hf.positive_int(config, "share_q_dim", _QUERY_RANK),
        norm_eps=decoder.norm_eps,
    )
    return with_mixers(decoder, dict.fromkeys(range(len(decoder.layers)), mixer))


def _networks(config: Mapping[str, Any]) -> list[FeedForwardSpec]:
    """The network of each layer."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    routing = Routing(
        chosen=hf.positive_int(config, "moe_top_k"),
        renormalised=hf.flag(config, "norm_expert_weight", False),
    )
    width = hf.positive_int(config, "share_expert_dim", _SHARED_WIDTH)
    experts = experts_config(
        config,
        count="moe_num_experts",
        width="moe_intermediate_size",
        routing=routing,
        shared=gated_network(config, width),
    )
    sparse = sparse_layers(config.get("moe_layers_enum"), num_layers, _FIRST)
    kinds = ["sparse" if i in sparse else "dense" for i in range(num_layers)]
    return networks_by_layer(hf.with_values(config, {"mlp_layer_types": kinds}), experts, first=0)


def _mixer_specs(
    path: str, source: str, c: FactoredAttentionConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.factored``."""
    own, head_dim = f"{source}self_attn.", c.attention.head_dim
    widths = (c.query_rank, head_dim, head_dim)
    names = tuple(f"self_attn.{name}_proj" for name in "qkv")
    linears = (
        Linear("q_kv", names, (width, sum(widths)), (None, None), bias=False, widths=widths),
        Linear("q_b", ("self_attn.wq",), (c.query_rank, c.inner), (None, "heads"), bias=False),
        Linear("o", ("self_attn.o_proj",), (c.inner, width), ("heads", None), bias=False),
    )
    yield from linear_specs(path, source, linears)[0]
    array = ArraySpec((c.query_rank,), (None,), norm_dtype)
    yield ParamSpec(
        f"{path}q_norm", array, (Source(f"{own}inter_norm.weight", array.shape),), as_is
    )


FAMILY = ModelFamily(
    name="step3",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=stacked_expert_specs, mixers=_mixer_specs),
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"(vision_model|vit_downsampler2?|vit_large_projector)\..*",
    ),
)
