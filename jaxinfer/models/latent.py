"""Config keys and checkpoint tensors of multi-head latent attention, for the DeepSeek families.

Layers from ``first_k_dense_replace`` on have a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.models import hf_config as hf
from jaxinfer.models.experts import expert_specs, gated_network
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, ExpertSpecs, MixerSpecs, outer_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.linears import Linear, dense_linears, linear_specs
from jaxinfer.models.names import LLAMA
from jaxinfer.models.params import ParamSpec, as_is, join, join_outputs, stack
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import (
    DecoderSpec,
    ExpertsConfig,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
    QueryGrowth,
)
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.rope import RopeConfig, YarnScaling

LATENT_IGNORED_TENSORS = GQA_IGNORED_TENSORS

_QUERY_RANK = 1536  # transformers' default; null in config.json: queries have no latent
_NORM_EPS = 1e-6  # of the norms of latents in the published code, whatever rms_norm_eps is
_OF_EXPERTS = (
    *("moe_intermediate_size", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *(
        "norm_topk_prob",
        "routed_scaling_factor",
        "scoring_func",
        "topk_method",
        "num_local_experts",
    ),
)
_AFTER_NETWORK = "post_mlp_layernorm"


class LatentNames(NamedTuple):
    """The names of tensors: of the embedding, the start of a mixer's, its projection back, the
    norms, the start of a dense network's, and the gates of heads.
    """

    embed: str = "model.embed_tokens"
    own: str = "self_attn."
    o: str = "o_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    network: str = "mlp."
    gate: str = "g_proj"


_NAMES = LatentNames()


def latent_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    interleaved: bool,
    first_expert_layer: int = 0,
    mlp_bias: bool = False,
    experts: ExpertsConfig | None = None,
    ffns: Sequence[FeedForwardSpec] | None = None,
    growth: QueryGrowth | None = None,
    **more: Any,
) -> DecoderSpec:
    """A decoder from ``config.json``, whose layers from ``first_expert_layer`` on have ``experts``.

    ``ffns`` are the networks of all layers instead, ``growth`` is that of queries, ``more`` are
    further fields of the decoder. Raises ``ConfigError`` with the key.
    """
    rope_dim = hf.positive_int(config, "qk_rope_head_dim")
    hf.supported_only(config, "head_dim", rope_dim)  # which transformers derives
    rope = rope_config(config, rope_dim)
    mixer = replace(latent_attention(config, rope, interleaved=interleaved), growth=growth)
    if ffns is None:
        num_layers = hf.positive_int(config, "num_hidden_layers")
        ffns = [dense_network(config, bias=mlp_bias)] * num_layers
        if experts is not None:
            ffns = [ffn if i < first_expert_layer else experts for i, ffn in enumerate(ffns)]
    layers = tuple(LayerSpec(mixer, ffn) for ffn in ffns)
    positions = hf.positive_int(config, "max_position_embeddings")
    return replace(latent_decoder(config, dtype, layers, rope.lengths(positions)), **more)


def latent_decoder(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    layers: tuple[LayerSpec, ...],
    lengths: tuple[int, int],
) -> DecoderSpec:
    """A decoder from ``config.json`` with these layers; ``lengths``: see ``DecoderSpec``."""
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hf.positive_int(config, "hidden_size"),
        layers=layers,
        lengths=lengths,
        norm="rms",
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", False),
        dtype=dtype,
    )


def dense_network(config: Mapping[str, Any], *, bias: bool) -> FeedForwardConfig:
    """The network of a layer without experts."""
    return FeedForwardConfig(
        width=hf.positive_int(config, "intermediate_size"),
        activation=hf.activation(config, "hidden_act", "silu"),
        gated=True,
        bias=bias,
    )


def latent_attention(
    config: Mapping[str, Any],
    rope: RopeConfig | None,
    *,
    interleaved: bool = True,
    query_rank: int | None = _QUERY_RANK,
) -> LatentAttentionConfig:
    """The mixer, which rotates ``qk_rope_head_dim`` components if it has a rope.

    ``query_rank`` is the default of its key, whose null says that queries have no latent.
    """
    num_heads = hf.positive_int(config, "num_attention_heads")
    nope, rope_dim = (
        hf.positive_int(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    # keys that transformers derives
    hf.supported_only(config, "num_key_value_heads", num_heads)
    hf.supported_only(config, "qk_head_dim", nope + rope_dim)
    if "q_lora_rank" in config:
        is_null = config["q_lora_rank"] is None
        query_rank = None if is_null else hf.positive_int(config, "q_lora_rank")
    return LatentAttentionConfig(
        num_heads=num_heads,
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=hf.positive_int(config, "v_head_dim"),
        rank=hf.positive_int(config, "kv_lora_rank"),
        query_rank=query_rank,
        scale=(nope + rope_dim) ** -0.5 * (1.0 if rope is None else _score_factor(rope)),
        rope=rope,
        interleaved=interleaved,
        norm_eps=_NORM_EPS,
        bias=hf.flag(config, "attention_bias", False),
    )


def _score_factor(rope: RopeConfig) -> float:
    """YaRN's factor on scores: DeepSeek's code applies it here, not to cosine and sine."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
        return 1.0
    return scaling.mscaled(scaling.mscale_all_dim) ** 2


