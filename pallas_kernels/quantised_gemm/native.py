"""quantised_gemm by the native kernel: quantised weights, activations in 16 bits or in float32.

Each token's activations are rounded to 16 bits in blocks of 32 (16 where weights have groups of
16), with one float32 scale a block, and multiplied as two bytes; so a result differs from the
definition by some 2e-5 of its usual size (8 bits: 5e-3, which changed answers of small models).
Weights in fp8 are converted to float32 in registers and multiplied by activations in float32,
which are not rounded. A result depends on neither the other tokens of a call nor the number of
threads. Tokens of zeros, as those of padding, are left out: their results are zeros.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lib.quantised import Form, Quantised
from pallas_kernels.native.library import GEMM, call, missing
from pallas_kernels.quantised_gemm import ref
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs

BLOCK = 32  # inputs that share a scale of activations
LANES = 16  # outputs of a tile
PADDING = 8  # tokens are padded to whole tiles
FP8 = "fp8_lanes"
# as in kernel.h
KINDS = MappingProxyType({"int4_lanes": 0, "int8_lanes": 1, "fp4_lanes": 2, FP8: 4})


def supports(args: QuantisedGemmArgs) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    x, w = args.x, args.w
    if (reason := missing()) is not None:
        return reason
    if w.kind not in KINDS:
        return f"{w.kind} weights are not in lanes"
    if x.dtype != jnp.float32:
        return f"tokens are {x.dtype}, not float32"
    if w.num_inputs % BLOCK:
        return f"{w.num_inputs} inputs are not a multiple of {BLOCK}"
    if (misfit := misfit_of(w.form)) is not None:
        return misfit
    if args.swiglu and w.num_outputs % 32:
        return f"{w.num_outputs} outputs are not whole tiles of gates and ups"
    return None


def rounded(x: jax.Array, block: int) -> jax.Array:  # float32[T, K]
    """The tokens as the kernel rounds them: 16 bits, with a scale for each block of inputs."""
    blocks = jnp.asarray(x).reshape(len(x), -1, block)
    largest = jnp.abs(blocks).max(axis=2, keepdims=True)
    unit = jnp.float32(127 * 256)
    whole = jnp.rint(blocks * (unit / jnp.where(largest > 0, largest, unit)))
    whole += (whole % 256 == 128).astype(whole.dtype)  # its low byte would be -128
    return (whole * (largest / unit)).reshape(x.shape)


def definition(args: QuantisedGemmArgs) -> jax.Array:  # [T, O]; weights are by rows
    """The op's definition, of tokens that are rounded as the kernel rounds them."""
    if args.w.kind == "fp8":
        return ref.quantised_gemm(args)
    return ref.quantised_gemm(replace(args, x=rounded(args.x, block_of(args.w.group))))


def block_of(group: int) -> int:
    """The inputs of a token that share a scale, where ``group`` inputs of the weights do."""
    return BLOCK if group % BLOCK == 0 else BLOCK // 2


def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O]
    """See ``quantised_gemm.api``; the weights are in lanes."""
    x, w = args.x, args.w
    results = (
        jax.ShapeDtypeStruct((len(x), w.num_outputs // (1 + args.swiglu)), jnp.float32),
        jax.ShapeDtypeStruct((-(-len(x) // PADDING) * PADDING * record_bytes(w),), jnp.uint8),
    )
    kind = np.int64(KINDS[w.kind])
    out, _ = call(GEMM, results, x, *w.arrays, kind=kind, swiglu=args.swiglu)
    return out


def misfit_of(form: Form) -> str | None:
    """Why the kernel cannot multiply matrices of this form; None if it can, once in lanes."""
    if form.group is not None and form.group % BLOCK and form.group != BLOCK // 2:
        return f"groups of {form.group} inputs do not fit blocks of {BLOCK}"
    if form.block_outputs > 1 and form.block_outputs % LANES:
        return f"scales of {form.block_outputs} outputs are not those of whole tiles of {LANES}"
    if form.block_outputs > 1 and form.scale_dtype != "float32":
        return f"scales of blocks of outputs are {form.scale_dtype}, not float32"
    more = form.zeros or form.offsets or form.super_group is not None
    return "fp8 weights have more than scales" if more and form.kind in ("fp8", FP8) else None


def record_bytes(w: Quantised) -> int:
    """Bytes of one token's activations in the workspace: see ``native/src/kernel.h``."""
    block = block_of(w.group)
    values = 4 * w.num_inputs if w.kind == FP8 else w.num_inputs // block * (2 * block + 8)
    return values + w.num_inputs // w.group * 4
