"""Specs of connections over several layers; their modules are in ``nn.skips``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from jaxinfer.nn.layer_spec import LayerEndConfig

if TYPE_CHECKING:
    import flax.linen as nn


@dataclass(frozen=True)
class SkipsResidual:
    """The stream, and behind it ``kept`` copies of it from earlier layers: see ``SkipsEndConfig``.

    Blocks read the stream alone, and add their outputs to it.
    """

    is_invariant: ClassVar[bool] = True
    kept: int

    @property
    def num_streams(self) -> int:
        """See ``ResidualSpec``."""
        return 1 + self.kept

    def module(self, name: str) -> Any:
        """See ``ResidualSpec``; it has no parameters."""
        del name
        return import_module("jaxinfer.nn.skips").WithCopies(self.kept)


@dataclass(frozen=True)
class SkipsEndConfig(LayerEndConfig):
    """The end of a layer that keeps copies of the stream, and then averages it with copies.

    ``keeps`` are the numbers of the copies that the stream replaces, ``reads`` those of which each
    in turn is averaged with the stream, with the weight ``share`` of the copy.
    """

    count: int = 0
    keeps: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    share: float = 0.0

    def module(self) -> nn.Module:
        """See ``LayerEndConfig``."""
        return import_module("jaxinfer.nn.skips").SkipsEnd(self)
