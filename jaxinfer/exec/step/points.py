"""Points of a step: steering is added there for some rows, and activations are returned.

A row's steering is in its slot of a table for each point, which ``exec.calls.steer`` fills, so that
any vectors serve without a compile. Slots keep the vectors of earlier requests; the batch says
which rows are steered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.points import Point, canonical, expanded, is_pattern, nearest, points_at
from jaxinfer.exec.step.batch import DeviceBatch
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.points import Edit, Points, Shift, edited

type Steering = tuple[jax.Array, ...]  # float32[S + 1, W] of each point, a row for each slot

# points of ``forward`` that steps do not have: kernels keep these values to themselves, and choices
# of experts are no activations that a vector can be added to
_DENSE_ONLY = (
    *("q", "k", "v", "scores", "pattern", "mlp_pre", "mlp_linear"),
    *("experts", "expert_weights"),
)


class StepEdits(NamedTuple):
    """Functions of activations that every step of an engine applies, token by token.

    They are part of the executables, which belong to these very functions.
    """

    functions: tuple[tuple[str, Edit], ...]  # by the names of points
    positions: tuple[int, ...] | None = None  # of the tokens to edit; None: all
    span: tuple[int, int] | None = None  # first position, and the one after the last; None: all

    def points(self, batch: DeviceBatch, axis: str | None = None) -> Points:
        """The points of a forward pass of this batch; padding keeps its values."""
        tokens = batch.rows.is_token
        if self.positions is not None:
            tokens &= jnp.isin(batch.positions, jnp.asarray(self.positions, jnp.int32))
        if self.span is not None:
            tokens &= (batch.positions >= self.span[0]) & (batch.positions < self.span[1])
        edits = {name: partial(_at_tokens, name, edit, tokens) for name, edit in self.functions}
        return Points((), edits, axis=axis)


def added_vector(vector: np.ndarray, value: jax.Array) -> jax.Array:
    """The activations with a vector added to each."""
    return value.astype(jnp.float32) + vector


def _at_tokens(name: str, edit: Edit, tokens: jax.Array, value: jax.Array) -> jax.Array:
    chosen = tokens.reshape(-1, *[1] * (value.ndim - 1))
    return jnp.where(chosen, edited(name, edit, value), value)


def points_named(
    names: Sequence[str], spec: DecoderSpec, field: str = "tap_points"
) -> tuple[Point, ...]:
    """The points of a step with these names, which may be patterns; raises ``ConfigError`` for one
    that stands for none. ``field`` had the names.
    """
    known = dict(_points_of(spec))
    found: dict[str, None] = {}
    for name in names:
        points = expanded(name, known)
        found |= dict.fromkeys(map(canonical, points))
        if points:
            continue
        if name.rpartition(".")[2] in _DENSE_ONLY:
            raise ConfigError(
                f"{field} has {name!r}, which steps that serve do not have; read it with "
                "jaxinfer.load(MODEL).forward"
            )
        what = "matches" if is_pattern(name) else "is"
        near = nearest(name, known)
        raise ConfigError(f"{field} has {name!r}, which {what} no point; the nearest are {near}")
    return tuple(Point(name, known[name], spec.dtype.name) for name in found)


def _points_of(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The points of a step by name, with the shape of a token's activation."""
    width, stream = (spec.hidden_size,), (spec.stream_width,)
    yield "embed", width
    for i, layer in enumerate(spec.layers):
        points = {"resid_pre": stream, **layer.mixer.points(), "attn_out": width}
        points |= {"resid_mid": stream, **layer.ffn.points(), "mlp_out": width}
        for name, shape in (points | {"resid_post": stream}).items():
            yield f"layers.{i}.{name}", shape
    yield "final_norm", width


def points_of_step(
    points: Sequence[Point], steering: Steering, batch: DeviceBatch, axis: str | None = None
) -> Points:
    """The points of a forward pass of this batch: all are read, and steered rows are shifted.

    ``axis`` is as in ``StepContext``.
    """
    assert batch.steered is not None, "the bucket taps"
    rows = batch.rows
    slots, tokens = rows.slots[rows.of_token], batch.steered[rows.of_token] & rows.is_token
    names = [point.name for point in points]
    shifts = {
        name: Shift(table[slots], tokens) for name, table in zip(names, steering, strict=True)
    }
    return Points(names, shifts=shifts, axis=axis)


def read_points(points: Sequence[Point], passed: Points) -> jax.Array:  # [T, W of all points]
    """The activations of a pass, as one array: the host copies it at once."""
    found = passed.found([point.name for point in points])
    flat = [found[point.name].reshape(-1, point.width) for point in points]
    return jnp.concatenate(flat, axis=1)


def chosen_columns(
    read: np.ndarray,  # [T, W of all points]: see ``read_points``
    names: Sequence[str],
    points: Sequence[Point],
) -> np.ndarray:  # [T, W of the names]
    """The activations at some of the points, in the order of the names."""
    wanted = [point.name for point in points_at(names, points).values()]
    if wanted == [point.name for point in points]:
        return read
    ends = np.cumsum([point.width for point in points]).tolist()
    spans = {p.name: slice(end - p.width, end) for p, end in zip(points, ends, strict=True)}
    return np.concatenate([read[:, spans[name]] for name in wanted], axis=1)
