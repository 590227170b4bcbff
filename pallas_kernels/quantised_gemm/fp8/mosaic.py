"""quantised_gemm of fp8 matrices in Pallas Mosaic GPU: quantise the tokens, then multiply.

Between two GEMMs tokens stay quantised (``mlp``): ``swiglu_quantised`` returns values and scales,
and ``gemm_of_quantised`` takes them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantised_gemm.fp8 import decode, prompt, quantise
from pallas_kernels.quantised_gemm.fp8.launch import (
    decode_config,
    decodes,
    prompt_config,
    quantising_config,
    sizes_of,
)
from pallas_kernels.residual_norm.token import Norm


@partial(jax.jit, static_argnames=("kind", "swiglu", "split", "wide"))  # one trace for all layers
def quantised_gemm(
    x: jax.Array,  # [T, K]
    values: jax.Array,  # e4m3[O, K]; with swiglu [2 * O, K]: gate, up
    scales: jax.Array,  # float32[O, 1], or [O / 128, K / 128]
    zeros: None,
    offsets: None,
    supers: None,
    *,
    kind: str,
    swiglu: bool,
    split: bool,
    wide: bool = False,
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``quantised_gemm.api`` and ``fp8.tokens``, which defines the result."""
    del zeros, offsets, supers, kind, wide
    scales = scales.astype(jnp.float32)
    sizes = sizes_of(x, values, scales, swiglu=swiglu, split=split)
    if decodes(sizes) and (config := decode_config(sizes)).quantises:
        return decode.launch_with(config, sizes, x, None, values, scales)
    x8, x_scales = quantise.quantised_tokens(x)
    static = {"swiglu": swiglu, "split": split, "dtype": str(x.dtype)}
    return gemm_of_quantised(x8, x_scales, values, scales, **static)


@partial(jax.jit, static_argnames=("row", "eps", "kind", "swiglu"))  # one trace for all layers
def norm_gemm(
    x: jax.Array,  # [1, K]
    partials: jax.Array,  # [1, K] in x's dtype, or float32[S, 1, K]
    norms: jax.Array,  # [W, K]
    values: jax.Array,  # e4m3[O, K]; with swiglu [2 * O, K]: gate, up
    scales: jax.Array,  # float32[O, 1], or [O / 128, K / 128]
    zeros: None,
    offsets: None,
    supers: None,
    *,
    row: int,
    eps: float,
    kind: str,
    swiglu: bool,
) -> tuple[jax.Array, jax.Array]:  # [1, K], [1, O]
    """See ``norm_gemm.api``; the normed token is quantised as ``fp8.tokens`` defines it."""
    del zeros, offsets, supers, kind
    scales = scales.astype(jnp.float32)
    sizes = sizes_of(x, values, scales, swiglu=swiglu, split=False)
    config, norm = decode_config(sizes, quantises=True), Norm(row, eps)
    return decode.launch_normed(config, sizes, norm, x, partials, norms, values, scales)


@partial(jax.jit, static_argnames=("kinds", "split"))  # one trace for all layers
def mlp(
    x: jax.Array,  # [T, D]
    *arrays: jax.Array | None,  # values, scales and None three times, of gate and up, and of down
    kinds: tuple[str, str],
    split: bool,
) -> jax.Array:  # [T, D], or float32[S, T, D]
    """See ``quantised_mlp.api``; SwiGLU's results are quantised in the epilogue of its GEMM."""
    del kinds
    gate_up, down = (arrays[i : i + 2] for i in (0, len(arrays) // 2))
    values, scales = quantise.quantised_tokens(x)
    values, scales = swiglu_quantised(values, scales, *_floats(*gate_up))
    static: Any = {"swiglu": False, "split": split, "dtype": str(x.dtype)}
    return gemm_of_quantised(values, scales, *_floats(*down), **static)


def _floats(values: Any, scales: Any) -> tuple[jax.Array, jax.Array]:
    return values, scales.astype(jnp.float32)


@partial(jax.jit, static_argnames=("swiglu", "split", "dtype"))
def gemm_of_quantised(
    x: jax.Array,  # e4m3[T, K]
    x_scales: jax.Array,  # float32[K / 128, T or more]
    values: jax.Array,  # e4m3[O, K]; with swiglu [2 * O, K]: gate, up
    scales: jax.Array,  # float32[O, 1], or [O / 128, K / 128]
    *,
    swiglu: bool,
    split: bool,
    dtype: str,
) -> jax.Array:  # [T, O] in dtype, or float32[S, T, O]
    """``quantised_gemm`` of tokens that are quantised already; the result is in ``dtype``."""
    sizes = sizes_of(x, values, scales, swiglu=swiglu, split=split)._replace(dtype=dtype)
    if decodes(sizes):
        config = decode_config(sizes, quantises=False)
        return decode.launch_with(config, sizes, x, x_scales, values, scales)
    return prompt.launch_with(prompt_config(sizes), sizes, x, x_scales, values, scales)


@jax.jit
def swiglu_quantised(
    x: jax.Array,  # e4m3[T, K]
    x_scales: jax.Array,  # float32[K / 128, T or more]
    values: jax.Array,  # e4m3[2 * O, K]: gate, up; O is a multiple of 128
    scales: jax.Array,  # float32[2 * O, 1], or [2 * O / 128, K / 128]
) -> tuple[jax.Array, jax.Array]:  # e4m3[T, O], float32[O / 128, T or more]
    """The result of SwiGLU, quantised; for more than 64 tokens."""
    sizes = sizes_of(x, values, scales, swiglu=True, split=False)
    config = quantising_config(sizes)
    return prompt.launch_with(config, sizes, x, x_scales, values, scales, quantised=True)
