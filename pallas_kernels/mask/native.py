"""mask by the native library: a CPU's step waits for its masks, too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native.library import MASK, call, missing

SECONDS = 4.0  # that all rows of a step wait at most


def supports(*args: Any, **static: Any) -> str | None:
    """Why the native kernel cannot run, or None."""
    del args, static
    return missing()


def mask(
    logits: jax.Array,  # float32[B, V]
    finite: jax.Array,  # int32[B]
    wanted: jax.Array,  # int32[B]
    slots: jax.Array,  # int32[B]
    place: jax.Array,  # int32[3]
    *,
    num_slots: int,
) -> tuple[jax.Array, jax.Array]:  # float32[B, V], int32[B]
    """See ``mask.api``."""
    results = (
        jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        jax.ShapeDtypeStruct(finite.shape, jnp.int32),
    )
    return call(  # type: ignore[no-any-return]
        MASK,
        results,
        *(logits, finite, wanted, slots, place),
        num_slots=np.int64(num_slots),
        milliseconds=np.int64(1000 * SECONDS),
        input_output_aliases={0: 0},
    )
