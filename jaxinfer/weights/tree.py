"""Parameters by path ("layers_0/qkv") and as the nested dict that Flax applies.

Owns: the two directions. Must not know: what the leaves are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxinfer.models.base import Params


def nested(leaves: Mapping[str, Any]) -> Params:
    """The nested dict of leaves given by path."""
    return unflatten_dict(dict(leaves), sep="/")


def by_path(params: Params) -> dict[str, Any]:
    """The leaves of a nested dict by path."""
    return cast(dict[str, Any], flatten_dict(params, sep="/"))
