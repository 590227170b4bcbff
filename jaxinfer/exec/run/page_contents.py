"""Reads what the layers keep in pages, for comparisons; not while requests are served."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.nn.state import State, StateLayout


def page_contents(
    layout: StateLayout, state: State, ids: Sequence[Sequence[int]]
) -> dict[str, tuple[int, np.ndarray]]:
    """The group and the values ``[number of pages, page_size, ...]`` of each paged array, by names
    such as ``layers.3.k``. ``ids``: pages of each group.
    """
    found: dict[str, tuple[int, np.ndarray]] = {}
    for number, place in enumerate(layout.layers):
        if place.of is not None:
            continue
        for name, index in place.arrays:
            if (pool := layout.pools[index]) is None:
                continue
            group = next(one for one in place.groups if layout.groups[one].pool == pool)
            rows = np.asarray(ids[group], np.int32)
            found[f"layers.{number}.{name}"] = group, jax.device_get(state[index][rows])
    return found
