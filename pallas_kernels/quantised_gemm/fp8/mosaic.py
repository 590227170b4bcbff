"""quantised_gemm of fp8 matrices in Pallas Mosaic GPU: quantise the tokens, then multiply.

Between two GEMMs tokens stay quantised (``mlp``): ``swiglu_quantised`` returns values and scales,
and ``gemm_of_quantised`` takes them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.norm_gemm.ref import NormGemmArgs
from pallas_kernels.quantised_gemm.fp8 import decode, prompt, quantise
from pallas_kernels.quantised_gemm.fp8.launch import (
    Fp8Sizes,
    decode_config,
    decodes,
    prompt_config,
    quantising_config,
    sizes_of,
)
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_mlp.ref import MlpArgs


@jax.jit  # one trace for all layers
def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``quantised_gemm.api`` and ``fp8.tokens``, which defines the result."""
    sizes, w = sizes_of(args), _with_float32(args.w)
    if decodes(sizes) and (config := decode_config(sizes)).quantises:
        return decode.launch_with(config, sizes, args.x, None, w.values, w.scales, args.bias)
    return gemm_of_quantised(*quantise.quantised_tokens(args.x), w, args.bias, sizes=sizes)


@jax.jit  # one trace for all layers
def norm_gemm(args: NormGemmArgs) -> tuple[jax.Array, jax.Array]:  # [T, K], [T, O]
    """See ``norm_gemm.api``; normed tokens are quantised as ``fp8.tokens`` defines it.

    The GEMM adds and normalises one token itself. Several are quantised by the norm's kernel.
    """
    gemm = args.gemm(args.norm.x)
    sizes, w = sizes_of(gemm), _with_float32(gemm.w)
    if sizes.tokens == 1:
        config = decode_config(sizes, quantises=True)
        return decode.launch_normed(config, sizes, args.norm, w, gemm.bias)
    total, *x = quantise.normed_tokens(args.norm)
    return total, gemm_of_quantised(*x, w, gemm.bias, sizes=sizes)


@jax.jit  # one trace for all layers
def mlp(args: MlpArgs) -> jax.Array:  # [T, D], or float32[S, T, D]
    """See ``quantised_mlp.api``; SwiGLU's results are quantised in the epilogue of its GEMM."""
    x = quantise.quantised_tokens(args.x)
    hidden = swiglu_quantised(*x, _with_float32(args.gate_up), sizes=sizes_of(args.first))
    sizes = sizes_of(args.second(hidden[0]))._replace(dtype=str(args.x.dtype))
    return gemm_of_quantised(*hidden, _with_float32(args.down), sizes=sizes)


def _with_float32(w: Quantised) -> Quantised:
    """The matrix with scales in float32."""
    return replace(w, scales=w.scales.astype(jnp.float32))


@partial(jax.jit, static_argnames="sizes")
def gemm_of_quantised(
    x: jax.Array,  # e4m3[T, K]
    x_scales: jax.Array,  # float32[K / 128, T or more]
    w: Quantised,
    bias: jax.Array | None = None,  # [O]
    *,
    sizes: Fp8Sizes,
) -> jax.Array:  # [T, O] in the dtype of ``sizes``, or float32[S, T, O]
    """``quantised_gemm`` of tokens that are quantised already."""
    arrays = (x, x_scales, w.values, w.scales, bias)
    if decodes(sizes):
        return decode.launch_with(decode_config(sizes, quantises=False), sizes, *arrays)
    return prompt.launch_with(prompt_config(sizes), sizes, *arrays)


@partial(jax.jit, static_argnames="sizes")
def swiglu_quantised(
    x: jax.Array,  # e4m3[T, K]
    x_scales: jax.Array,  # float32[K / 128, T or more]
    w: Quantised,  # of 2 * O outputs: gate, up; O is a multiple of 128
    *,
    sizes: Fp8Sizes,
) -> tuple[jax.Array, jax.Array]:  # e4m3[T, O], float32[O / 128, T or more]
    """The result of SwiGLU, quantised; for more than 64 tokens."""
    arrays = (x, x_scales, w.values, w.scales)
    return prompt.launch_with(quantising_config(sizes), sizes, *arrays, quantised=True)
