"""Checks weights that replace those of a running engine, and puts them on its devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxinfer.core.errors import ArgumentError
from jaxinfer.models.arguments import checked_params
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import nested
from jaxinfer.nn.placement import Axes, Placement


def placed_params(model: Model, params: Any, placement: Placement) -> Params:
    """The parameters on the devices; arrays that are there already are not copied.

    Raises ``ArgumentError``, naming the parameter, if one is missing, unknown, of another shape or
    dtype, deleted, or not finite.
    """
    made = {
        path: _placed(path, leaf, model.arrays[path].axes, placement)
        for path, leaf in checked_params(params, model.arrays).items()
    }
    for path, array in made.items():
        if jnp.issubdtype(array.dtype, jnp.floating) and not _all_finite(array):
            raise ArgumentError(f"parameter {path} holds NaN or infinity; the old weights stay")
    return nested(made)


def _placed(path: str, leaf: Any, axes: Axes, placement: Placement) -> jax.Array:
    if isinstance(leaf, Tracer):
        raise ArgumentError(f"parameter {path} is traced; change weights outside of jax.jit")
    if not isinstance(leaf, jax.Array):
        return placement.put(np.array(leaf), axes)  # a copy: on a CPU JAX may keep numpy's memory
    if leaf.is_deleted():
        raise ArgumentError(
            f"parameter {path} has been deleted, as it was donated to a call; give a copy"
        )
    return jax.device_put(leaf, placement.sharding(axes))


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:  # bool[]
    wide = array.astype(jnp.float32) if array.dtype.itemsize == 1 else array
    return jnp.isfinite(wide).all()
