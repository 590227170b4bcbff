"""mask by the native library: a CPU's step waits for its masks, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mask.ref import MaskArgs
from pallas_kernels.native.library import MASK, call, missing

SECONDS = 4.0  # that all rows of a step wait at most


def supports(args: MaskArgs | None = None) -> str | None:
    """Why the native kernel cannot run, or None; it depends on no argument."""
    del args
    return missing()


def mask(args: MaskArgs) -> tuple[jax.Array, jax.Array]:  # float32[B, V], int32[B]
    """See ``mask.api``."""
    results = (
        jax.ShapeDtypeStruct(args.logits.shape, jnp.float32),
        jax.ShapeDtypeStruct(args.finite.shape, jnp.int32),
    )
    return call(  # type: ignore[no-any-return]
        MASK,
        results,
        *(args.logits, args.finite, args.wanted, args.slots, args.place),
        num_slots=np.int64(args.num_slots),
        milliseconds=np.int64(1000 * SECONDS),
        input_output_aliases={0: 0},
    )
