"""RWKV-4: linear attention, then a network that reads two tokens, each a layer of its own here.

Source: ``modeling_rwkv`` of Hugging Face transformers, which halves the stream and the weights that
add to it every few layers; that changes only where values of 16 bits overflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_param_specs
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, stack_flat
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.models.state_space import LENGTH, LONGEST
from jaxinfer.nn.absent import NoNetwork
from jaxinfer.nn.decoder_config import DecoderSpec, LayerSpec
from jaxinfer.nn.mixers.rwkv_spec import ChannelMixConfig, TimeMixConfig

_FLOAT32 = jnp.dtype(jnp.float32)
_NORMS = NormSources(("ln",))
_NAMES = TensorNames(
    embed="rwkv.embeddings",
    embed_norm="rwkv.blocks.0.pre_ln",
    layer="rwkv.blocks.{}.",
    final_norm="rwkv.ln_out",
    head="head",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for unused in ("context_length", "rescale_every", "max_position_embeddings"):
        config.get(unused)  # of training, and of 16 bits
    width = hf.positive_int(config, "hidden_size")
    time = TimeMixConfig(width=width, inner=hf.positive_int(config, "attention_hidden_size", width))
    channel = ChannelMixConfig(
        width=width, inner=hf.positive_int(config, "intermediate_size", 4 * width)
    )
    layers = tuple(LayerSpec(mixer, NoNetwork(), "shared") for mixer in (time, channel))
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=width,
        layers=layers * hf.positive_int(config, "num_hidden_layers"),
        lengths=(LENGTH, LONGEST),
        norm="layer",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", False),
        dtype=dtype,
        embed_norm=True,
    )


def _mixer_specs(
    path: str,
    source: str,
    c: TimeMixConfig | ChannelMixConfig,
    width: int,
    norm_dtype: jnp.dtype | None,
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.rwkv``."""
    del norm_dtype
    inner = c.inner
    if isinstance(c, TimeMixConfig):
        own, names, axis = f"{source}attention.", ("key", "value", "receptance"), "heads"
        linears = [Linear(n, (n,), (width, inner), (None, axis), bias=False) for n in names]
        output = "output"
    else:
        own, names, axis = f"{source}feed_forward.", ("key", "receptance"), "ffn"
        linears = [
            Linear("key", ("key",), (width, inner), (None, axis), bias=False),
            Linear("receptance", ("receptance",), (width, width), (None, None), bias=False),
        ]
        output = "value"
    linears.append(Linear("o", (output,), (inner, width), (axis, None), bias=False))
    yield from linear_specs(path, own, linears)[0]
    mix = tuple(Source(f"{own}time_mix_{name}", (1, 1, width)) for name in names)
    array = ArraySpec((len(mix), width), (None, None), _FLOAT32)
    yield ParamSpec(f"{path}mix", array, mix, stack_flat)
    if isinstance(c, TimeMixConfig):
        decay = tuple(Source(f"{own}{name}", (inner,)) for name in ("time_decay", "time_first"))
        array = ArraySpec((2, inner), (None, "heads"), _FLOAT32)
        yield ParamSpec(f"{path}decay", array, decay, stack_flat)


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; two layers here are a block in the file."""
    own = partial(gqa_param_specs, norms=_NORMS, names=_NAMES, mixers=_mixer_specs)
    return tuple(
        replace(spec, sources=tuple(s._replace(name=_in_file(s.name)) for s in spec.sources))
        if spec.path.startswith("layers_")
        else spec
        for spec in own(config)
    )


def _in_file(name: str) -> str:
    """The name in the file of a layer's tensor."""
    found = re.fullmatch(r"rwkv\.blocks\.(\d+)\.(.*)", name)
    assert found is not None
    block, second = divmod(int(found[1]), 2)
    return f"rwkv.blocks.{block}.{found[2].replace('ln.', f'ln{second + 1}.')}"


FAMILY = ModelFamily(
    name="rwkv",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"head\.weight",),
)
