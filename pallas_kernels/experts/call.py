"""The call of a persistent kernel of experts: compute warpgroups and a memory warpgroup a CTA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.gemm.pipeline import launch


def call_kernel(
    kernel: Callable[..., None],  # of a ``gmem``, its scratch, and refs to the weights
    gmem: Any,  # a NamedTuple of refs; its field ``out`` is the result
    arrays: Mapping[str, jax.Array | None],  # the other fields by name; a None is no argument
    weights: Sequence[jax.Array] = (),
    *,
    out_type: jax.ShapeDtypeStruct,
    scratch_types: Any,
    ctas: int,
    warpgroups: int,  # that compute
    name: str,
) -> jax.Array:
    """Launch ``kernel`` on arrays in global memory; returns the array ``out``."""
    present = {field: array for field, array in arrays.items() if array is not None}

    def body(*refs: Any) -> None:
        *inputs, out, scratch = refs
        named = dict(zip(present, inputs[len(weights) :], strict=True))
        fields = {**dict.fromkeys(gmem._fields), **named, "out": out}
        kernel(gmem(**fields), scratch, *inputs[: len(weights)])

    return launch(
        name,
        body,
        (*weights, *present.values()),
        out_type=out_type,
        scratch=scratch_types,
        grid={"cta": ctas},
        warpgroups=warpgroups + 1,
    )
