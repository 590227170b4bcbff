"""delta_decode by the native library, in float32 and in place.

XLA's version needs a branch that has both pools for rows that save their states, and goes through
each state several times: a layer of Qwen3.5-0.8B took 2.6 ms with one row and 13 with eight, and
takes 0.12 and 1.1 (two shared cores of an AMD EPYC, states in memory).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_decode.ref import DeltaDecodeArgs
from pallas_kernels.native.library import DELTA_DECODE, call, missing


def supports(args: DeltaDecodeArgs) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    if (reason := missing()) is not None:
        return reason
    for name in ("qkv", "gates", "z", "conv", "decay", "norm", "states", "convs"):
        if (dtype := getattr(args, name).dtype) != jnp.float32:
            return f"{name} is {dtype}, not float32"
    return None if args.beta_scale == 1 else f"betas are multiplied by {args.beta_scale}"


def delta_decode(args: DeltaDecodeArgs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``delta_decode.api``."""
    arrays = (args.qkv, args.gates, args.z, args.conv, args.decay, args.norm)
    pools = (args.states, args.convs)
    places = (args.positions, args.rows, args.rows if args.keeps is None else args.keeps)
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (args.z, *pools)]
    aliases = {6: 1, 7: 2}
    return tuple(
        call(
            DELTA_DECODE,
            results,
            *(*arrays, *pools, *places),
            eps=np.float32(args.eps),
            sigmoid=args.z_act == "sigmoid",
            input_output_aliases=aliases,
        )
    )
