"""Qwen3.8-Flash-Next (text): the gated delta rule and attention to chosen blocks, experts, gated
residual streams, embeddings of n-grams.

Source: ``modeling_qwen4_exp`` of Hugging Face transformers. Tensors for images, and of layers for
multi-token prediction, are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from math import isqrt
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import LINEAR_KEYS, delta_config, delta_specs
from jaxinfer.models.experts import expert_specs
from jaxinfer.models.gqa import gqa_config, gqa_param_specs
from jaxinfer.models.hybrid import (
    DELTA,
    EXPERT_TENSORS,
    FULL,
    HYBRID_IGNORED_TENSORS,
    NORMS,
    gated_experts,
)
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.ngram_parts import boundary
from jaxinfer.models.params import ParamSpec, conv_taps, join, plus_one, stack_plus_one, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, MixerSpec
from jaxinfer.nn.layer_spec import TokenIdsConfig
from jaxinfer.nn.mixers.pooled_attention_spec import PooledAttentionConfig, PooledIndexerConfig
from jaxinfer.nn.ngram_hash import MOST_ROWS
from jaxinfer.nn.ngram_spec import NGramConfig
from jaxinfer.nn.residual_spec import GatedResidual

_INDEXED = "indexed_attention"  # of which published files say "full_attention"
# transformers' defaults
_HEAD_DIM, _INTERVAL, _STREAMS, _RANK = 256, 4, 4, 320
_TOKENS, _HEADS, _ROWS, _MULTIPLE, _SEED, _PARTS = 3, 8, 20_000_000, 128, 1234, 512
_FLOAT32 = jnp.dtype(jnp.float32)
# of the hash of n-grams
_WORD, _MOST, _SEED_OF_LAYER = (1 << 64) - 1, (1 << 63) - 1, 10007
_UNUSED = (  # of a layer's n-grams, where no layer has them
    *("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram"),
    *("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "seed", "split_ngram_parts"),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu")
    kinds, bias = _layer_kinds(config), hf.flag(config, "attention_bias", False)
    experts = gated_experts(config, renormalised=hf.flag(config, "norm_topk_prob", True))
    decoder = gqa_config(
        hf.with_values(config, {"layer_types": None}),
        dtype,
        windows=(None,) * len(kinds),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        partial_rotary=1.0,
        norm="none",
        norm_eps=(eps := hf.positive_float(config, "rms_norm_eps")),
        norm_dtype=_FLOAT32,
        ffns=[experts] * len(kinds),
        attention={"gate": True},
    )
    mixers, starts, layers = _mixers(config, decoder, {*kinds}), _ngrams(config, kinds), []
    for i, layer in enumerate(decoder.layers):
        layers.append(replace(layer, mixer=mixers[kinds[i]], start=starts.get(i)))
    residual = GatedResidual(
        num_streams=hf.positive_int(config, "hc_count", _STREAMS),
        rank=hf.positive_int(config, "hc_lowrank", _RANK),
        norm_eps=eps,
    )
    inputs = TokenIdsConfig() if starts else None
    return replace(decoder, layers=tuple(layers), residual=residual, layer_inputs=inputs)


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; by default every fourth has attention."""
    count = hf.positive_int(config, "num_hidden_layers")
    interval = hf.positive_int(config, "full_attention_interval", _INTERVAL)
    kinds = hf.layer_kinds(config, "layer_types", count, (DELTA, FULL, _INDEXED))
    kinds = kinds or [DELTA if (i + 1) % interval else FULL for i in range(count)]
    return [FULL if kind == _INDEXED else kind for kind in kinds]


def _mixers(
    config: Mapping[str, Any], decoder: DecoderSpec, kinds: set[str]
) -> dict[str, MixerSpec]:
    """The mixer of each kind of layers."""
    hf.supported_only(config, "output_gate_type", "silu", "sigmoid")
    for key in () if DELTA in kinds else LINEAR_KEYS:
        config.get(key)
    found: dict[str, MixerSpec] = {}
    if DELTA in kinds:
        act: Any = config.get("output_gate_type") or "silu"
        found[DELTA] = replace(delta_config(config), gate_act=act)
    if FULL in kinds:
        assert isinstance(plain := decoder.layers[0].mixer, AttentionConfig)
        own = {field.name: getattr(plain, field.name) for field in fields(plain)}
        found[FULL] = PooledAttentionConfig(**own, indexer=_indexer(config, plain))
    return found


