"""Named points of a forward pass, where activations are read (taps) or replaced (edits).

The points, and TransformerLens's names for them; ``i`` is a layer. Queries, keys and values are
those that attention multiplies, after norms and rope; scores are scaled and masked. A mixture of
experts has no points within its experts:

    embed                  [T, D]      hook_embed
    layers.i.resid_pre     [T, D]      blocks.i.hook_resid_pre      the stream before the layer
    layers.i.q             [T, N, H]   blocks.i.attn.hook_rot_q
    layers.i.k             [T, K, H]   blocks.i.attn.hook_rot_k
    layers.i.v             [T, K, H]   blocks.i.attn.hook_v
    layers.i.scores        [N, T, T]   blocks.i.attn.hook_attn_scores
    layers.i.pattern       [N, T, T]   blocks.i.attn.hook_pattern
    layers.i.z             [T, N, H]   blocks.i.attn.hook_z
    layers.i.attn_out      [T, D]      blocks.i.hook_attn_out       added to the stream
    layers.i.resid_mid     [T, D]      blocks.i.hook_resid_mid
    layers.i.mlp_pre       [T, F]      blocks.i.mlp.hook_pre        before the activation
    layers.i.mlp_linear    [T, F]      blocks.i.mlp.hook_pre_linear its factor in a gated network
    layers.i.mlp_post      [T, F]      blocks.i.mlp.hook_post
    layers.i.experts       int32[T, k] blocks.i.mlp.hook_expert_indices  of a mixture of experts
    layers.i.expert_weights [T, k]     blocks.i.mlp.hook_expert_weights
    layers.i.mlp_out       [T, D]      blocks.i.hook_mlp_out        added to the stream
    layers.i.resid_post    [T, D]      blocks.i.hook_resid_post
    final_norm             [T, D]      ln_final.hook_normalized

Source of the aliases: TransformerLens's ``HookedTransformer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.core.points import canonical, nearest

type Edit = Callable[[jax.Array], jax.Array]

BY_HEAD = ("scores", "pattern")  # of these the tokens, as queries, are the second axis


class Shift(NamedTuple):
    """A vector added to an activation at the tokens of some rows; other tokens keep every bit."""

    by: jax.Array  # float32[T, W], W the flat width of the point
    tokens: jax.Array  # bool[T]

    def added_to(self, value: jax.Array) -> jax.Array:  # [T, ...], or split-K partials [S, T, W]
        """The value with the shift. Of partials, whose sum is meant, the first one is changed."""
        partials = value.ndim == 3 and value.shape[1:] == self.by.shape
        first = value[0] if partials else value
        tokens = self.tokens.reshape(-1, *[1] * (first.ndim - 1))
        moved = first.astype(jnp.float32) + self.by.reshape(first.shape)
        moved = jnp.where(tokens, moved.astype(first.dtype), first)
        return value.at[0].set(moved) if partials else moved


class Points:
    """The points of one forward pass: activations are recorded in it while the pass is traced.

    It belongs to one call, so that a function that makes one remains pure. ``layers`` are those
    that may have a point in use; each of them needs a trace of its own. The dense form edits
    activations, a step shifts them.
    """

    def __init__(
        self,
        layers: Iterable[int],
        taps: Iterable[str],
        edits: Mapping[str, Edit] = MappingProxyType({}),
        shifts: Mapping[str, Shift] = MappingProxyType({}),
    ) -> None:
        self.layers = frozenset(layers)
        self._taps = {canonical(name) for name in taps}
        self._edits = {canonical(name): edit for name, edit in edits.items()}
        self._shifts = shifts
        self._found: dict[str, jax.Array] = {}
        self._passed: dict[str, None] = {}  # all names, in order

    def uses(self, name: str) -> bool:
        """True if the activation at this point is read or replaced."""
        self._passed[name] = None
        return name in self._taps or name in self._edits or name in self._shifts

    def shifted(self, name: str, value: jax.Array) -> jax.Array:
        """The value, or a part of the sum that the point is, with the point's shift."""
        shift = self._shifts.get(name)
        return value if shift is None else shift.added_to(value)

    def at(self, name: str, value: jax.Array) -> jax.Array:
        """The value with which the pass goes on: it is replaced, then recorded.

        Raises ValueError for an edit that changes its shape.
        """
        if not self.uses(name):
            return value
        edit = self._edits.get(name)
        if edit is not None:
            value = _edited(name, edit, value)
        if name in self._taps:
            self._found[name] = value
        return value

    def found(self, taps: Iterable[str]) -> dict[str, jax.Array]:
        """The recorded activations, by the names that were asked for.

        Raises KeyError, with the nearest names, for a tap or an edit at no point of the pass.
        """
        for name in (*self._taps, *self._edits):
            if name not in self._passed:
                near = nearest(name, self._passed)
                raise KeyError(f"there is no point {name!r}; the nearest are {near}")
        return {name: self._found[canonical(name)] for name in taps}


def _edited(name: str, edit: Edit, value: jax.Array) -> jax.Array:
    made = edit(value)
    if getattr(made, "shape", None) != value.shape:
        shape = getattr(made, "shape", type(made).__name__)
        raise ValueError(f"the edit of {name} must return {value.shape}, not {shape}")
    return made.astype(value.dtype)
