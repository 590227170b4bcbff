"""Names of points of a forward pass, where activations are read or changed; see ``nn.points``.

They are also names in requests, so this module needs no JAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from math import prod
from types import MappingProxyType
from typing import Any

import msgspec

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ArgumentError

_ALIASES = MappingProxyType(
    {
        "hook_resid_pre": "resid_pre",
        "attn.hook_rot_q": "q",
        "attn.hook_rot_k": "k",
        "attn.hook_v": "v",
        "attn.hook_attn_scores": "scores",
        "attn.hook_pattern": "pattern",
        "attn.hook_z": "z",
        "hook_attn_out": "attn_out",
        "hook_resid_mid": "resid_mid",
        "mlp.hook_pre": "mlp_pre",
        "mlp.hook_pre_linear": "mlp_linear",
        "mlp.hook_post": "mlp_post",
        "mlp.hook_expert_indices": "experts",
        "mlp.hook_expert_weights": "expert_weights",
        "hook_mlp_out": "mlp_out",
        "hook_resid_post": "resid_post",
    }
)
# The points of a layer in the order of the pass; a layer has most of them.
IN_LAYER = (
    *("resid_pre", "q", "k", "v", "scores", "pattern", "z", "attn_out", "resid_mid"),
    *("experts", "expert_weights", "mlp_pre", "mlp_linear", "mlp_post", "mlp_out", "resid_post"),
)
_OUTSIDE = MappingProxyType({"hook_embed": "embed", "ln_final.hook_normalized": "final_norm"})
EVERY = "all"  # as a name: all points
_THEIRS = MappingProxyType(
    {own: other for names in (_ALIASES, _OUTSIDE) for other, own in names.items()}
)
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_MOST_NAMED = 5


class Point(msgspec.Struct, frozen=True):
    """A point that requests to an engine may read and steer."""

    name: str  # see ``canonical``
    shape: tuple[int, ...]  # of a token's activation, such as (D,)
    dtype: str  # of each value, such as "bfloat16"

    @property
    def width(self) -> int:
        """The number of values of a token's activation."""
        return prod(self.shape)


def canonical(name: str) -> str:
    """The name of a point, for TransformerLens's name of it or the name itself. A pattern stays."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _OUTSIDE.get(name, name)
    layer, point = match.groups()
    return f"layers.{layer}.{_ALIASES.get(point, point)}"


def names_of(given: Iterable[Any] | str) -> tuple[str, ...]:
    """Names that are given as a sequence, or as one text.

    Raises ``ArgumentError`` for something that is not a name.
    """
    names: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(
                f"a point is named by a text, such as 'layers.0.pattern', got {short(name)}"
            )
    return names


def is_pattern(name: str) -> bool:
    """True for "all", and for a name with ``*``, which stands for any characters."""
    return name == EVERY or "*" in name


def expanded(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names of the known points that a name or a pattern stands for; none if it is unknown.

    A pattern of TransformerLens's names gives those: ``blocks.*.hook_resid_post``.
    """
    if not is_pattern(name):
        return (name,) if canonical(name) in known else ()
    if name == EVERY:
        return tuple(known)
    pattern = re.compile(".*".join(map(re.escape, name.split("*"))))
    own = tuple(point for point in known if pattern.fullmatch(point))
    return own or tuple(their for their in map(theirs, known) if pattern.fullmatch(their))


def points_at(names: Iterable[str], points: Iterable[Point]) -> dict[str, Point]:
    """The points of an engine that checked names and patterns stand for, by the names that answers
    have for them.
    """
    known = {point.name: point for point in points}
    found = (one for name in names for one in expanded(name, known))
    return {name: known[canonical(name)] for name in found}


def theirs(name: str) -> str:
    """TransformerLens's name of a point: the inverse of ``canonical``."""
    layers, _, place = name.partition(".")
    number, _, point = place.partition(".")
    known = _THEIRS.get(point or name, point)
    return f"blocks.{number}.{known}" if layers == "layers" else known


def unknown(name: str, known: Iterable[str]) -> str:
    """The words of an error for a name that stands for no known point."""
    known = tuple(known)
    what = f"point that matches {name!r}" if is_pattern(name) else f"point {name!r}"
    return f"there is no {what}; the nearest are {nearest(canonical(name), known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known points whose names are most like ``name``, as words for a message.

    A name in TransformerLens's form is compared with its names of the points.
    """
    spelt = {one: one for one in known}
    if "hook_" in name:
        spelt = {theirs(one): one for one in spelt}
        name = theirs(name) if name.startswith("layers.") else name
    return ", ".join(spelt[one] for one in get_close_matches(name, spelt, _MOST_NAMED, 0.0))
