"""Config keys and checkpoint tensors of Zamba's blocks of attention and a network, each of which
several layers use, and of the mixers after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import MixerSpecs, NormSources, outer_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.linears import Linear, dense_linears, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, join_outputs, stack
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.absent import NoNetwork
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, LayerSpec
from jaxinfer.nn.layer_spec import SharedBlocksConfig
from jaxinfer.nn.mixers.after_block_spec import AfterBlockConfig
from jaxinfer.nn.placement import Fused

HYBRID, MAMBA = "hybrid", ("linear_attention", "mamba")  # transformers' name, and of older files
_NORMS = NormSources(("input_layernorm",))


def kinds(config: Mapping[str, Any], default: Sequence[str]) -> list[bool]:
    """For each layer True if a block precedes its mixer; ``default`` counts without a list."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    key = hf.first_of(config, "layers_block_type", "layer_types")
    found = hf.layer_kinds(config, key, num_layers, (HYBRID, *MAMBA)) or list(default)
    if len(found) != num_layers or HYBRID not in found:
        raise ConfigError(
            f"config key {key!r} must say which of the {num_layers} layers are {HYBRID!r}, and one "
            "must be"
        )
    return [kind == HYBRID for kind in found]


def block_count(config: Mapping[str, Any], shared: int, uses: int) -> int:
    """The number of blocks: ``shared`` ones, or one of each layer, as in transformers, which shares
    neither the blocks nor the embedding with the head if this key is false.
    """
    return min(shared, uses) if hf.flag(config, "tie_word_embeddings", True) else uses


def attention_config(config: Mapping[str, Any], head_dim: int, *, rotates: bool) -> AttentionConfig:
    """The attention of every block; half of a head's components are of the stream."""
    num_heads, num_kv_heads = hf.head_counts(config)
    rope = rope_config(config, head_dim)  # whose keys may be there in any case
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=rope if rotates else None,
    )


def zamba_decoder(
    config: Mapping[str, Any], dtype: jnp.dtype, mixers: Sequence[Any], num_blocks: int
) -> DecoderSpec:
    """A decoder whose layers have these mixers, some of them after one of the blocks."""
    config.get("num_logits_to_keep")  # which logits other programs return
    width = hf.positive_int(config, "hidden_size")
    length = hf.positive_int(config, "max_position_embeddings")
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=width,
        layers=tuple([LayerSpec(mixer, NoNetwork(), "shared") for mixer in mixers]),
        lengths=(length, length),
        norm="rms",
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", True),
        dtype=dtype,
        layer_inputs=SharedBlocksConfig(num_blocks, width),
    )


def zamba_specs(
    config: DecoderSpec, *, block: str, names: TensorNames, mixers: MixerSpecs
) -> tuple[ParamSpec, ...]:
    """The parameters of ``Decoder``. A block's tensors are those of ``block`` in the first layer
    that uses it.
    """
    d, specs = config.hidden_size, outer_specs(config, names=names)
    firsts: dict[int, str] = {}
    uses = 0
    for i, layer in enumerate(config.layers):
        mixer, path, source = layer.mixer, f"layers_{i}/", names.layer.format(i)
        own, other = source, mixer
        if isinstance(mixer, AfterBlockConfig):
            own, other = f"{source}mamba_decoder.", mixer.other
            start = firsts.setdefault(mixer.block, f"{source}{block}.")
            specs += _layer_specs(path, source, start, uses, mixer, d)
            uses += 1
        specs += mixers(path, own, other, d, config.norm_dtype)
        norm = (Source(f"{own}{_NORMS.names[0]}.weight", (d,)),)
        specs.append(ParamSpec(f"{path}norms", ArraySpec((1, d), (None, None)), norm, stack))
    for layer in config.layers:
        if isinstance(mixer := layer.mixer, AfterBlockConfig) and mixer.block in firsts:
            specs += _block_specs(firsts.pop(mixer.block), mixer, d, names)
    return tuple(specs)


