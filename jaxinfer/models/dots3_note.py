"""dots3-note (dots studio): latent attention to tokens that an indexer has chosen, in most layers
within a window and of other widths, with gates on heads.

Source: ``modeling_dots3_note`` of Hugging Face transformers. Tensors for images and sound are not
used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, gated_network
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.indexed_latent import indexed_param_specs
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS, latent_attention, latent_decoder
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardSpec, LayerSpec
from jaxinfer.nn.mixers.indexed_latent_spec import IndexedLatentConfig, IndexerConfig
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.mixers.windowed_latent_spec import WindowedLatentConfig

_FULL, _INDEXED, _SLIDING = "full_attention", "indexed_attention", "sliding_attention"
_DENSE, _SPARSE = "dense", "sparse"
# transformers' defaults
_SIZES = MappingProxyType(
    {
        **{"q_lora_rank": 1024, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    }
)
_LOCAL_SIZES = MappingProxyType(
    {
        **{"num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024},
        **{"head_dim": 256, "qk_nope_head_dim": 192, "v_head_dim": 128},
    }
)
_KV_HEADS, _LOCAL_ROPE = "num_key_value_heads", "qk_rope_head_dim"
_THETA, _LOCAL_THETA, _WINDOW, _SHARED_WIDTH, _FIRST, _HEAD_DIM = 8e7, 5e4, 512, 1536, 1, 256
_INDEX_HEADS, _INDEX_DIM, _TOP_K = 64, 128, 2048


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "mlp_bias", False)
    config.get("head_dim")  # of which transformers derives the part that rotates
    own = hf.with_defaults(config, _SIZES)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds, window = _layer_types(config, num_layers), _window(config)
    mixers: dict[str, Any] = {_FULL: _latents(own, _rope(own, {_FULL, _INDEXED}))}
    shared = {one.name: getattr(mixers[_FULL], one.name) for one in fields(mixers[_FULL])}
    mixers[_INDEXED] = IndexedLatentConfig(
        **shared,
        top_k=hf.positive_int(config, "index_topk", _TOP_K),
        indexer=_indexer(config, mixers[_FULL].rope_dim),
    )
    local = hf.with_values(own, _local_sizes(own, kinds))
    narrow = _latents(local, _rope(local, {_SLIDING}))
    shared = {one.name: getattr(narrow, one.name) for one in fields(narrow)}
    mixers[_SLIDING] = WindowedLatentConfig(**shared, window=window)
    ffns = _networks(own, num_layers)
    layers = (LayerSpec(mixers[kind], ffn) for kind, ffn in zip(kinds, ffns, strict=True))
    length = hf.positive_int(config, "max_position_embeddings")
    return latent_decoder(own, dtype, tuple(layers), (length, length))


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """The kind of each layer. Published files call layers with an indexer "full_attention"."""
    known = (_FULL, _INDEXED, _SLIDING)
    indexed = hf.flag(config, "use_dsa", config.get("per_layer_config") is None)
    windows = hf.flag(config, "use_sliding_window", True)
    kinds = hf.layer_kinds(config, "layer_types", num_layers, known) or [
        _SLIDING if windows and i >= 2 and i % 4 != 1 else _INDEXED for i in range(num_layers)
    ]
    if config.get("use_dsa") is None and config.get("per_layer_config") is not None:
        return kinds
    whole = _INDEXED if indexed else _FULL
    return [kind if kind == _SLIDING else whole for kind in kinds]


def _window(config: Mapping[str, Any]) -> int:
    key = hf.first_of(config, "sliding_window", "sliding_window_size")
    return hf.positive_int(config, key, _WINDOW)


def _local_sizes(config: Mapping[str, Any], kinds: list[str]) -> dict[str, Any]:
    """The sizes of layers with a window: keys that begin with "swa_", or "per_layer_config", which
    lacks those of other layers.
    """
    names = (*_LOCAL_SIZES, _KV_HEADS, _LOCAL_ROPE)
    found = {name: config.get(f"swa_{name}") for name in names}
    given, defaults = config.get("per_layer_config"), dict[str, Any](_LOCAL_SIZES)
    if given is not None:
        defaults = {"head_dim": _HEAD_DIM} | {key: config[key] for key in names if key in config}
        found = _of_layers(given, {str(i) for i, kind in enumerate(kinds) if kind == _SLIDING})
    sizes = defaults | {key: value for key, value in found.items() if value is not None}
    flat = hf.positive_int(sizes, "head_dim") - hf.positive_int(sizes, "qk_nope_head_dim")
    if sizes.setdefault(_LOCAL_ROPE, flat) != flat or flat < 1:
        raise ConfigError(
            f"config key 'swa_qk_rope_head_dim' is {short(sizes[_LOCAL_ROPE])}, and "
            f"'swa_head_dim' less 'swa_qk_nope_head_dim' is {flat}; make them equal"
        )
    return {_KV_HEADS: sizes["num_attention_heads"]} | sizes


def _of_layers(given: Any, places: set[str]) -> dict[str, Any]:
    """The section that all these layers have in "per_layer_config"; empty without sections."""
    if given == {}:
        return {}
    known = {*_LOCAL_SIZES, _KV_HEADS, _LOCAL_ROPE}
    sections = [*given.values()] if isinstance(given, Mapping) else []
    fits = sections and all(isinstance(one, Mapping) and one == sections[0] for one in sections)
    if not fits or {*map(str, given)} != places or not {*sections[0]} <= known:
        raise ConfigError(
            f"config key 'per_layer_config' is {short(given)}, and only the widths of layers with "
            "a window, the same in all of them, are supported"
        )
    return dict(sections[0])


def _rope(config: Mapping[str, Any], kinds: set[str]) -> Any:
    """The rope of layers of these kinds, which share a section and a base."""
    given = config.get("rope_parameters")
    given = config.get("rope_scaling") or None if given is None else given
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"config key 'rope_parameters' must be an object, got {short(given)}")
    is_local = _SLIDING in kinds and given is None  # without a section each kind has its base
    base, key = (_LOCAL_THETA, "swa_rope_theta") if is_local else (_THETA, "rope_theta")
    of_kinds = {kind: one for kind, one in (given or {}).items() if isinstance(one, Mapping)}
    own = next((one for kind, one in of_kinds.items() if kind in kinds), {})
    section = dict(own if of_kinds else given or {})
    section.pop("partial_rotary_factor", None)  # which transformers derives
    if section.get("rope_type", "default") != "default":
        raise ConfigError(
            f"config key 'rope_parameters' is {short(given)}, and dots3-note has no scaled ropes"
        )
    section.setdefault("rope_theta", hf.positive_float(config, key, base))
    width = hf.positive_int(config, "qk_rope_head_dim")
    return rope_config({"rope_parameters": section}, width)


def _latents(config: Mapping[str, Any], rope: Any) -> LatentAttentionConfig:
    """Latent attention to all tokens, whose latents are scaled as if they were as wide as the
    stream.
    """
    mixer, width = latent_attention(config, rope), hf.positive_int(config, "hidden_size")
    if mixer.query_rank is None:
        raise ConfigError("config key 'q_lora_rank' is null; queries of dots3-note have a latent")
    return replace(
        mixer,
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        scale=mixer.scale * (width / mixer.query_rank) ** 0.5,
        latent_scale=(width / mixer.rank) ** 0.5,
        rope_norm=True,
        head_gate=True,
    )


def _indexer(config: Mapping[str, Any], rope_dim: int) -> IndexerConfig:
    head_dim = hf.positive_int(config, "index_head_dim", _INDEX_DIM)
    if head_dim < rope_dim:
        raise ConfigError(
            f"config key 'index_head_dim' is {head_dim}, less than 'qk_rope_head_dim' {rope_dim}; "
            "correct them"
        )
    heads = hf.positive_int(config, "index_n_heads", _INDEX_HEADS)
    return IndexerConfig(num_heads=heads, head_dim=head_dim, interleaved=True)


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer: "mlp_layer_types" decides, else the published keys."""
    first, step = hf.layer_index(config, "first_k_dense_replace", _FIRST), 1
    given = config.get("moe_layer_freq")
    if not isinstance(given, list):
        step = hf.positive_int(config, "moe_layer_freq", 1)
        given = [i % step == 0 for i in range(num_layers)]
    if len(given) != num_layers:
        raise ConfigError(
            f"config key 'moe_layer_freq' has {len(given)} values for {num_layers} layers"
        )
    kinds = hf.layer_kinds(config, "mlp_layer_types", num_layers, (_DENSE, _SPARSE))
    kinds = kinds or [_SPARSE if i >= first and given[i] else _DENSE for i in range(num_layers)]
    key = hf.first_of(
        config, "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"
    )
    width = hf.positive_int(config, key, _SHARED_WIDTH)
    width *= hf.positive_int(config, "n_shared_experts", 1)
    experts = replace(biased_experts(config), shared=gated_network(config, width))
    dense = gated_network(config, hf.positive_int(config, "intermediate_size"))
    return [experts if kind == _SPARSE else dense for kind in kinds]


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with Hugging Face's names of their sources."""
    return (*indexed_param_specs(config), *_rope_norms(config))


def _rope_norms(config: DecoderSpec) -> Iterator[ParamSpec]:
    """The norms of rotated keys."""
    for i, layer in enumerate(config.layers):
        assert isinstance(layer.mixer, LatentAttentionConfig)
        name = f"model.layers.{i}.self_attn.k_rope_only_layernorm.weight"
        array = ArraySpec((layer.mixer.rope_dim,), (None,))
        yield ParamSpec(f"layers_{i}/rope_norm", array, (Source(name, array.shape),), as_is)


FAMILY = ModelFamily(
    name="dots3_note",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(
        *LATENT_IGNORED_TENSORS,
        r"(model\.)?(vision_encoder|audio_encoder|audio_adapter|vision_tower|audio_tower)\..*",
    ),
    optional_prefix="model.language_model.",
    stacked_experts=True,
)
