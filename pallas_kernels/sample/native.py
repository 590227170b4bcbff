"""sample by the native library.

XLA computes the noise of every token and keeps several arrays as large as the logits: 36 MB in a
step of 32 rows of 49,152, which glibc maps anew for each call. To fill their pages with zeros took
16 of the step's 106 ms of CPU time (two cores of an AMD EPYC).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native.library import SAMPLE, call, missing
from pallas_kernels.sample.ref import SampleArgs


def supports(args: SampleArgs | None = None) -> str | None:
    """Why the native kernel cannot run, or None; it depends on no argument."""
    del args
    return missing()


def sample(args: SampleArgs) -> jax.Array:  # int32[B]
    """See ``sample.api``."""
    arrays = (args.logits, *args.filters, *args.noise, args.masks)
    return call(SAMPLE, jax.ShapeDtypeStruct(args.positions.shape, jnp.int32), *arrays)  # type: ignore[no-any-return]
