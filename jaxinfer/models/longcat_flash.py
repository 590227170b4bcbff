"""LongCat-Flash: layers of two latent attentions and two networks, experts beside them, of which
some return the token itself.

A published layer is two layers here; the experts' output of the first is added at the end of the
second. In LongCat-Flash-Lite the embeddings of a token's n-grams are added to its own.

Source: ``modeling_longcat_flash`` of Hugging Face transformers; of Lite its published code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config, gated_network
from jaxinfer.models.gqa import outer_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    LatentNames,
    latent_attention,
    latent_decoder,
    latent_layer_specs,
)
from jaxinfer.models.ngram_parts import boundary
from jaxinfer.models.params import ParamSpec, join
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig, LayerSpec
from jaxinfer.nn.ffn.shortcut_spec import ShortcutExpertsConfig, ShortcutResidual
from jaxinfer.nn.layer_spec import TokenIdsConfig
from jaxinfer.nn.ngram_hash import MOST_ROWS
from jaxinfer.nn.ngram_spec import NGramMeanConfig
from pallas_kernels.route.routing import Routing

_THETA = 1e7
_DEFAULTS = MappingProxyType(  # transformers'
    {
        "q_lora_rank": 1536,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "expert_ffn_hidden_size": 2048,
        "ffn_hidden_size": 12288,
        "routed_scaling_factor": 6.0,
    }
)
# transformers writes gates and ups of zero experts, too, which are behind the others
_OF_ZERO_EXPERTS = r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj\.weight"
_RATIO, _NGRAM_KEYS = "ngram_vocab_size_ratio", ("emb_neighbor_num", "emb_split_num")
_NGRAMS = "model.ngram_embeddings."
_TENSORS = ExpertTensors(
    router="mlp.router.classifier", choice_bias="mlp.router.e_score_correction_bias"
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    own = hf.with_defaults(config, _DEFAULTS)
    num_layers = hf.positive_int(config, "num_layers")
    hf.supported_only(config, "num_hidden_layers", 2 * num_layers, num_layers)
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        hf.supported_only(config, key, True)
    hf.supported_only(config, "attention_method", "MLA")
    hf.supported_only(config, "zero_expert_type", "identity")
    hf.supported_only(config, "norm_topk_prob", False)
    rope_dim = hf.positive_int(config, "qk_rope_head_dim")
    hf.supported_only(config, "head_dim", rope_dim)
    rope = rope_config(config, rope_dim, theta=_THETA)
    mixer, width = latent_attention(own, rope), hf.positive_int(config, "hidden_size")
    assert mixer.query_rank is not None, "the key has a default"
    mixer = replace(
        mixer,
        scale=mixer.scale * (width / mixer.query_rank) ** 0.5,
        latent_scale=(width / mixer.rank) ** 0.5,
    )
    dense = gated_network(own, hf.positive_int(own, "ffn_hidden_size"))
    both = ShortcutExpertsConfig(dense=dense, mixture=_experts(own))
    layers = (LayerSpec(mixer, both), LayerSpec(mixer, dense)) * num_layers
    ngrams = _ngrams(config, width)
    layers = (replace(layers[0], start=ngrams), *layers[1:])
    lengths = rope.lengths(hf.positive_int(config, "max_position_embeddings"))
    return replace(
        latent_decoder(own, dtype, layers, lengths),
        residual=ShortcutResidual(),
        layer_inputs=None if ngrams is None else TokenIdsConfig(),
    )


def _ngrams(config: Mapping[str, Any], width: int) -> NGramMeanConfig | None:
    """The n-grams of Lite; None without their keys."""
    ratio = config.get(_RATIO)
    if ratio is None:
        return None
    ratio, vocab = hf.positive_float(config, _RATIO), hf.positive_int(config, "vocab_size")
    longest, each = (hf.positive_int(config, key) for key in _NGRAM_KEYS)
    sizes = tuple(int(ratio * vocab + 2 * i + 1) for i in range(each * (longest - 1)))
    if not 1 < len(sizes) + 1 <= width:
        raise ConfigError(
            f"config keys {' and '.join(map(repr, _NGRAM_KEYS))} give {len(sizes)} functions of "
            f"n-grams, which must be 1 to {width}; correct them"
        )
    if sum(sizes) >= MOST_ROWS:
        raise ConfigError(
            f"config key {_RATIO!r} is {ratio}, so that the tables of n-grams have {sum(sizes)} "
            "rows, more than 32 bits can number; correct it"
        )
    return NGramMeanConfig(
        width=width, longest=longest, base=vocab, sizes=sizes, boundary=boundary(config)
    )


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    zeros = hf.layer_index(config, "zero_expert_num", 0)
    routing = Routing(
        chosen=hf.positive_int(config, "moe_topk"),
        scale=hf.positive_float(config, "routed_scaling_factor"),
    )
    return experts_config(
        config,
        count="n_routed_experts",
        width="expert_ffn_hidden_size",
        routing=routing,
        more_choices=zeros,
        choice_bias=True,
        router_bias=hf.flag(config, "router_bias", False),
        zero_experts=zeros,
    )


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with Hugging Face's names of their sources."""
    specs = outer_specs(config)
    for i, layer in enumerate(config.layers):
        path, source, part = f"layers_{i}/", f"model.layers.{i // 2}.", i % 2
        names = LatentNames(
            own=f"self_attn.{part}.",
            norms=(f"input_layernorm.{part}", f"post_attention_layernorm.{part}"),
            network=f"mlps.{part}.",
        )
        ffn = layer.ffn
        if isinstance(ffn, ShortcutExpertsConfig):
            specs += latent_layer_specs(config, layer, path, source, names, dense=ffn.dense)
            specs += expert_specs(path, source, ffn.mixture, config.hidden_size, _TENSORS)
        else:
            specs += latent_layer_specs(config, layer, path, source, names)
        if isinstance(layer.start, NGramMeanConfig):
            specs += _ngram_specs(f"{path}ngrams/", layer.start)
    return tuple(specs)


def _ngram_specs(path: str, c: NGramMeanConfig) -> Iterator[ParamSpec]:
    """The parameters of ``nn.ngrams.NGramMean``; devices divide the rows of the table."""
    count, width = len(c.sizes), c.row_width
    tables = tuple(
        Source(f"{_NGRAMS}embedders.{i}.weight", (size, width)) for i, size in enumerate(c.sizes)
    )
    yield ParamSpec(f"{path}table", ArraySpec((sum(c.sizes), width), ("vocab", None)), tables, join)
    projections = tuple(
        Source(f"{_NGRAMS}post_projs.{i}.weight", (c.width, width)) for i in range(count)
    )
    array = ArraySpec((count * c.width, width), (None, None))
    yield ParamSpec(f"{path}projections", array, projections, join)


FAMILY = ModelFamily(
    name="longcat_flash",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(
        *(*LATENT_IGNORED_TENSORS, r"model\.mtp\..*", _OF_ZERO_EXPERTS),
        r"model\.ngram_embeddings\.word_embeddings\.weight",  # the embedding again
    ),
    other_names=((r"^model\.ngram_embeddings\.word_embeddings", "model.embed_tokens"),),
)
