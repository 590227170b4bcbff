"""Checks weights that replace those of a running engine, and puts them on its devices."""

from __future__ import annotations

from collections.abc import Mapping
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
    floats = {p: array for p, array in made.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    check_values(floats)
    return nested(made)


def check_alive(leaves: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError``, naming the parameter, if an array by path is traced or deleted."""
    for path, leaf in leaves.items():
        _check_alive(path, leaf)


def check_values(leaves: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError``, naming the parameter, if an array by path is traced, deleted, or not
    finite.
    """
    for path, leaf in leaves.items():
        _check_alive(path, leaf)
        if not _all_finite(leaf):
            raise ArgumentError(f"parameter {path} holds NaN or infinity; the old weights stay")


def _placed(path: str, leaf: Any, axes: Axes, placement: Placement) -> jax.Array:
    _check_alive(path, leaf)
    if not isinstance(leaf, jax.Array):
        return placement.put(np.array(leaf), axes)  # a copy: on a CPU JAX may keep numpy's memory
    return jax.device_put(leaf, placement.sharding(axes))


def _check_alive(path: str, leaf: Any) -> None:
    if isinstance(leaf, Tracer):
        raise ArgumentError(f"parameter {path} is traced; change weights outside of jax.jit")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ArgumentError(
            f"parameter {path} has been deleted, as it was donated to a call; give a copy"
        )


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:  # bool[]
    wide = array.astype(jnp.float32) if array.dtype.itemsize == 1 else array
    return jnp.isfinite(wide).all()
