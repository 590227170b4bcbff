"""Requests that read or steer activations: their checks, and the steering vectors by name."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from jaxinfer.core.errors import RequestError
from jaxinfer.core.limits import Limits
from jaxinfer.core.points import Point, canonical, expanded, nearest, points_at
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.steering import Steer, Steering, float32_bytes, num_values

MAX_VECTORS = 1024  # with names
_FLOAT32_BYTES = 4
_NO_POINTS = (
    "{} need an engine that is built with the points to read and steer; start it with tap_points "
    "(--tap-points)"
)


def check_points(sampling: SamplingParams, points: Sequence[Point]) -> None:
    """Raise ``RequestError`` if a request reads or steers at a point that the engine does not have,
    or with a vector of another width.
    """
    if not sampling.taps and not sampling.steer:
        return
    known = {point.name: point for point in points}
    for name in sampling.taps:
        if not known or not expanded(name, known):
            _point("taps", name, known)  # raises
    for steer in sampling.steer:
        point = _point("steer", steer.point, known)
        if steer.vector is not None:
            _check_width("steer has a vector that", steer.vector, point)


def tap_bytes(
    num_prompt_tokens: int, max_tokens: int, sampling: SamplingParams, limits: Limits
) -> int:
    """The most bytes of activations, as float32, that the n answers to a prompt return."""
    found = points_at(sampling.taps, limits.points).values()
    width = sum({point.name: point.width for point in found}.values())
    tokens = num_prompt_tokens + max_tokens - 1  # nothing is computed for the last one
    return sampling.n * tokens * width * _FLOAT32_BYTES


def tapped(
    data: bytes | memoryview, names: Sequence[str], points: Sequence[Point]
) -> dict[str, np.ndarray]:  # [tokens, ...] each
    """The activations of an answer, by the names of its taps; they are views of ``data``."""
    import ml_dtypes  # numpy has no bfloat16

    by_name = points_at(names, points)
    chosen = list(by_name.values())
    dtype = np.dtype(getattr(ml_dtypes, chosen[0].dtype, chosen[0].dtype))
    ends = np.cumsum([point.width for point in chosen]).tolist()
    values = np.frombuffer(data, dtype).reshape(-1, ends[-1])
    return {
        name: values[:, end - point.width : end].reshape(-1, *point.shape)
        for name, point, end in zip(by_name, chosen, ends, strict=True)
    }


class SteeringVectors:
    """The vectors that requests may name; a request keeps those of its arrival."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = tuple(points)
        self._vectors: dict[str, bytes] = {}

    def set(self, name: str, vector: Any) -> None:
        """Keep a vector by name, in place of an earlier one; None removes it.

        Raises ``RequestError`` for a vector that fits no point of the engine.
        """
        if vector is None:
            self._vectors.pop(name, None)
            return
        values = float32_bytes(f"the steering vector {name!r}", vector)
        if not self._points:
            raise RequestError(_NO_POINTS.format("steering vectors"))
        widths = sorted({point.width for point in self._points})
        if num_values(values) not in widths:
            words = " or ".join(map(str, widths))
            raise RequestError(
                f"the steering vector {name!r} has {num_values(values)} values, and activations at "
                f"this engine's points have {words}"
            )
        if name not in self._vectors and len(self._vectors) >= MAX_VECTORS:
            raise RequestError(
                f"{MAX_VECTORS} steering vectors are set, as many as are kept; remove one"
            )
        self._vectors[name] = values

    def resolved(self, sampling: SamplingParams) -> Steering | None:
        """All that a checked request adds; raises ``RequestError`` for an unknown name."""
        if not sampling.steer:
            return None
        sums = {point.name: np.zeros(point.width, np.float32) for point in self._points}
        known = {point.name: point for point in self._points}
        for steer in sampling.steer:
            name = canonical(steer.point)
            vector = np.frombuffer(self._vector(steer, known[name]), np.float32)
            with np.errstate(over="ignore"):
                sums[name] += np.float32(steer.scale) * vector
        values = np.concatenate(list(sums.values()))
        if not np.isfinite(values).all():
            raise RequestError("steer adds values beyond float32; lower the scales")
        data = values.tobytes()
        return Steering(data, blake2b(data, digest_size=16).digest())

    def _vector(self, steer: Steer, point: Point) -> bytes:
        if steer.vector is not None:
            return steer.vector
        vector = self._vectors.get(steer.name or "")
        if vector is None:
            near = nearest(steer.name or "", self._vectors) or "none"
            raise RequestError(
                f"steer names the vector {steer.name!r}, which is not set; the nearest are {near}"
            )
        _check_width(f"steer names the vector {steer.name!r}, which", vector, point)
        return vector


def _point(field: str, name: str, known: dict[str, Point]) -> Point:
    if not known:
        raise RequestError(_NO_POINTS.format(field))
    point = known.get(canonical(name))
    if point is None:
        raise RequestError(
            f"{field} has {name!r}, which is not among the points of this engine; the nearest are "
            f"{nearest(canonical(name), known)}, and tap_points (--tap-points) sets them"
        )
    return point


def _check_width(what: str, vector: bytes, point: Point) -> None:
    if num_values(vector) != point.width:
        raise RequestError(
            f"{what} has {num_values(vector)} values, and an activation at {point.name} has "
            f"{point.width}"
        )
