"""Specs of what a layer may have besides its two blocks: norms, an end, and an input of its own.

Their modules are in ``nn.layer_inputs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    import flax.linen as nn

# An RMS norm with and without weight, and of groups of components, with a weight of all; LayerNorm
# with weight and bias, with a weight alone, and without parameters; "none" changes nothing (a
# ``GatedResidual`` has norms of its own).
type NormKind = Literal[
    "rms", "rms_plain", "rms_groups", "layer", "layer_weight", "layer_plain", "none"
]
# Functions of the gates of attention's outputs; "softplus_2" is log2(1 + 2^x).
type GateAct = Literal["sigmoid", "softplus", "softplus_2", "silu"]
# See ``AttentionConfig`` of ``nn.decoder_config``.
type QKNormKind = Literal[
    "head", "plain", "all_heads", "rotated", "rotated_plain", "layer", "layers", "layers_bias"
]
# Where a layer has norms: see ``LayerSpec`` of ``nn.decoder_config``.
type NormPlaces = Literal["before", "after", "both", "shared", "ffn_both", "ffn"]
# Which of a layer's norms are before and after its mixer, before and after its network.
NORM_PLACES: Mapping[NormPlaces, tuple[int | None, ...]] = MappingProxyType(
    {
        "before": (0, None, 1, None),
        "after": (None, 0, None, 1),
        "both": (0, 1, 2, 3),
        "shared": (0, None, 0, None),
        "ffn_both": (0, None, 1, 2),
        "ffn": (None, None, 0, None),
    }
)


class ExpertNorms(NamedTuple):
    """The epsilons of the RMS norms of a mixture's latent, and of each expert's output, which is
    multiplied by the norm's weights first (Muse Spark).
    """

    latent_eps: float
    output_eps: float


@dataclass(frozen=True)
class LayerInputsConfig:
    """An input of ``width`` elements for each token and layer: per-layer embeddings (Gemma 3n).

    It is the mean, times the square root of 2, of an embedding of the token for this layer, which
    is multiplied by the square root of ``width``, and an RMS norm of a projection of the token's
    embedding. A ``LayerEndConfig`` with an activation uses it. ``num_tokens`` is the length of the
    table of embeddings.
    """

    width: int
    num_layers: int
    norm_eps: float
    num_tokens: int

    @property
    def elements(self) -> int:
        """Elements of a token's inputs of all layers."""
        return self.num_layers * self.width

    def module(self) -> nn.Module:
        """The module of all layers' inputs."""
        return import_module("jaxinfer.nn.layer_inputs").LayerInputs(self)


@dataclass(frozen=True)
class SharedBlocksConfig:
    """The inputs of layers with an ``AfterBlockConfig``: the token's embedding of ``width``
    elements, and the parameters of ``count`` blocks, each of which several layers use.
    """

    count: int
    width: int

    @property
    def elements(self) -> int:
        """See ``LayerInputsConfig``; all layers have the same."""
        return self.width

    def module(self) -> nn.Module:
        """The module, which has the parameters of all blocks."""
        return import_module("jaxinfer.nn.mixers.after_block").SharedBlocks(self)


@dataclass(frozen=True)
class TokenIdsConfig:
    """The inputs of layers whose experts are chosen by the token's id (``ExpertsConfig.by_id``)."""

    elements: ClassVar[int] = 1  # see ``LayerInputsConfig``; all layers have the same

    def module(self) -> Any:
        """The module, which has no parameters."""
        return import_module("jaxinfer.nn.layer_inputs").OwnTokenIds()


@dataclass(frozen=True)
class LayerEndConfig:
    """The end of a layer: the residual stream is multiplied by a parameter.

    With an ``activation`` a further block comes before that: a projection of the stream to the
    width of the layer's input passes the activation, is multiplied by the input, projected back,
    normalised and added.
    """

    activation: str | None = None

    def module(self) -> nn.Module:
        """The module; its parameters are part of the layer's."""
        return import_module("jaxinfer.nn.layer_inputs").LayerEnd(self)


@dataclass(frozen=True)
class BlockFactors:
    """Factors of the norm of the stream and of a block's output, whose sum is the new stream.

    See ``LayerSpec.on_norms``.
    """

    stream: float = 1.0
    output: float = 1.0


@dataclass(frozen=True)
class NormSpec:
    """The kind, epsilon and weight dtype of all norms of the residual stream, the epsilon of norms
    after blocks (None: the same), and the number of groups of those of groups.
    """

    kind: NormKind
    eps: float
    dtype: jnp.dtype
    own_post_eps: float | None = None
    groups: int = 1

    @property
    def post_eps(self) -> float:
        """The epsilon of norms after blocks."""
        return self.own_post_eps or self.eps
