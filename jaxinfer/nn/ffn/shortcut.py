"""Experts whose output a later layer adds. Parameters of ``ShortcutExperts``:

those of ``ffn.experts``      dense/gate_up, dense/down: see ``ffn.dense``
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.ffn.dense import FeedForward
from jaxinfer.nn.ffn.experts import Experts
from jaxinfer.nn.ffn.shortcut_spec import ShortcutExpertsConfig
from jaxinfer.nn.linear import BlockOutput, Carried, Norm, Stream, normalised, whole
from jaxinfer.nn.residual import Add
from jaxinfer.nn.weight import take_rows


class ShortcutExperts(nn.Module):
    """Both networks of a layer, with the norm before them."""

    config: ShortcutExpertsConfig

    @nn.compact
    def __call__(
        self, stream: Stream, norm: Norm, ctx: StepContext
    ) -> tuple[jax.Array, Carried]:  # [T, D]
        """The stream with its delta added, and both outputs."""
        stream, h = normalised(stream, norm, ctx)
        none = norm.as_none()
        _, dense = FeedForward(self.config.dense, name="dense")(Stream(h), none, ctx)
        mixture = Experts(self.config.mixture)
        nn.share_scope(self, mixture)
        _, mixed = mixture(Stream(h), none, ctx)
        return stream.x, Carried(dense, Stream(jnp.zeros_like(h), whole(mixed)).total())


@dataclass(frozen=True)
class WithShortcut:
    """How blocks use a ``ShortcutResidual``: see ``nn.residual.Plain``. A network adds what the
    one before it has carried, if it carries nothing itself.
    """

    is_network: bool

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The stream, to which nothing is still to be added."""
        return Stream(jnp.concatenate((x, jnp.zeros_like(x)), axis=1))

    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """The input [T, D] of a block, and how its output is added."""
        x, carried = jnp.split(stream.total(), 2, axis=1)
        carried = carried if only is None else take_rows(carried, only)

        def add(x: jax.Array, delta: BlockOutput | Carried) -> Stream:
            later = carried
            if isinstance(delta, Carried):
                delta, later = delta.output, delta.later
            elif self.is_network:
                x, later = x + carried, jnp.zeros_like(carried)
            return Stream(jnp.concatenate((Stream(x, delta).total(), later), axis=1))

        return Stream(x), add

    def end(self, stream: Stream) -> Stream:
        """The input [T, D] of the final norm."""
        return Stream(jnp.split(stream.total(), 2, axis=1)[0])
