"""quantised_gemm of fp8 matrices in Pallas Mosaic GPU: quantise the tokens, then multiply."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.quantised_gemm.fp8 import decode, prompt
from pallas_kernels.quantised_gemm.fp8.launch import (
    decode_config,
    decodes,
    prompt_config,
    sizes_of,
)
from pallas_kernels.quantised_gemm.fp8.quantise import quantised_tokens


@partial(jax.jit, static_argnames=("kind", "swiglu", "split"))  # one trace for all layers
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
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``quantised_gemm.api`` and ``fp8.tokens``, which defines the result."""
    del zeros, offsets, supers, kind
    sizes = sizes_of(x, values, scales, swiglu=swiglu, split=split)
    if decodes(sizes):
        config = decode_config(sizes)
        tokens = (x, None) if config.quantises else quantised_tokens(x)
        return decode.launch_with(config, sizes, *tokens, values, scales)
    return prompt.launch_with(prompt_config(sizes), sizes, *quantised_tokens(x), values, scales)