def expert_layers(config: Mapping[str, Any], default: int) -> tuple[int, bool]:
    """The first layer with experts, and whether there are experts at all."""
    hf.supported_only(config, "moe_layer_freq", 1)
    first = hf.layer_index(config, "first_k_dense_replace", default)
    layers = hf.positive_int(config, "num_hidden_layers")
    has_experts = config.get("n_routed_experts") is not None and first < layers
    for key in _OF_EXPERTS if not has_experts and first >= layers else ():
        config.get(key)  # of no layer
    return first, has_experts


def shared_experts(
    config: Mapping[str, Any], *, bias: bool = False, key: str = "n_shared_experts"
) -> FeedForwardConfig | None:
    """The experts that every token uses, as one network; None without. ``key`` has their number."""
    count = hf.layer_index(config, key, 0)
    if not count:
        return None
    width = count * hf.positive_int(config, "moe_intermediate_size")
    return replace(gated_network(config, width), bias=bias)


@dataclass(frozen=True)
class KeysAndValues:
    """Splits the weight that expands latents by head, keys before values: [N * (K + V), C]."""

    num_heads: int
    nope_dim: int

    def __call__(self, weight: np.ndarray) -> dict[str, np.ndarray]:  # [N * K, C], [N * V, C]
        """The weights of keys and of values."""
        rank = weight.shape[1]
        k, v = np.split(weight.reshape(self.num_heads, -1, rank), (self.nope_dim,), axis=1)
        return {"k": k.reshape(-1, rank), "v": v.reshape(-1, rank)}

    def inverse(self, arrays: Mapping[str, np.ndarray], _: object) -> list[np.ndarray]:
        """See ``params.tensors_of``."""
        heads = [arrays[name] for name in ("k", "v")]
        heads = [part.reshape(self.num_heads, -1, part.shape[1]) for part in heads]
        return [np.concatenate(heads, axis=1).reshape(-1, heads[0].shape[2])]


