"""What mixers and feed-forward networks have in common as specs; see ``decoder_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    import flax.linen as nn
    import jax

    from pallas_kernels.harness.pins import Pins


def part(count: int, devices: int, what: str) -> int:
    """One device's part of ``count``; raises ``ConfigError`` if it cannot be divided."""
    own, rest = divmod(count, devices)
    if rest:
        raise ConfigError(f"{count} {what} cannot be divided among {devices} devices")
    return own


class BlockSpec(Protocol):
    """A mixer or a feed-forward network as data. Hashable.

    Specs inherit the members that have a default. The engine knows of a block what these say: its
    type matters in ``nn`` and ``models`` only (``tests/test_floors.py`` checks that).
    """

    def module(self) -> nn.Module:
        """The module; its parameters are part of the layer's."""
        ...

    def share(self, devices: int) -> Self:
        """One device's part of a block that is divided among ``devices``, as its parameters are.

        Raises ``ConfigError`` if it cannot be divided, which is the default.
        """
        raise ConfigError(f"{type(self).__name__} cannot be divided among {devices} devices")

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """The points within the block that its step has, in the order of the pass, and the shapes
        of a token's activations there. By default none.

        Names are of ``core.points.IN_LAYER``. The inputs and outputs of blocks are points anyway.
        """
        return {}

    def words(self) -> str:
        """The sizes of the block, in a description of a model. By default nothing."""
        return ""

    def workspace(
        self,
        params: Mapping[str, Any],
        x: jax.ShapeDtypeStruct,  # [T, D]
        platform: str,
        pins: Pins,
    ) -> int:
        """A bound on the bytes that a step with tokens ``x`` needs in this block, in addition to
        the inputs and outputs of its matrices. By default 0.

        ``params`` are the abstract parameters of the layer.
        """
        del params, x, platform, pins
        return 0