def _indexer(config: Mapping[str, Any], mixer: AttentionConfig) -> PooledIndexerConfig:
    """The indexer of attention."""
    hf.supported_only(config, "indexer_kv_heads", 1)
    dim, block = (
        hf.positive_int(config, key) for key in ("indexer_head_dim", "indexer_compress_ratio")
    )
    count, rest = divmod(hf.positive_int(config, "indexer_budget"), block)
    if rest:
        raise ConfigError(
            f"config key 'indexer_budget' is {config['indexer_budget']}, not a multiple of "
            f"'indexer_compress_ratio' {block}; correct it"
        )
    assert mixer.rope is not None
    if dim < mixer.rope.width:
        raise ConfigError(
            f"config key 'indexer_head_dim' is {dim}, less than the {mixer.rope.width} components "
            "that rotate; correct it"
        )
    heads = hf.positive_int(config, "indexer_n_heads")
    return PooledIndexerConfig(num_heads=heads, head_dim=dim, block=block, top_k=count)


def _ngrams(config: Mapping[str, Any], kinds: list[str]) -> dict[int, NGramConfig]:
    """The n-grams of the layers that have them, by the numbers of the layers."""
    numbers = config.get("ple_layer_ids")
    if not numbers:
        for key in _UNUSED:
            config.get(key)
        return {}
    ids: list[Any] = [*numbers] if isinstance(numbers, list | tuple) else [None]
    if not all(isinstance(i, int) and 1 <= i <= len(kinds) for i in ids):
        raise ConfigError(
            f"config key 'ple_layer_ids' must hold numbers from 1 to {len(kinds)}, got "
            f"{short(numbers)}"
        )
    width = hf.positive_int(config, "hidden_size")
    tokens = hf.positive_int(config, "ngram_size", _TOKENS)
    each = hf.positive_int(config, "heads_per_ngram", _HEADS) * (tokens - 1)
    embed = hf.positive_int(config, "ple_embed_dim", width)
    first = hf.positive_int(config, "ngram_vocab_size_base", _ROWS)
    multiple = hf.positive_int(config, "make_ngram_vocab_size_divisible_by", _MULTIPLE)
    ordered = sorted({*ids})
    if not each or embed % each:
        raise ConfigError(
            f"config key 'ple_embed_dim' is {embed}, which is not a multiple of the {each} "
            "functions of 'heads_per_ngram' and 'ngram_size'; correct it"
        )
    primes = _primes(first, each * len(ordered))
    if (rows := sum(primes[-each:])) >= MOST_ROWS:
        raise ConfigError(
            f"config key 'ngram_vocab_size_base' is {first}, so that a table has {rows} rows, more "
            "than 32 bits can number; correct it"
        )
    found: dict[int, NGramConfig] = {}
    for i, number in enumerate(ordered):
        sizes = primes[i * each : (i + 1) * each]
        found[number - 1] = NGramConfig(
            num_streams=hf.positive_int(config, "hc_count", _STREAMS),
            width=width,
            multipliers=_multipliers(config, tokens, i),
            sizes=sizes,
            boundary=boundary(config),
            embed_dim=embed,
            num_rows=-(-sum(sizes) // multiple) * multiple,
            num_parts=hf.positive_int(config, "split_ngram_parts", _PARTS),
            conv_width=hf.positive_int(config, "ple_conv_kernel_size", 4),
            norm_eps=hf.positive_float(config, "rms_norm_eps"),
        )
    return found


def _multipliers(config: Mapping[str, Any], tokens: int, index: int) -> tuple[int, ...]:
    """The odd numbers that tokens are multiplied by in the n-grams of a layer, the ``index``-th
    with some: pseudo-random ones (SplitMix64) whose products stay below 2 ** 63.
    """
    bound = max(1, _MOST // hf.positive_int(config, "vocab_size") // 2)
    seed = hf.layer_index(config, "seed", _SEED) + _SEED_OF_LAYER * index
    gamma = 0x9E3779B97F4A7C15
    drawn = (_mixed(seed + gamma * i) for i in range(1, tokens + 1))
    return tuple(2 * (number % bound) + 1 for number in drawn)


def _mixed(state: int) -> int:
    """SplitMix64's number after a state (Steele, Lea and Flood 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


@cache
def _primes(first: int, count: int) -> tuple[int, ...]:
    """The first primes from a number on."""
    found: list[int] = []
    number = max(first, 2)
    while len(found) < count:
        if number == 2 or number % 2 and all(number % i for i in range(3, isqrt(number) + 1, 2)):
            found.append(number)
        number += 1
    return tuple(found)


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with the published names of their sources."""
    experts = partial(expert_specs, names=EXPERT_TENSORS)
    specs = [*gqa_param_specs(config, NORMS, experts=experts, mixers=delta_specs)]
    for i, layer in enumerate(config.layers):
        path, source = f"layers_{i}/", f"model.layers.{i}."
        for block, name in (("mixer", "attn"), ("ffn", "mlp")):
            own = f"{path}{block}_residual/", f"{source}{name}_hyper_connection."
            specs += _stream_specs(*own, config, writes=True)
        if isinstance(layer.mixer, PooledAttentionConfig):
            own = path, f"{source}self_attn.indexer."
            specs += _indexer_specs(*own, layer.mixer.indexer, config.hidden_size)
        if isinstance(layer.start, NGramConfig):
            specs += _ngram_specs(f"{path}ngrams/", f"{source}ple.", layer.start)
    specs += _stream_specs("residual/", "model.hyper_connection_mixer.", config, writes=False)
    return tuple(specs)


def _stream_specs(
    path: str, source: str, config: DecoderSpec, *, writes: bool
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.gated_residual``."""
    assert isinstance(c := config.residual, GatedResidual)
    width = config.stream_width
    yield ParamSpec(
        f"{path}norm",
        ArraySpec((width,), (None,), _FLOAT32),
        (Source(f"{source}hc_norm.weight", (width,)),),
        plus_one,
    )
    for name, tensor, shape in (
        ("down", "input_mix_weight_down", (width, c.rank)),
        ("up", "input_mix_weight_up", (c.rank, width)),
        *([("inject", "block_inject_weight", (width, c.num_streams))] if writes else ()),
    ):
        own = (Source(f"{source}{tensor}.weight", shape[::-1]),)
        yield ParamSpec(path + name, ArraySpec(shape, (None, None)), own, transposed)


def _indexer_specs(
    path: str, source: str, c: PooledIndexerConfig, width: int
) -> Iterator[ParamSpec]:
    """The parameters of an indexer, which every device has."""
    shape = (width, (c.num_heads + 1) * c.head_dim)
    yield from linear_specs(
        path, source, [Linear("index_qk", ("index_qk_proj",), shape, (None, None), bias=False)]
    )[0]
    norms = tuple(Source(f"{source}{one}_layernorm.weight", (c.head_dim,)) for one in "qk")
    array = ArraySpec((2, c.head_dim), (None, None), _FLOAT32)
    yield ParamSpec(f"{path}index_norms", array, norms, stack_plus_one)


def _ngram_specs(path: str, source: str, c: NGramConfig) -> Iterator[ParamSpec]:
    """The parameters of ``nn.ngrams``; devices divide the rows of the table."""
    size, width = -(-c.num_rows // c.num_parts), c.embed_dim // len(c.sizes)
    starts = range(0, c.num_rows, size)  # files may have fewer parts than the config says
    shards = tuple(
        Source(
            f"{source}ple_embedding.ngram_embedding.shard_{i}.weight",
            (min(size, c.num_rows - start), width),
        )
        for i, start in enumerate(starts)
    )
    yield ParamSpec(f"{path}table", ArraySpec((c.num_rows, width), ("vocab", None)), shards, join)
    widths = (c.channels, c.width)
    yield from linear_specs(
        path,
        source,
        [
            Linear(
                "key_value",
                ("key_proj", "value_proj"),
                (c.embed_dim, sum(widths)),
                (None, None),
                bias=False,
                widths=widths,
            )
        ],
    )[0]
    norms = tuple(
        Source(f"{source}norm_{one}.weight", (c.channels,)) for one in ("key", "query", "conv")
    )
    array = ArraySpec((3, c.channels), (None, None), _FLOAT32)
    yield ParamSpec(f"{path}norms", array, norms, stack_plus_one)
    taps = (Source(f"{source}conv1d.weight", (c.channels, 1, c.conv_width)),)
    array = ArraySpec((c.conv_width, c.channels), (None, None))
    yield ParamSpec(f"{path}conv", array, taps, conv_taps)


FAMILY = ModelFamily(
    name="qwen4_exp",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(
        *HYBRID_IGNORED_TENSORS,
        # which follow from config.json
        r"model\.layers\.\d+\.ple\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)",
    ),
    optional_prefix="model.language_model.",
    stacked_experts=True,
)