def latent_param_specs(
    config: DecoderSpec,
    experts: ExpertSpecs = expert_specs,
    mixers: MixerSpecs | None = None,
    names: LatentNames = _NAMES,
) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with Hugging Face's names of their sources.

    ``experts`` has those of a layer's mixture of experts and ``mixers`` those of another mixer than
    latent attention, of families that have one.
    """
    specs = outer_specs(config, names=LLAMA._replace(embed=names.embed))
    for i, layer in enumerate(config.layers):
        path, source = f"layers_{i}/", f"model.layers.{i}."
        specs += latent_layer_specs(config, layer, path, source, names, mixers)
        if isinstance(layer.ffn, ExpertsConfig):
            specs.extend(experts(path, source, layer.ffn, config.hidden_size))
    return tuple(specs)


def latent_layer_specs(
    config: DecoderSpec,
    layer: LayerSpec,
    path: str,
    source: str,
    names: LatentNames = _NAMES,
    mixers: MixerSpecs | None = None,
    dense: FeedForwardConfig | None = None,
) -> Iterator[ParamSpec]:
    """The parameters of a layer without those of experts; ``dense`` is a network beside them."""
    c, ffn, d = layer.mixer, layer.ffn, config.hidden_size
    linears: list[Linear] = []
    if isinstance(c, LatentAttentionConfig):
        linears += _attention_linears(c, d, names)
    else:
        assert mixers is not None, "the family has no other mixers"
        yield from mixers(path, source, c, d, config.norm_dtype)
    if isinstance(ffn, FeedForwardConfig):
        linears += dense_linears(ffn, d, names.network)
    if dense is not None:
        yield from linear_specs(f"{path}dense/", source, dense_linears(dense, d, names.network))[0]
    weights, biases = linear_specs(path, source, linears)
    yield from (*weights, *biases)
    if isinstance(c, LatentAttentionConfig):
        yield from _input_specs(c, d, path, source + names.own)
    norms = (*names.norms, *((_AFTER_NETWORK,) if layer.norms == "ffn_both" else ()))
    yield _norm_spec(config, f"{path}norms", source, norms, d)
    if isinstance(c, LatentAttentionConfig):
        yield from _latent_specs(config, c, path, source + names.own)


def _attention_linears(
    c: LatentAttentionConfig, width: int, names: LatentNames
) -> Iterator[Linear]:
    """The projection to the residual stream, and that from the latent of queries."""
    values = c.num_heads * c.value_dim
    yield Linear("o", (names.own + names.o,), (values, width), ("heads", None), c.bias)
    if c.query_rank is not None:
        shape = (c.query_rank, c.num_heads * c.head_dim)
        if c.output_gate:
            shape = (2 * c.query_rank, shape[1] + values)
        yield Linear("q_b", (f"{names.own}q_b_proj",), shape, (None, "heads"), bias=False)
    if c.head_gate:
        gate = (width, values if c.head_gate == "components" else c.num_heads)
        yield Linear("head_gate", (names.own + names.gate,), gate, (None, "heads"), bias=False)


def _norm_spec(
    config: DecoderSpec, path: str, source: str, tensors: tuple[str, ...], width: int
) -> ParamSpec:
    """One norm, or several as one parameter."""
    sources = tuple(Source(f"{source}{tensor}.weight", (width,)) for tensor in tensors)
    shape = (len(tensors), width) if len(tensors) > 1 else (width,)
    array = ArraySpec(shape, (None,) * len(shape), config.norm_dtype)
    return ParamSpec(path, array, sources, stack if len(tensors) > 1 else as_is)


def _latent_specs(
    config: DecoderSpec, c: LatentAttentionConfig, path: str, own: str
) -> Iterator[ParamSpec]:
    """The norms of latents, and the weight that expands them; ``own`` begins tensors' names."""
    if c.own_entries:
        yield _norm_spec(config, f"{path}kv_norm", own, ("kv_a_layernorm",), c.rank)
    if c.query_rank is not None:
        yield _norm_spec(config, f"{path}q_norm", own, ("q_a_layernorm",), c.query_rank)
    expanded = Source(f"{own}kv_b_proj.weight", (c.num_heads * (c.nope_dim + c.value_dim), c.rank))
    heads = ("heads", None)
    arrays = {
        "k": ArraySpec((c.num_heads * c.nope_dim, c.rank), heads),
        "v": ArraySpec((c.num_heads * c.value_dim, c.rank), heads),
    }
    build = KeysAndValues(c.num_heads, c.nope_dim)
    yield ParamSpec(path + "kv_b", arrays, (expanded,), build)


def _input_specs(c: LatentAttentionConfig, width: int, path: str, own: str) -> Iterator[ParamSpec]:
    """The projection from the residual stream to the queries (or their latent) and the entry.

    ``own`` begins tensors' names. Every device needs the whole entry, so this projection is not
    divided.
    """
    name, outputs = "q_a_proj", c.query_rank
    if outputs is None:
        name, outputs = "q_proj", c.num_heads * c.head_dim
    parts = {own + name: outputs}
    if c.own_entries:
        parts[f"{own}kv_a_proj_with_mqa"] = c.entry_dim
    sources = tuple(Source(f"{part}.weight", (out, width)) for part, out in parts.items())
    array = ArraySpec((width, sum(parts.values())), (None, None))
    yield ParamSpec(path + "q_kv_a", array, sources, join_outputs, matrix="out_in")
    if c.bias:
        biased = [(part, out) for part, out in parts.items() if not part.endswith(".q_proj")]
        sources = tuple(Source(f"{part}.bias", (out,)) for part, out in biased)
        yield ParamSpec(path + "q_kv_a_bias", ArraySpec((c.bias_dim,), (None,)), sources, join)
