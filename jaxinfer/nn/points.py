"""Named points of a forward pass, where activations are read (taps) or replaced (edits).

The points, and TransformerLens's names for them; ``i`` is a layer. Queries, keys and values are
those that attention multiplies, after norms and rope; scores are scaled and masked. A mixture of
experts has no points within its experts. With n residual streams, resid_pre, resid_mid and
resid_post are [T, n * D]:

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

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.core.points import IN_LAYER, canonical

type Edit = Callable[[jax.Array], jax.Array]
# Calls a layer with activations that replace its own, and the names of those to return as well;
# returns the layer's results and those activations.
type CutLayer = Callable[
    [Mapping[str, jax.Array], tuple[str, ...]], tuple[Any, dict[str, jax.Array]]
]

_LAYER = re.compile(r"layers\.(\d+)\.")
# in steps on several devices each has a part of the heads or the columns
DIVIDED = (".z", ".mlp_post")
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
    that have a point in use; in a step each of them needs a trace of its own. ``axis`` is as in
    ``StepContext``: activations of which a device has a part are read and edited whole.
    """

    def __init__(
        self,
        taps: Iterable[str],
        edits: Mapping[str, Edit] = MappingProxyType({}),
        shifts: Mapping[str, Shift] = MappingProxyType({}),
        axis: str | None = None,
    ) -> None:
        self._axis = axis
        self._taps = {canonical(name) for name in taps}
        self._edits = {canonical(name): edit for name, edit in edits.items()}
        self._shifts = shifts
        self._found: dict[str, jax.Array] = {}
        self._passed: set[str] = set()
        places = map(_LAYER.match, self._taps | self._edits.keys() | shifts.keys())
        self.layers = frozenset(int(place[1]) for place in places if place is not None)

    def uses(self, name: str) -> bool:
        """True if the activation at this point is read or replaced."""
        self._passed.add(name)
        return name in self._taps or name in self._edits or name in self._shifts

    def shifted(self, name: str, value: jax.Array) -> jax.Array:
        """The value, or a part of the sum that the point is, with the point's shift."""
        shift = self._shifts.get(name)
        if shift is None:
            return value
        if self._is_part(name):
            shift = shift._replace(by=_own_columns(shift.by, value[0].size, self._axis))
        return shift.added_to(value)

    def at(self, name: str, value: jax.Array) -> jax.Array:
        """The value with which the pass goes on: it is replaced, then recorded.

        Raises ValueError for an edit that changes its shape.
        """
        if not self.uses(name):
            return value
        edit, own = self._edits.get(name), value
        if self._is_part(name):
            value = jax.lax.all_gather(value, self._axis, axis=1, tiled=True)
        if edit is not None:
            value = edited(name, edit, value)
        if name in self._taps:
            self._found[name] = value
        if self._is_part(name):
            return _own_columns(value, own.shape[1], self._axis)
        return value

    def _is_part(self, name: str) -> bool:
        """True if the activation at this point is a device's part of that of all."""
        return self._axis is not None and name.endswith(DIVIDED)

    def run_layer(self, number: int, layer: CutLayer) -> Any:
        """The results of a layer of the dense form whose points are in use.

        The layer is compiled, and an edit need not be: ``layer`` is called for the activation at
        the first edited point, with what the edit makes of it for that at the next one, and so on.
        The compiler leaves out what a call does not need.
        """
        given: dict[str, jax.Array] = {}
        taps = tuple(point for point in IN_LAYER if f"layers.{number}.{point}" in self._taps)
        for point in IN_LAYER:
            edit = self._edits.get(name := f"layers.{number}.{point}")
            if edit is None:
                continue
            _, found = layer(given, (point,))
            if point in found:
                given[point] = edited(name, edit, found[point])
                self._passed.add(name)
        results, found = layer(given, taps)
        self._found |= {f"layers.{number}.{point}": value for point, value in found.items()}
        self._passed |= {f"layers.{number}.{point}" for point in found}
        return results

    def missing(self) -> list[str]:
        """The names of taps and edits at which the pass has no point."""
        return sorted({*self._taps, *self._edits} - self._passed)

    def found(self, taps: Iterable[str]) -> dict[str, jax.Array]:
        """The recorded activations, by the requested names."""
        return {name: self._found[canonical(name)] for name in taps}


class GivenPoints:
    """The points of one call of a layer in the dense form: see ``Points.run_layer``.

    ``given`` are activations that replace those of the layer, and ``found`` those of ``taps``, both
    by their names within a layer.
    """

    def __init__(self, given: Mapping[str, jax.Array], taps: Iterable[str]) -> None:
        self._given = given
        self._taps = frozenset(taps)
        self.found: dict[str, jax.Array] = {}

    def uses(self, name: str) -> bool:
        """See ``Points``: in the dense form every point is in use."""
        del name
        return True

    def shifted(self, name: str, value: jax.Array) -> jax.Array:
        """See ``Points``; only steps shift."""
        del name
        return value

    def at(self, name: str, value: jax.Array) -> jax.Array:
        """See ``Points``."""
        value = self._given.get(name, value)
        if name in self._taps:
            self.found[name] = value
        return value


def _own_columns(whole: jax.Array, width: int, axis: str | None) -> jax.Array:  # [T, ...]
    """The part of an activation of all devices that this device has."""
    assert axis is not None, "one device has all of it"
    start = jax.lax.axis_index(axis) * width
    return jax.lax.dynamic_slice_in_dim(whole, start, width, axis=1)


def edited(name: str, edit: Edit, value: jax.Array) -> jax.Array:
    """The activation after an edit; raises ValueError if it changes the shape."""
    made = edit(value)
    if getattr(made, "shape", None) != value.shape:
        shape = getattr(made, "shape", type(made).__name__)
        raise ValueError(f"the edit of {name} must return {value.shape}, not {shape}")
    return made.astype(value.dtype)
