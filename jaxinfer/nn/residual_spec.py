"""Specs of the residual stream; the plain one's module is in ``nn.residual``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol


class ResidualSpec(Protocol):
    """The residual stream of a decoder. Hashable.

    It may be several streams of the decoder's width, as in hyper-connections (Zhu et al. 2024,
    arXiv:2409.19606), which are adjacent in one array [T, n * D]. ``is_invariant`` is as that of
    ``nn.block.BlockSpec``, on CPUs and GPUs.
    """

    is_invariant: ClassVar[bool]

    @property
    def num_streams(self) -> int:
        """n."""
        ...

    def module(self, name: str) -> Any:
        """How one block uses the stream, or with ``name`` "residual" the decoder; see
        ``residual.Plain``. Parameters of a Flax module have this name in those of the layer.
        """
        ...


@dataclass(frozen=True)
class PlainResidual:
    """One stream, to which blocks add their outputs, times ``scale`` if that is not None."""

    is_invariant: ClassVar[bool] = True
    num_streams: int = 1
    scale: float | None = None

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; it has no parameters."""
        del name
        return import_module("jaxinfer.nn.residual").Plain(self.scale)


@dataclass(frozen=True)
class HyperResidual:
    """Several streams, of which a block reads a weighted sum, and to which it adds its output times
    a weight of each: hyper-connections that do not mix streams (iHC, Hunyuan 4).

    The weights are sigmoids of projections of all streams after an RMS norm without weights, whose
    epsilon is ``norm_eps``; ``eps`` is added to them, and those of outputs are multiplied by
    ``magnitude``. All streams begin with the embedding and end with a weighted sum.
    """

    is_invariant: ClassVar[bool] = False
    num_streams: int
    magnitude: float
    eps: float
    norm_eps: float

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``."""
        return import_module("jaxinfer.nn.residual").Hyper(self, name=name)


@dataclass(frozen=True)
class MixedResidual(HyperResidual):
    """Several streams that a block mixes before its output is added: manifold-constrained
    hyper-connections (mHC, DeepSeek-V4).

    The weights of outputs are as in ``HyperResidual``, without ``eps``. Those of the mixture, an
    [n, n] matrix of each token, are a softmax of each row plus ``eps``, whose columns and rows are
    then divided by their sums plus ``eps`` (Sinkhorn and Knopp 1967): columns ``rounds`` times and
    rows once less. Stream k becomes the sum of the streams j times element [j, k]. With ``mean``
    the streams end with their mean (GLM-5.3-Flash).
    """

    rounds: int
    mean: bool = False

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``."""
        return import_module("jaxinfer.nn.residual").Mixed(self, name=name)


@dataclass(frozen=True)
class GatedResidual:
    """Several streams, of which a block reads a gated mean, and to which it adds its output times
    a weight of each (Qwen3.8-Flash-Next).

    Each stream has an RMS norm. The gates, of each component of each stream, are sigmoids of two
    matrices by way of ``rank`` values with SiLU, and the weights twice the sigmoids of another
    matrix, all of the normalised streams. All streams begin with the embedding and end with a gated
    mean, so that no other norm is needed.
    """

    is_invariant: ClassVar[bool] = False
    num_streams: int
    rank: int
    norm_eps: float

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``."""
        return import_module("jaxinfer.nn.gated_residual").Gated(self, name=name)


@dataclass(frozen=True)
class BlendedResidual:
    """One stream, which a block blends with its output after an RMS norm of it: Muse Spark's gates.

    Of a parameter g of each component, with b = sigmoid(g / ``temperature``), the stream is
    multiplied by the square root of 1 - b^2, which is at least ``least``, and the output by b.
    Outputs of networks are multiplied by weights before their norm, whose epsilon is ``norm_eps``.
    """

    is_invariant: ClassVar[bool] = False
    temperature: float
    norm_eps: float
    least: float = 1e-3
    num_streams: int = 1

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; the decoder's has no parameters."""
        module = import_module("jaxinfer.nn.residual")
        if name == "residual":
            return module.Plain()
        return module.Blended(self, weighs=name == "ffn_residual", name=name)


@dataclass(frozen=True)
class WeightedResidual:
    """One stream, which is multiplied by a parameter of each block before its output is added."""

    is_invariant: ClassVar[bool] = True
    num_streams: int = 1

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; the decoder's has no parameters."""
        module = import_module("jaxinfer.nn.residual")
        return module.Plain() if name == "residual" else module.Weighted(name=name)
