"""Attention, and beside it another mixer. Parameters of ``SideBySide``:

those of ``mixers.attention``      beside/...: those of the other mixer
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.decoder_config import MixerSpec
from jaxinfer.nn.linear import Norm, Stream, added, normalised, scaled
from jaxinfer.nn.mixers.side_by_side_spec import SideBySideConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import take_rows


class SideBySide(nn.Module):
    """Both mixers of a layer, with the norm before them."""

    config: SideBySideConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``attention.Attention``. Points within the mixers are those of attention."""
        c, none = self.config, norm.as_none()
        stream, h = normalised(stream, norm, ctx)
        attention = c.attention.module()
        nn.share_scope(self, attention)
        beside: Any = c.other.module().clone(name="beside", parent=self)
        own, others = divided_state(c.other, state, h.dtype)
        given = Stream(h * c.attention_scales.into)
        _, first, own = attention(given, none, own, ctx, only)
        given = Stream(h * c.other_scales.into)
        _, second, others = beside(given, none, others, replace(ctx, points=None), only)
        delta = added(scaled(first, c.attention_scales.out), scaled(second, c.other_scales.out))
        x = stream.x if only is None else take_rows(stream.x, only)
        return x, delta, own if others is None else {**(own or {}), **others}


def divided_state(
    other: MixerSpec, state: LayerArrays | None, dtype: Any
) -> tuple[LayerArrays | None, LayerArrays | None]:
    """The arrays of attention, and those of the other mixer of a layer."""
    if state is None:
        return None, None
    names = {entry.name for entry in other.state(dtype).per_slot}
    others = {name: array for name, array in state.items() if name in names}
    return {name: array for name, array in state.items() if name not in names}, others
