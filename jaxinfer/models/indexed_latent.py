"""Config keys and checkpoint tensors of latent attention with an indexer, for several families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import MixerSpecs
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.latent import LatentNames, latent_config, latent_param_specs
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, stack
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardSpec, LayerSpec
from jaxinfer.nn.mixers.indexed_latent_spec import IndexedLatentConfig, IndexerConfig
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig

FULL, SHARED = "full", "shared"  # layers with an indexer, and those that follow one
_INDEX_EPS = 1e-6  # of the indexer's LayerNorms in the published code of most families
_OFFSET = 2  # transformers' default of index_skip_topk_offset
_NAMES = LatentNames()
_LETTERS = MappingProxyType({"F": FULL, "S": SHARED})  # of index_topk_pattern


def indexed_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    heads: int,
    interleaved: bool,
    ffns: Sequence[FeedForwardSpec],
    kinds: Sequence[str] | None = None,
    of_tokens: bool = False,
    rotates_last: bool = False,
    pairs: bool = True,
    index_eps: float = _INDEX_EPS,
    **more: Any,
) -> DecoderSpec:
    """A decoder from ``config.json`` whose layers choose tokens.

    ``heads`` is the family's default of ``index_n_heads``, ``interleaved`` says how its indexer
    rotates, and ``kinds`` whether each layer has one (None: all do). With ``of_tokens`` its queries
    are made of tokens, and grow; with ``rotates_last`` its last components rotate. ``pairs`` says
    that attention rotates adjacent components, ``index_eps`` is the epsilon of the indexer's norms.
    ``more`` are further fields of the mixers. Raises ``ConfigError`` with the key.
    """
    hf.layer_kinds(config, "layer_types", len(ffns), ("indexed_attention",))
    hf.supported_only(config, "rope_interleave", pairs)
    hf.supported_only(config, "indexer_rope_interleave", interleaved)
    hf.supported_only(config, "moe_router_dtype", "float32")
    config.get("head_dim")  # which transformers replaces, since published files have another width
    own_dim = {"head_dim": hf.positive_int(config, "qk_rope_head_dim")}
    decoder = latent_config(hf.with_values(config, own_dim), dtype, interleaved=pairs, ffns=ffns)
    top_k = hf.positive_int(config, "index_topk", 2048)
    indexer = IndexerConfig(
        num_heads=hf.positive_int(config, "index_n_heads", heads),
        head_dim=hf.positive_int(config, "index_head_dim", 128),
        interleaved=interleaved,
        of_tokens=of_tokens,
        learned_growth=of_tokens,
        rotates_last=rotates_last,
        norm_eps=index_eps,
    )
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, LatentAttentionConfig)
    own = {field.name: getattr(mixer, field.name) for field in fields(mixer)} | more
    if mixer.query_rank is None and not of_tokens:
        raise ConfigError("config key 'q_lora_rank' is null; the indexer needs the queries' latent")
    if indexer.head_dim < mixer.rope_dim:
        raise ConfigError(
            f"config key 'index_head_dim' is {indexer.head_dim}, less than 'qk_rope_head_dim'; "
            f"{REMOVE_KEY}"
        )
    layers: list[LayerSpec] = []
    last: int | None = None  # with an indexer
    kinds = [FULL] * len(ffns) if kinds is None else kinds
    for i, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True)):
        last = i if kind == FULL else last
        choice = (indexer, None) if last == i else (None, last)
        indexed = IndexedLatentConfig(**own, top_k=top_k, indexer=choice[0], follows=choice[1])
        layers.append(replace(layer, mixer=indexed))
    return replace(decoder, layers=tuple(layers))


def indexer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """True for layers with an indexer: ``indexer_types`` decides, else a pattern, else a step."""
    given = hf.layer_kinds(config, "indexer_types", num_layers, (FULL, SHARED))
    pattern = config.get("index_topk_pattern")
    step = max(hf.layer_index(config, "index_topk_freq", 1), 1)
    first = hf.layer_index(config, "index_skip_topk_offset", _OFFSET) - 1  # that may follow one
    if isinstance(pattern, str):
        pattern = [_LETTERS.get(letter, letter) for letter in pattern]
    if given is None:
        key = "index_topk_pattern"
        given = hf.layer_kinds({key: pattern}, key, num_layers, (FULL, SHARED))
    kinds = given or [SHARED if max(i - first, 0) % step else FULL for i in range(num_layers)]
    if kinds[0] != FULL:
        raise ConfigError(
            f"config key 'indexer_types' is {short(kinds)}; the first layer needs an indexer"
        )
    return kinds


def indexed_param_specs(
    config: DecoderSpec, names: LatentNames = _NAMES, mixers: MixerSpecs | None = None
) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with Hugging Face's names of their sources; ``mixers`` has
    those of another mixer.
    """
    specs = [*latent_param_specs(config, mixers=mixers, names=names)]
    for i, layer in enumerate(config.layers):
        if isinstance(c := layer.mixer, IndexedLatentConfig) and c.indexer is not None:
            specs += _indexer_specs(c, c.indexer, config.hidden_size, i)
    return tuple(specs)


def _indexer_specs(
    c: IndexedLatentConfig, indexer: IndexerConfig, width: int, layer: int
) -> Iterator[ParamSpec]:
    """The parameters of an indexer. Every device chooses for itself, so they are not divided."""
    path, source = f"layers_{layer}/", f"model.layers.{layer}.self_attn.indexer."
    heads, dim = indexer.num_heads, indexer.head_dim
    inputs = width if indexer.of_tokens else c.query_rank
    assert inputs is not None, "queries are made of their latent or of tokens"
    linears = (
        Linear("index_q", ("wq_b",), (inputs, heads * dim), (None, None), bias=False),
        Linear("index_k", ("wk",), (width, dim), (None, None), bias=False),
    )
    yield from linear_specs(path, source, linears)[0]
    norms = {"index_k_norm": ("k_norm", dim)}
    if indexer.of_tokens:
        norms["index_q_norm"] = ("q_input_norm", width)
    for name, (norm, size) in norms.items():
        own = tuple(Source(f"{source}{norm}.{kind}", (size,)) for kind in ("weight", "bias"))
        array = ArraySpec((2, size), (None, None), jnp.dtype(jnp.float32))
        yield ParamSpec(path + name, array, own, stack)
    if indexer.learned_growth:
        yield growth_spec(f"{path}index_q_growth", source, heads, None)
    weights = Source(f"{source}weights_proj.weight", (heads, width))
    array = ArraySpec(weights.shape, (None, None))
    yield ParamSpec(f"{path}index_weights", array, (weights,), as_is)


def growth_spec(path: str, source: str, heads: int, axis: str | None) -> ParamSpec:
    """The parameters of queries that grow with the position: see ``LatentAttentionConfig``."""
    own = tuple(Source(f"{source}softmax_scaling.{kind}", (heads,)) for kind in ("scale", "bias"))
    return ParamSpec(path, ArraySpec((2, heads), (None, axis)), own, stack)
