"""Puts whole arrays of floats on the devices of a divided model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxinfer.core.errors import ArgumentError, EngineError
from jaxinfer.models.base import Model, Params
from jaxinfer.models.division import in_model_order, own_part
from jaxinfer.models.params import by_path, nested
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.placement import Placement


def placed_leaves(
    leaves: Mapping[str, Any], model: Model, placement: Placement
) -> dict[str, jax.Array]:
    """Whole arrays by path, numpy's or JAX's, as those of a model; each device gets its part.

    An array that is on the devices as it has to be is not copied. Raises ``ArgumentError`` for a
    part of a quantised matrix, which only a checkpoint can be divided into.
    """
    return {
        path: _placed(array, whole, model, placement)
        for (path, array), whole in zip(leaves.items(), wholes_of(leaves, model), strict=True)
    }


def whole_params(params: Params, model: Model) -> Params:
    """The parameters of a model as ``Model.whole`` has them; those of one device are not copied.

    Raises ``EngineError`` for a divided model with quantised matrices.
    """
    if model.devices == 1:
        return params
    leaves = by_path(params)
    try:
        wholes = wholes_of(leaves, model)
    except ArgumentError as error:
        raise EngineError(
            "the weights are quantised and divided among several devices, where they cannot be "
            "put together; load the model with jaxinfer.load"
        ) from error
    made = (
        in_model_order(array, whole, model.devices)
        for array, whole in zip(leaves.values(), wholes, strict=True)
    )
    return nested(dict(zip(leaves, made, strict=True)))


def wholes_of(paths: Iterable[str], model: Model) -> list[ArraySpec]:
    """The whole arrays of these paths; raises ``ArgumentError`` for quantised ones of a divided
    model.
    """
    whole, own = model.whole.arrays, model.arrays
    specs = (*model.param_specs, *model.whole.param_specs)
    quantised = {leaf for spec in specs if _is_quantised(spec) for leaf in spec.leaves}
    found: list[ArraySpec] = []
    for path in paths:
        if model.devices > 1 and path in quantised:
            raise ArgumentError(
                f"parameter {path} is quantised and divided among {model.devices} devices; give "
                "weights of floats, or a folder or other reference"
            )
        found.append(whole[path] if model.devices > 1 else own[path])
    return found


def _is_quantised(spec: Any) -> bool:
    return any(source.form is not None for source in spec.sources)


def _placed(array: Any, whole: ArraySpec, model: Model, placement: Placement) -> jax.Array:
    if model.devices == 1:
        return jax.device_put(array, placement.sharding(whole.axes))
    parts = (own_part(array, whole, model.devices, rank) for rank in placement.own_ranks)
    made = [jax.device_put(p, d) for p, d in zip(parts, placement.own_devices, strict=True)]
    return placement.of_parts(made, whole.axes)
