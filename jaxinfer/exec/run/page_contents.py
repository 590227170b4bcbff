"""Reads what the layers keep in pages, for comparisons; not while requests are served."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.nn.state import SCALE, State, StateLayout
from pallas_kernels.lib.page_scales import values_of


def page_contents(
    layout: StateLayout, state: State, ids: Sequence[Sequence[int]]
) -> dict[str, tuple[int, np.ndarray]]:
    """The group and the values ``[number of pages, page_size, ...]`` of each paged array, by names
    such as ``layers.3.k``. ``ids``: pages of each group. Values of 8 bits are multiplied by their
    scales, which are not among the arrays.
    """
    found: dict[str, tuple[int, np.ndarray]] = {}
    for number, place in enumerate(layout.layers):
        if place.of is not None:
            continue
        for name, index in place.arrays:
            if (pool := layout.pools[index]) is None or name.endswith(SCALE):
                continue
            group = next(one for one in place.groups if layout.groups[one].pool == pool)
            rows = np.asarray(ids[group], np.int32)
            values = jax.device_get(state[index][rows])
            if (scale := dict(place.arrays).get(name + SCALE)) is not None:
                scales = np.asarray(jax.device_get(state[scale][rows]))
                floats = np.asarray(values_of(values))  # a scale is of consecutive components
                by_scale = floats.reshape(*scales.shape, -1) * scales[..., None]
                values = by_scale.reshape(floats.shape).astype(jnp.bfloat16)
            found[f"layers.{number}.{name}"] = group, np.asarray(values)
    return found
