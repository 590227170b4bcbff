"""Specs of the residual stream; the plain one's module is in ``nn.residual``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol


class ResidualSpec(Protocol):
    """The residual stream of a decoder. Hashable.

    It may be several streams of the decoder's width, as in hyper-connections (Zhu et al. 2024,
    arXiv:2409.19606), which are adjacent in one array [T, n * D].
    """

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

    num_streams: int = 1
    scale: float | None = None

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; it has no parameters."""
        del name
        return import_module("jaxinfer.nn.residual").Plain(self.scale)


@dataclass(frozen=True)
class WeightedResidual:
    """One stream, which is multiplied by a parameter of each block before its output is added."""

    num_streams: int = 1

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; the decoder's has no parameters."""
        module = import_module("jaxinfer.nn.residual")
        return module.Plain() if name == "residual" else module.Weighted(name=name)
