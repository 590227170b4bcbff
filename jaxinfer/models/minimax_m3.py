"""MiniMax-M3's text decoder: an indexer chooses the blocks of keys that tokens attend to, after
layers with all keys; experts chosen by biased sigmoids; bounded SwiGLU.

Source: ``modeling_minimax_m3_vl`` of Hugging Face transformers, and the keys of published files.
Names of tensors are those of published files. Tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import MIXTRAL_TENSORS, expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    with_mixers,
)
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.names import LLAMA
from jaxinfer.models.params import ParamSpec, plus_one, stack_plus_one
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    FeedForwardConfig,
    FeedForwardSpec,
)
from jaxinfer.nn.mixers.indexed_attention_spec import BlockIndexerConfig, IndexedAttentionConfig
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.rope import RopeConfig
from pallas_kernels.experts.stack import Activation
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _THETA, _SCALE, _DENSE_WIDTH, _SHARED_WIDTH = 128, 5e6, 2.0, 12288, 3072
_LIMIT, _ALPHA = 7.0, 1.702
_SHIFT = 1.0  # added to ups
_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
_TENSORS = MIXTRAL_TENSORS._replace(
    choice_bias="block_sparse_moe.e_score_correction_bias",
    shared="block_sparse_moe.shared_experts.",
)
_NORMS = NormSources(one=plus_one, several=stack_plus_one)
# keys of published files, and the only values in use
_FIXED: tuple[tuple[str, Any], ...] = (
    *(("use_gemma_norm", True), ("use_qk_norm", True), ("qk_norm_type", "per_head")),
    *(("use_routing_bias", True), ("scoring_func", "sigmoid"), ("n_shared_experts", 1)),
    *(("attention_output_gate", False), ("swiglu_beta", _SHIFT)),
)
_UNUSED = ("hidden_act", "router_jitter_noise", "num_mtp_modules")  # as in transformers
_SECTION = "sparse_attention_config"
# transformers' key of the indexer, that of published files, and the default
_INDEXER: tuple[tuple[str, str, int], ...] = (
    ("index_n_heads", "sparse_num_index_heads", 4),
    ("index_head_dim", "sparse_index_dim", 128),
    ("index_block_size", "sparse_block_size", 128),
    ("index_topk_blocks", "sparse_topk_blocks", 16),
    ("index_local_blocks", "sparse_local_block", 1),
)
_FIXED_IN_SECTION: tuple[tuple[str, Any], ...] = (
    *(("use_sparse_attention", True), ("sparse_score_type", "max"), ("sparse_init_block", 0)),
)
_OF_LAYERS = ("sparse_attention_freq", "sparse_disable_index_value")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in _FIXED:
        hf.supported_only(config, key, only)
    for key in _UNUSED:
        config.get(key)
    config, is_sparse = _with_indexer(config)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    rope = rope_config(config, head_dim, theta=_THETA, partial=1.0)
    if hf.positive_int(config, "rotary_dim", rope.width) != rope.width:
        raise ConfigError(
            f"config key 'rotary_dim' is {config['rotary_dim']}, but by 'partial_rotary_factor' "
            f"{rope.width} components of {head_dim} rotate; correct one of them"
        )
    decoder = gqa_config(
        hf.with_values(config, {"layer_types": None}),
        dtype,
        qk_norm="head",
        head_dim=head_dim,
        rope=rope,
        ffns=_networks(config, len(is_sparse)),
        norm_dtype=jnp.dtype(jnp.float32),
    )
    mixers: dict[int, IndexedAttentionConfig] = {}
    for i, layer in enumerate(decoder.layers):
        assert isinstance(mixer := layer.mixer, AttentionConfig)
        if is_sparse[i]:
            own = {field.name: getattr(mixer, field.name) for field in fields(mixer)}
            mixers[i] = IndexedAttentionConfig(**own, indexer=_indexer(config, mixer, rope))
    return with_mixers(decoder, mixers)


def _with_indexer(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[bool]]:
    """The config with transformers' keys of the indexer, of which published files have a section,
    and which layers have one.
    """
    num_layers, section = hf.positive_int(config, "num_hidden_layers"), config.get(_SECTION) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"config key {_SECTION!r} must be an object, got {short(section)}")
    for key, only in _FIXED_IN_SECTION:
        hf.supported_only(section, key, only)
    known = {key for key, _ in _FIXED_IN_SECTION} | {key for _, key, _ in _INDEXER} | {*_OF_LAYERS}
    if unknown := {*section} - known:
        raise ConfigError(
            f"config key {_SECTION!r} holds {short(sorted(unknown))}, which this family does not "
            f"know and which may change what it computes; {REMOVE_KEY}"
        )
    given = {ours: section[theirs] for ours, theirs, _ in _INDEXER if theirs in section}
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (_FULL, _SPARSE))
    freq = _of_layers(section, _OF_LAYERS[0], num_layers)
    if kinds is None:
        kinds = [_SPARSE if one else _FULL for one in freq or [0] * num_layers]
    is_sparse = [kind == _SPARSE for kind in kinds]
    without_values = _of_layers(section, _OF_LAYERS[1], num_layers) or is_sparse
    if any(sparse and not one for sparse, one in zip(is_sparse, without_values, strict=True)):
        raise ConfigError(
            f"config key {_OF_LAYERS[1]!r} is 0 for a layer with an indexer, whose values are not "
            f"supported; {REMOVE_KEY}"
        )
    return hf.with_values(config, given), is_sparse


def _of_layers(section: Mapping[str, Any], key: str, num_layers: int) -> list[int] | None:
    """0 or 1 for each layer; None if the key is absent or null."""
    given = section.get(key)
    if given is None:
        return None
    fits = isinstance(given, list | tuple) and len(given) == num_layers
    if not fits or any(one not in (0, 1) for one in given):
        raise ConfigError(
            f"config key {key!r} must hold 0 or 1 for each of the {num_layers} layers, got "
            f"{short(given)}"
        )
    return list(given)


def _indexer(
    config: Mapping[str, Any], mixer: AttentionConfig, rope: RopeConfig
) -> BlockIndexerConfig:
    """The indexer of the layers that have one."""
    heads, dim, block, top_k = (hf.positive_int(config, key, own) for key, _, own in _INDEXER[:4])
    local = hf.layer_index(config, _INDEXER[4][0], _INDEXER[4][2])
    pairs, published = mixer.num_kv_heads, {key: theirs for key, theirs, _ in _INDEXER}
    for key, value, needed, fits in (
        ("index_n_heads", heads, f"{pairs}, one for each KV head", heads == pairs),
        ("index_head_dim", dim, f"at least {rope.width}, which rotate", dim >= rope.width),
        ("index_local_blocks", local, f"at most {top_k}, which are chosen", local <= top_k),
    ):
        if not fits:
            raise ConfigError(
                f"config key {key!r}, or {published[key]!r}, is {value} and must be {needed}; "
                "correct it"
            )
    return BlockIndexerConfig(num_heads=heads, head_dim=dim, block=block, top_k=top_k, local=local)


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer: a dense one, or experts and one of all tokens."""
    swiglu = Activation(
        limit=hf.positive_float(config, "swiglu_limit", _LIMIT),
        alpha=hf.positive_float(config, "swiglu_alpha", _ALPHA),
        shift=_SHIFT,
    )

    def network(key: str, default: int) -> FeedForwardConfig:
        width = hf.positive_int(config, key, default)
        return FeedForwardConfig(width=width, activation="silu", gated=True, swiglu=swiglu)

    scale = hf.positive_float(config, "routed_scaling_factor", _SCALE)
    experts = experts_config(
        config,
        count="num_local_experts",
        width="intermediate_size",
        routing=Routing(
            experts_per_token(config), scores="sigmoid", renormalised=True, scale=scale
        ),
        activation=swiglu,
        choice_bias=True,
        shared=network("shared_intermediate_size", _SHARED_WIDTH),
    )
    kinds = hf.layer_kinds(config, "mlp_layer_types", num_layers, ("dense", "sparse"))
    freq = _of_layers(config, "moe_layer_freq", num_layers)
    is_sparse = freq or [1] * num_layers if kinds is None else [kind == "sparse" for kind in kinds]
    dense = network("dense_intermediate_size", _DENSE_WIDTH)
    return [experts if sparse else dense for sparse in is_sparse]


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; each device has the queries of its KV heads' indexer, and all of its keys."""
    specs = [*gqa_param_specs(config, _NORMS, experts=partial(expert_specs, names=_TENSORS))]
    for i, layer in enumerate(config.layers):
        if not isinstance(c := layer.mixer, IndexedAttentionConfig):
            continue
        path, source = f"layers_{i}/", f"{LLAMA.layer.format(i)}self_attn."
        width, heads, dim = config.hidden_size, c.indexer.num_heads, c.indexer.head_dim
        axis = Fused("heads", (heads * dim,), (heads,))
        linears = (
            Linear("index_q", ("index_q_proj",), (width, heads * dim), (None, axis), bias=False),
            Linear("index_k", ("index_k_proj",), (width, dim), (None, None), bias=False),
        )
        specs += linear_specs(path, source, linears)[0]
        norms = tuple(Source(f"{source}index_{one}_norm.weight", (dim,)) for one in "qk")
        array = ArraySpec((2, dim), (None, None), config.norm_dtype)
        specs.append(ParamSpec(f"{path}index_norms", array, norms, stack_plus_one))
    return tuple(specs)


FAMILY = ModelFamily(
    name="minimax_m3",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"(vision_tower|multi_modal_projector|patch_merge_mlp|mtp)\..*",
    ),
    optional_prefix="language_model.",
)
