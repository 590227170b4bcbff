"""DBRX: experts whose tensors are stacked by rows, LayerNorms without biases, limited projections.

Source: ``modeling_dbrx`` of Hugging Face transformers, and the published config.json, whose base of
the rope is in "attn_config", where transformers 5.24 does not read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, experts_config, router_specs
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig
from pallas_kernels.route.routing import Routing

_NAMES = TensorNames(
    embed="transformer.wte",
    layer="transformer.blocks.{}.",
    final_norm="transformer.norm_f",
    qkv=("norm_attn_norm.attn.Wqkv",),
    o="norm_attn_norm.attn.out_proj",
)
_NORMS = NormSources(("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"))
_TENSORS = ExpertTensors(router="ffn.router.layer")
_EPS = 1e-5  # of PyTorch's LayerNorm
_OTHER_NAMES = MappingProxyType(
    {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    }
)
_SECTIONS = MappingProxyType(  # and the keys of each that change what is computed
    {
        "attn_config": ("clip_qkv", "kv_n_heads", "rope_theta"),
        "ffn_config": (
            *("hidden_size", "ffn_act_fn", "ffn_hidden_size", "moe_num_experts", "moe_top_k"),
            "moe_normalize_expert_weights",
        ),
    }
)
_UNUSED = ("attn_pdrop", "moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    attention, ffn = (_section(config, name, keys) for name, keys in _SECTIONS.items())
    given = {name: config.get(other) for name, other in _OTHER_NAMES.items()}
    own = hf.with_values(config, {name: v for name, v in given.items() if v is not None})
    kv_heads = hf.positive_int(attention, "kv_n_heads", 1)
    hf.supported_only(config, "num_key_value_heads", kv_heads)
    own = hf.with_values(own, {"num_key_value_heads": kv_heads})
    if attention.get("rope_theta") is not None:  # if it is at the top level, too, they are equal
        hf.supported_only(config, "rope_theta", attention["rope_theta"])
        own = hf.with_values(own, {"rope_theta": attention["rope_theta"]})
    hf.supported_only(config, "tie_word_embeddings", False)
    hf.supported_only(ffn, "hidden_size", own.get("hidden_size"))
    clip = attention.get("clip_qkv")
    layers = hf.positive_int(own, "num_hidden_layers")
    return gqa_config(
        own,
        dtype,
        ffns=[_experts(ffn)] * layers,
        norm="layer_weight",
        norm_eps=_EPS,
        attention={"clip": None if clip is None else hf.positive_float(attention, "clip_qkv")},
    )


def _section(config: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    """A section with the keys of layers; raises ``ConfigError`` for one that is not known."""
    section = config.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"config key {name!r} must be an object, got {short(section)}")
    for key, value in section.items():
        harmless = key in _UNUSED or not any(word in key for word in ("attn", "qkv", "moe", "ffn"))
        if key not in known and not harmless and value is not None:
            raise ConfigError(
                f"config key {name!r} has the key {short(key)}, which DbrxForCausalLM does not "
                f"know and which may change what it computes; {REMOVE_KEY}"
            )
    return dict(section)


def _experts(ffn: Mapping[str, Any]) -> ExpertsConfig:
    """The experts; chosen ones are divided by their sum, which the key has as a norm of order 1."""
    act = ffn.get("ffn_act_fn") or {"name": "silu"}
    if not isinstance(act, Mapping) or act.get("name") != "silu" or len(act) > 1:
        raise ConfigError(f"config key 'ffn_act_fn' is {short(act)}, and only silu is supported")
    order = ffn.get("moe_normalize_expert_weights", 1.0)
    if order not in (None, 1):
        raise ConfigError(
            f"config key 'moe_normalize_expert_weights' is {short(order)}, and only null and 1 are "
            "supported"
        )
    chosen = hf.positive_int(ffn, "moe_top_k", 1)
    return experts_config(
        {"moe_num_experts": 4, "ffn_hidden_size": 3584} | {k: v for k, v in ffn.items() if v},
        count="moe_num_experts",
        width="ffn_hidden_size",
        routing=Routing(chosen, renormalised=order is not None),
    )


@dataclass(frozen=True)
class _Rows:
    """Splits rows of several experts, [E * F, D] each: gates and ups, or the matrix ``back``."""

    experts: int
    back: bool

    def __call__(self, *tensors: np.ndarray) -> np.ndarray:  # [E, 2F, D], or [E, D, F]
        """The stack of the experts' matrices."""
        parts = [one.reshape(self.experts, -1, one.shape[1]) for one in tensors]
        module = tensors[0].__array_namespace__()
        return module.matrix_transpose(parts[0]) if self.back else module.concat(parts, axis=1)

    def inverse(self, array: np.ndarray, _: object) -> list[np.ndarray]:
        """See ``params.tensors_of``."""
        parts = [array.swapaxes(1, 2)] if self.back else np.split(array, 2, axis=1)
        return [part.reshape(-1, part.shape[2]) for part in parts]


def _expert_specs(path: str, source: str, ffn: ExpertsConfig, width: int) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts, which three tensors have."""
    yield from router_specs(path, source, ffn, width, _TENSORS)
    e, f, own = ffn.count, ffn.width, f"{source}ffn.experts.mlp."
    shape = (e * f, width)
    axes = ("experts", None, None)
    into = (Source(f"{own}w1", shape), Source(f"{own}v1", shape))
    array = ArraySpec((e, 2 * f, width), axes)
    yield ParamSpec(f"{path}gate_up", array, into, _Rows(e, back=False))
    array = ArraySpec((e, width, f), axes)
    yield ParamSpec(f"{path}down", array, (Source(f"{own}w2", shape),), _Rows(e, back=True))


FAMILY = ModelFamily(
    name="dbrx",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES, experts=_expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
