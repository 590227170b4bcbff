"""DeepSeek-V4: attention to a window and to compressed entries, mixed residual streams, experts of
which the first layers' are those of token ids.

Sources: ``modeling_deepseek_v4`` of Hugging Face transformers, and the names of published tensors.
The layer for multi-token prediction (``mtp``) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import outer_specs
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.hf_rope import SECTIONS, rope_config
from jaxinfer.models.linears import Linear, dense_linears, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, as_is, stack
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.models.streams import stream_specs
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig, FeedForwardConfig, LayerSpec
from jaxinfer.nn.layer_spec import TokenIdsConfig
from jaxinfer.nn.mixers.compressed_spec import (
    CompressedAttentionConfig,
    CompressorConfig,
    EntryIndexerConfig,
)
from jaxinfer.nn.residual_spec import MixedResidual
from jaxinfer.nn.rope import RopeConfig
from pallas_kernels.experts.stack import Activation
from pallas_kernels.route.routing import Routing

_FLOAT32, _INT32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_KINDS = (_SLIDING, _SPARSE, _HEAVY)
_BY_RATIO = MappingProxyType({0: _SLIDING, 4: _SPARSE, 128: _HEAVY})  # of published files
_HASH, _ROUTED = "hash_moe", "moe"
_NUM_HASH = 3  # transformers' default
_RATES = MappingProxyType({_SPARSE: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)})
_MAIN, _COMPRESS = "main", "compress"  # the sections of ropes
_PARTIAL = 64 / 512  # of a head that rotates
_FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    *(("attention_bias", (False,)), ("hidden_act", ("silu",)), ("num_key_value_heads", (1,))),
    *(("n_shared_experts", (1,)), ("norm_topk_prob", (True,)), ("topk_method", ("noaux_tc",))),
    ("scoring_func", ("sqrtsoftplus", "sigmoid")),
)
_UNUSED = (  # of stored weights, of training, and of layers that there may be none of
    "expert_dtype",
    *("router_jitter_noise", "compress_rates", *(key for key, _ in _RATES.values())),
    *("index_n_heads", "index_head_dim", "index_topk"),
)
_MAGNITUDE = 2.0  # of the weights of blocks' outputs
_NAMES = TensorNames(embed="embed", final_norm="model.norm", head="head")
_EXPERTS = ExpertTensors(
    router="ffn.gate",
    gate="ffn.experts.{}.w1",
    up="ffn.experts.{}.w3",
    down="ffn.experts.{}.w2",
    choice_bias="ffn.gate.bias",
)
_SHARED = TensorNames(
    into=("ffn.shared_experts.w1", "ffn.shared_experts.w3"), down="ffn.shared_experts.w2"
)


def _config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, values in _FIXED:
        hf.supported_only(config, key, *values)
    for key in _UNUSED:
        config.get(key)
    ropes, kinds = _ropes(config), _layer_types(config)
    mixers = {kind: _mixer(config, kind, ropes[kind != _SLIDING]) for kind in dict.fromkeys(kinds)}
    networks = _networks(config, len(kinds))
    pairs = zip(kinds, networks, strict=True)
    positions = hf.positive_int(config, "max_position_embeddings")
    eps = hf.positive_float(config, "rms_norm_eps")
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hf.positive_int(config, "hidden_size"),
        layers=tuple([LayerSpec(mixers[kind], network) for kind, network in pairs]),
        lengths=ropes[{*kinds} != {_SLIDING}].lengths(positions),
        norm="rms",
        norm_eps=eps,
        norm_dtype=_FLOAT32,
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", False),
        dtype=dtype,
        residual=MixedResidual(
            num_streams=hf.positive_int(config, "hc_mult", 4),
            magnitude=_MAGNITUDE,
            eps=hf.positive_float(config, "hc_eps", 1e-6),
            norm_eps=eps,
            rounds=hf.positive_int(config, "hc_sinkhorn_iters", 20),
        ),
        layer_inputs=TokenIdsConfig() if any(network.by_id for network in networks) else None,
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; files may list layers for prediction behind them."""
    count, ratios = hf.positive_int(config, "num_hidden_layers"), config.get("compress_ratios")
    kinds = config.get("layer_types")
    if kinds is None and ratios is not None:
        listed: list[Any] = [*ratios] if isinstance(ratios, list | tuple) else [None]
        if len(listed) < count or not all(one in (*_BY_RATIO,) for one in listed):
            raise ConfigError(
                f"config key 'compress_ratios' must hold 0, 4 or 128 for each of the {count} "
                f"layers, got {short(ratios)}"
            )
        kinds = [_BY_RATIO[one] for one in listed]
    if kinds is None:
        kinds = [_HEAVY, _HEAVY, *([_HEAVY, _SPARSE] * count)]
    return _of_layers("layer_types", kinds, count, _KINDS)


