"""sample by the native library.

XLA computes the noise of every token and keeps several arrays as large as the logits: 36 MB in a
step of 32 rows of 49,152, which glibc maps anew for each call. To fill their pages with zeros took
16 of the step's 106 ms of CPU time (two cores of an AMD EPYC).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.native.library import SAMPLE, call, missing


def supports(*args: Any) -> str | None:
    """Why the native kernel cannot run, or None."""
    del args
    return missing()


def sample(
    logits: jax.Array,  # float32[B, V]
    temperature: jax.Array,  # float32[B]
    top_k: jax.Array,  # int32[B]
    top_p: jax.Array,  # float32[B]
    min_p: jax.Array,  # float32[B]
    seed_low: jax.Array,  # int32[B]
    seed_high: jax.Array,  # int32[B]
    positions: jax.Array,  # int32[B]
    masks: jax.Array | None = None,  # uint32[B, W]
) -> jax.Array:  # int32[B]
    """See ``sample.api``."""
    arrays = (logits, temperature, top_k, top_p, min_p, seed_low, seed_high, positions, masks)
    return call(SAMPLE, jax.ShapeDtypeStruct(positions.shape, jnp.int32), *arrays)  # type: ignore[no-any-return]
