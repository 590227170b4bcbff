"""Parameters by path ("layers_0/qkv") and as the nested dict that Flax applies.

Owns: the two directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of leaves given by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return tree


def by_path(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict by path."""
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in tree.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{name}/")
        else:
            yield prefix + name, inner