def _of_layers(key: str, kinds: Any, count: int, known: tuple[str, ...]) -> list[str]:
    """The kinds of the first ``count`` layers, of those that are listed."""
    kinds = kinds[:count] if isinstance(kinds, list | tuple) else kinds
    found = hf.layer_kinds({key: kinds}, key, count, known)
    assert found is not None, "the key has a value"
    return found


def _ropes(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """The rope of layers with a window alone, and that of others and of their entries.

    A file has a section for each, or one of the scaling of the second, whose YaRN then has no
    factor on cosine and sine unless it is given.
    """
    head_dim = hf.positive_int(config, "head_dim")
    given = _rope_section(config)
    part = _rotating_part(config, head_dim)
    thetas = [
        hf.positive_float(config, key, default)
        for key, default in (("rope_theta", 10000.0), ("compress_rope_theta", 160000.0))
    ]
    sections = [given.get(name) for name in (_MAIN, _COMPRESS)]
    if not all(isinstance(section, Mapping) for section in sections):
        common = {key: value for key, value in given.items() if key not in (_MAIN, _COMPRESS)}
        if common.setdefault("rope_theta", thetas[0]) != thetas[0]:
            raise ConfigError(
                f"rope key 'rope_theta' is {short(common['rope_theta'])} and config key "
                f"'rope_theta' is {thetas[0]}; make them equal or remove one"
            )
        kind = common.get("rope_type", common.get("type"))
        if kind == "yarn" and common.get("attention_factor") is None:
            common["attention_factor"] = 1.0
        own = [{"rope_theta": theta, "partial_rotary_factor": part} for theta in thetas]
        sections = [own[0], common | own[1]]
    positions = config.get("max_position_embeddings")
    found = [
        rope_config(
            {SECTIONS[1]: section, "max_position_embeddings": positions}, head_dim, partial=1.0
        )
        for section in sections
    ]
    widths = {rope.dim for rope in found}
    if len(widths) > 1 or any(width % 2 for width in widths):
        raise ConfigError(
            f"config key 'partial_rotary_factor' gives {' and '.join(map(str, sorted(widths)))} of "
            f"the {head_dim} components of a head, which must be one even number; correct it"
        )
    main, compress = (RopeConfig(rope.dim, rope.theta, rope.scaling) for rope in found)
    return main, compress


def _rope_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope section under its old or its new key."""
    found = [config[key] for key in SECTIONS if config.get(key) is not None] or [{}]
    if not isinstance(found[0], Mapping) or found[0] != found[-1]:
        raise ConfigError(
            f"config keys {' and '.join(map(repr, SECTIONS))} must be equal objects, got "
            f"{short(found[0])}; remove one"
        )
    return found[0]


def _rotating_part(config: Mapping[str, Any], head_dim: int) -> float:
    """The part of a head that rotates, without sections that say it."""
    width = hf.positive_int(config, "qk_rope_head_dim", max(int(head_dim * _PARTIAL), 1))
    part = width / head_dim if config.get("qk_rope_head_dim") is not None else _PARTIAL
    return hf.positive_float(config, "partial_rotary_factor", part)


def _mixer(config: Mapping[str, Any], kind: str, rope: RopeConfig) -> CompressedAttentionConfig:
    """The attention of a kind of layers."""
    heads, groups = (
        hf.positive_int(config, "num_attention_heads"),
        hf.positive_int(config, "o_groups", 8),
    )
    if heads % groups:
        raise ConfigError(
            f"config key 'num_attention_heads' {heads} is not a multiple of 'o_groups' {groups}"
        )
    return CompressedAttentionConfig(
        num_heads=heads,
        head_dim=hf.positive_int(config, "head_dim"),
        query_rank=hf.positive_int(config, "q_lora_rank", 1024),
        window=hf.positive_int(config, "sliding_window", 128),
        num_groups=groups,
        group_rank=hf.positive_int(config, "o_lora_rank", 1024),
        rope=rope,
        compressor=None if kind == _SLIDING else _compressor(config, kind, rope),
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
    )


def _compressor(config: Mapping[str, Any], kind: str, rope: RopeConfig) -> CompressorConfig:
    """The windows of layers that compress tokens."""
    rates, (key, default) = config.get("compress_rates") or {}, _RATES[kind]
    if not isinstance(rates, Mapping):
        raise ConfigError(f"config key 'compress_rates' must be an object, got {short(rates)}")
    ratio = hf.positive_int(config, key, hf.positive_int(rates, kind, default))
    if kind == _HEAVY:
        return CompressorConfig(ratio=ratio)
    indexer = EntryIndexerConfig(
        num_heads=hf.positive_int(config, "index_n_heads", 64),
        head_dim=hf.positive_int(config, "index_head_dim", 128),
        top_k=hf.positive_int(config, "index_topk", 512),
    )
    if indexer.head_dim < rope.head_dim:
        raise ConfigError(
            f"config key 'index_head_dim' is {indexer.head_dim}, less than the {rope.head_dim} "
            f"components that rotate; {REMOVE_KEY}"
        )
    return CompressorConfig(ratio=ratio, indexer=indexer)


def _networks(config: Mapping[str, Any], count: int) -> list[ExpertsConfig]:
    """The experts of each layer, which a table of token ids chooses in some."""
    activation = Activation(limit=hf.positive_float(config, "swiglu_limit", 10.0))
    shared = FeedForwardConfig(
        width=hf.positive_int(config, "moe_intermediate_size"),
        activation="silu",
        gated=True,
        bias=hf.flag(config, "mlp_bias", False),
        swiglu=activation,
    )
    scores: Any = config.get("scoring_func") or "sqrtsoftplus"
    scale = hf.positive_float(config, "routed_scaling_factor", 1.5)
    own = partial(
        experts_config,
        config,
        count="n_routed_experts",
        width="moe_intermediate_size",
        routing=Routing(experts_per_token(config), scores, renormalised=True, scale=scale),
        activation=activation,
        shared=shared,
    )
    first = hf.layer_index(config, "num_hash_layers", _NUM_HASH)
    kinds = config.get("mlp_layer_types")
    kinds = [_HASH] * min(first, count) + [_ROUTED] * count if kinds is None else kinds
    found = _of_layers("mlp_layer_types", kinds, count, (_HASH, _ROUTED))
    by_kind = {_HASH: own(by_id=True), _ROUTED: own(choice_bias=True)}
    return [by_kind[kind] for kind in found]


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with the published names of their sources."""
    specs = outer_specs(config, names=_NAMES)
    streams, width = config.residual.num_streams, config.stream_width
    for i, layer in enumerate(config.layers):
        path, source = f"layers_{i}/", f"model.layers.{i}."
        assert isinstance(mixer := layer.mixer, CompressedAttentionConfig)
        assert isinstance(ffn := layer.ffn, ExpertsConfig) and ffn.shared is not None
        specs += _mixer_specs(path, f"{source}attn.", mixer, config.hidden_size)
        specs += expert_specs(path, source, replace(ffn, shared=None), config.hidden_size, _EXPERTS)
        linears = dense_linears(ffn.shared, config.hidden_size, names=_SHARED)
        for made in linear_specs(f"{path}shared/", source, linears):
            specs += made
        if ffn.by_id:
            table = Source(f"{source}ffn.gate.tid2eid", (config.vocab_size, ffn.routing.chosen))
            array = ArraySpec(table.shape, (None, None), _INT32)
            specs.append(ParamSpec(f"{path}expert_table", array, (table,), as_is))
        norms = tuple(
            Source(f"{source}{one}_norm.weight", (config.hidden_size,)) for one in ("attn", "ffn")
        )
        array = ArraySpec((2, config.hidden_size), (None, None), _FLOAT32)
        specs.append(ParamSpec(f"{path}norms", array, norms, stack))
        for block, name in (("mixer", "attn"), ("ffn", "ffn")):
            own = f"{path}{block}_residual/", f"{source}hc_{name}_"
            specs += stream_specs(*own, width=width, count=(2 + streams) * streams, uses=3)
    specs += stream_specs("residual/", "hc_head_", width=width, count=streams, uses=1)
    return tuple(specs)


class _Groups(NamedTuple):
    """Splits the rows of a matrix by groups of heads: [G * R, N * H / G]."""

    count: int

    def __call__(self, weight: np.ndarray) -> np.ndarray:  # [G, R, N * H / G]
        """The matrix of each group."""
        return weight.reshape(self.count, -1, weight.shape[1])

    def inverse(self, array: np.ndarray, _: object) -> list[np.ndarray]:
        """See ``params.tensors_of``."""
        return [array.reshape(-1, array.shape[2])]


def _mixer_specs(
    path: str, source: str, c: CompressedAttentionConfig, width: int
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.compressed``. Every device has the entries and the indexer."""
    heads = c.num_heads * c.head_dim
    linears = [
        Linear("q_b", ("wq_b",), (c.query_rank, heads), (None, "heads"), bias=False),
        Linear("o_b", ("wo_b",), (c.num_groups * c.group_rank, width), ("heads", None), bias=False),
    ]
    yield _joined(f"{path}q_kv_a", source, width, wq_a=c.query_rank, wkv=c.head_dim)
    yield from linear_specs(path, source, linears)[0]
    rows = Source(f"{source}wo_a.weight", (c.num_groups * c.group_rank, heads // c.num_groups))
    array = ArraySpec((c.num_groups, c.group_rank, rows.shape[1]), ("heads", None, None))
    yield ParamSpec(f"{path}o_a", array, (rows,), _Groups(c.num_groups))
    yield _floats(f"{path}sinks", f"{source}attn_sink", (c.num_heads,), "heads")
    for name, size in (("q_norm", c.query_rank), ("kv_norm", c.head_dim)):
        yield _floats(path + name, f"{source}{name}.weight", (size,))
    if (own := c.compressor) is None:
        return
    names = "compress", "compressor."
    yield from _window_specs(path, source, names, own, c.head_dim, width)
    if (index := own.indexer) is None:
        return
    names = "index_compress", "indexer.compressor."
    yield from _window_specs(path, source, names, own, index.head_dim, width)
    queries = (c.query_rank, index.num_heads * index.head_dim)
    linears = [Linear("index_q", ("indexer.wq_b",), queries, (None, None), bias=False)]
    yield from linear_specs(path, source, linears)[0]
    weights = Source(f"{source}indexer.weights_proj.weight", (index.num_heads, width))
    array = ArraySpec(weights.shape, (None, None))
    yield ParamSpec(f"{path}index_weights", array, (weights,), as_is)


def _window_specs(
    path: str,
    source: str,
    names: tuple[str, str],
    c: CompressorConfig,
    head_dim: int,
    width: int,
) -> Iterator[ParamSpec]:
    """The parameters of windows that become entries or keys of ``head_dim`` components."""
    (own, start), outputs = names, c.num_series * head_dim
    yield _joined(path + own, source + start, width, wkv=outputs, wgate=outputs)
    yield _floats(f"{path}{own}_bias", f"{source}{start}ape", (c.ratio, outputs))
    yield _floats(f"{path}{own}_norm", f"{source}{start}norm.weight", (head_dim,))


def _joined(path: str, source: str, width: int, **outputs: int) -> ParamSpec:
    """A matrix of the outputs of several tensors, which is not divided."""
    shape = (width, sum(outputs.values()))
    linear = Linear(path, (*outputs,), shape, (None, None), False, widths=(*outputs.values(),))
    return linear_specs("", source, (linear,))[0][0]


def _floats(path: str, name: str, shape: tuple[int, ...], axis: str | None = None) -> ParamSpec:
    """A parameter in float32, whose first dimension may be divided."""
    array = ArraySpec(shape, (axis, *[None] * (len(shape) - 1)), _FLOAT32)
    return ParamSpec(path, array, (Source(name, shape),), as_is)


FAMILY = ModelFamily(
    name="deepseek_v4",
    config_from_hf=_config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"head\.weight",),
    other_names=(  # as transformers saves them, which reverses its reading of published names
        (r"^model\.embed_tokens\.", "embed."),
        (r"^model\.hc_head\.hc_", "hc_head_"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    ),
)
