"""PLaMo 3 (Preferred Networks): windows with a rope of their own, norms before and after blocks,
whose weights are stored minus a number that depends on the place.

Source: vLLM's ``plamo3.py`` and the published ``modeling_plamo.py``; transformers has no class of
it. A window has its token among its "window_size" tokens, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.layer_kinds import pattern_windows
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, plus_one, stack, stack_plus_one
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.rope import RopeConfig

_HEAD_DIM, _PATTERN, _LOCAL_THETA = 128, 8, 10000.0  # the published code's defaults
_NORMS = NormSources(
    names=("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
    one=plus_one,
    several=stack_plus_one,
)
_NAMES = TensorNames(
    layer="model.layers.layers.{}.",
    qkv=("mixer.qkv_proj",),
    o="mixer.o_proj",
    into=("mlp.gate_up_proj",),
    qk_norms=("mixer.q_norm", "mixer.k_norm"),
)


@dataclass(frozen=True)
class _PlusOffsets:
    """Stacks norms and adds a number to the weights of each."""

    offsets: tuple[float, ...]

    def __call__(self, *weights: np.ndarray) -> np.ndarray:  # [D] each -> float32[number, D]
        """The weights of a layer's norms."""
        offsets = np.array(self.offsets, np.float32)[:, None]
        return stack(*(weight.astype(np.float32) for weight in weights)) + offsets

    def inverse(self, array: np.ndarray, _: object) -> list[np.ndarray]:
        """See ``params.tensors_of``."""
        return list(array - np.array(self.offsets, np.float32)[:, None])


_OFFSETS = _PlusOffsets((1.0, 1 / 5, 1.0, 1 / 5**1.5))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "linear_type", "normal")
    hf.supported_only(config, "hidden_activation", "swiglu")
    head_dim = hf.head_dim(config, _HEAD_DIM)
    key = hf.first_of(config, "sliding_window", "window_size")
    config.get("window_size")  # which "sliding_window" replaces
    own = hf.with_values(config, {"sliding_window": hf.positive_int(config, key)})
    bias = hf.flag(config, "attention_bias", False)
    rope, local_rope = _ropes(config, head_dim)
    width = hf.positive_int(config, "hidden_size")
    return gqa_config(
        own,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=pattern_windows(own, _PATTERN),
        rope=rope,
        local_rope=local_rope,
        activation="silu",
        tied=True,
        norms="both",
        norm_dtype=jnp.dtype(jnp.float32),
        embed_scale=width**0.5 if hf.flag(config, "scale_embedding", False) else None,
    )


def _ropes(config: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers without a window and with one, of which the first may have YaRN."""
    theta = hf.positive_float(config, "rope_theta")
    factor = hf.positive_float(config, "rope_scaling_factor", 1.0)
    full: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if factor != 1.0:
        original = hf.positive_int(config, "initial_context_length")
        full |= {"rope_type": "yarn", "factor": factor, "truncate": False}
        full |= {"original_max_position_embeddings": original}
    local = {"rope_theta": hf.positive_float(config, "rope_local_theta", _LOCAL_THETA)}
    positions = {"max_position_embeddings": hf.positive_int(config, "max_position_embeddings")}
    return (
        rope_config({**positions, "rope_parameters": full}, head_dim),
        rope_config({**positions, "rope_parameters": local}, head_dim),
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; norms of a layer have offsets of their own."""
    specs = gqa_param_specs(config, _NORMS, names=_NAMES)
    return tuple(
        replace(one, build=_OFFSETS) if one.path.endswith("/norms") else one for one in specs
    )


FAMILY = ModelFamily(
    name="plamo3",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"lm_head\.weight",),
)
