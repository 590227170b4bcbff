"""Steering: vectors that a request adds to activations at points of the forward pass."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from jaxinfer.core.checks import as_float
from jaxinfer.core.errors import RequestError

_FIELDS = ("point", "vector", "name", "scale")


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    """A vector that is added to the activation at a point, times ``scale``, for every token.

    The vector is given itself, or is one that the engine keeps by ``name``. It has as many values
    as a token's activation at the point. Raises ``RequestError`` naming the invalid field.
    """

    point: str
    vector: bytes | None = None  # float32[W]; a list or an array becomes this
    name: str | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        names: tuple[Any, ...] = (self.point, self.name or "")
        if not all(isinstance(name, str) for name in names):
            raise RequestError(f"steer has a point and a name that must be texts, got {names!r}")
        if (self.vector is None) == (self.name is None):
            raise RequestError("steer needs a vector, or the name of one, and not both")
        scale = as_float(self.scale)
        if scale is None or not math.isfinite(scale):
            raise RequestError(f"steer has a scale that must be a finite number: {self.scale!r}")
        msgspec.structs.force_setattr(self, "scale", scale)
        if self.vector is not None:
            vector = float32_bytes("steer has a vector that", self.vector)
            msgspec.structs.force_setattr(self, "vector", vector)

    def __repr__(self) -> str:
        what = f"name={self.name!r}"
        if self.vector is not None:
            what = f"vector=<{num_values(self.vector)} values>"
        return f"Steer(point={self.point!r}, {what}, scale={self.scale})"


class Steering(msgspec.Struct, frozen=True):
    """All that a request adds, at all points of its engine."""

    values: bytes  # float32 of every point, in the order of ``Limits.points``
    digest: bytes  # of the values


def as_steer(given: Any) -> Steer:
    """A ``Steer``, or one of a dict of its fields; raises ``RequestError``."""
    if isinstance(given, Steer):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(f"steer must hold objects of {', '.join(_FIELDS)}, got {given!r}")
    fields = cast("Mapping[Any, Any]", given)
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise RequestError(f"steer has {unknown[0]!r}; its fields are {', '.join(_FIELDS)}")
    if "point" not in fields:
        raise RequestError("steer needs a point in each of its items")
    return Steer(**fields)


def float32_bytes(name: str, values: Any) -> bytes:
    """The bytes of a vector, which is a list, an array or such bytes; raises ``RequestError``."""
    vector = array("f")
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        if isinstance(listed, bytes):
            vector.frombytes(listed)
        elif isinstance(listed, Sequence) and not isinstance(listed, str):
            vector.fromlist([float(value) for value in cast("Sequence[Any]", listed)])
    except (TypeError, ValueError, OverflowError):
        vector = array("f")
    if not vector or not all(map(math.isfinite, vector)):
        raise RequestError(f"{name} must be a list of numbers that are finite in float32")
    return vector.tobytes()


def num_values(vector: bytes) -> int:
    """W of a float32[W] as bytes."""
    return len(vector) // 4