def _block_specs(
    source: str, mixer: AfterBlockConfig, d: int, names: TensorNames
) -> Iterator[ParamSpec]:
    """The parameters of a block: see ``nn.mixers.after_block.SharedBlocks``."""
    path, c = f"layer_inputs/block_{mixer.block}/", mixer.attention
    heads = c.num_heads * c.head_dim
    attention = (
        Linear("qkv", names.qkv, (2 * d, sum(_heads(c).widths)), (None, _heads(c)), bias=False),
        Linear("o", (names.o,), (heads, d), ("heads", None), bias=False),
    )
    weights, biases = linear_specs(f"{path}attention/", source, attention)
    yield from (*weights, *biases)
    weights, biases = linear_specs(
        f"{path}network/", source, dense_linears(mixer.network, d, names=names)
    )
    yield from (*weights, *biases)
    norms = {"attention": ("input_layernorm", 2 * d), "network": ("pre_ff_layernorm", d)}
    for name, (tensor, width) in norms.items():
        array = ArraySpec((1, width), (None, None))
        norm = (Source(f"{source}{tensor}.weight", (width,)),)
        yield ParamSpec(f"{path}{name}_norm", array, norm, stack)


def _heads(c: AttentionConfig) -> Fused:
    counts = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    return Fused("heads", tuple([count * c.head_dim for count in counts]), counts)


def _layer_specs(
    path: str, source: str, block: str, use: int, mixer: AfterBlockConfig, d: int
) -> Iterator[ParamSpec]:
    """The parameters that a layer has besides its mixer's: a projection, and addends of the
    weights of the block, which is used for the ``use``-th time.
    """
    linear = Linear("to_input", ("linear",), (d, d), (None, None), bias=False)
    yield from linear_specs(path, source, (linear,))[0]
    if mixer.qkv_rank is not None:
        r, axis = mixer.qkv_rank, _heads(mixer.attention)
        own = [f"{block}self_attn.linear_{name}_adapter_list.{use}" for name in "qkv"]
        a = tuple(Source(f"{one}.0.weight", (r, 2 * d)) for one in own)
        array = ArraySpec((2 * d, 3 * r), (None, None))
        yield ParamSpec(f"{path}qkv_a", array, a, join_outputs)
        widths = zip(own, axis.widths, strict=True)
        b = tuple(Source(f"{one}.1.weight", (width, r)) for one, width in widths)
        array = ArraySpec((3 * r, sum(axis.widths)), (None, axis))
        yield ParamSpec(f"{path}qkv_b", array, b, diagonal)
    if mixer.gate_up_rank is not None:
        r, f = mixer.gate_up_rank, mixer.network.width
        own = f"{block}feed_forward.gate_up_proj_adapter_list.{use}"
        a, b = Source(f"{own}.0.weight", (r, d)), Source(f"{own}.1.weight", (2 * f, r))
        array = ArraySpec((d, r), (None, None))
        yield ParamSpec(f"{path}gate_up_a", array, (a,), join_outputs)
        array = ArraySpec((r, 2 * f), (None, Fused("ffn", (f, f))))
        yield ParamSpec(f"{path}gate_up_b", array, (b,), join_outputs)


def diagonal(*weights: np.ndarray) -> np.ndarray:  # [O_i, R] each -> [n * R, sum of O_i]
    """Matrices of separate inputs and outputs as one, with zeros elsewhere."""
    n, r = len(weights), weights[0].shape[1]
    rows = [
        np.concatenate(
            [
                weight.T if i == j else np.zeros((r, len(weight)), weight.dtype)
                for j, weight in enumerate(weights)
            ],
            axis=1,
        )
        for i in range(n)
    ]
    return np.concatenate(rows)


def _of_diagonal(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    ends = np.cumsum([source.own_shape[0] for source in sources])[:-1]
    columns = np.split(array, ends, axis=1)
    return [np.split(own, len(sources))[i].T for i, own in enumerate(columns)]


diagonal.inverse = _of_diagonal
