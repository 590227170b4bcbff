"""The two GEMMs of experts in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x)."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.experts import decode, decode_quantised, prompt, prompt_quantised
from pallas_kernels.experts.items import Gmem
from pallas_kernels.experts.launch import (
    GemmSizes,
    decode_config,
    prompt_config,
    quantised_decode_config,
    quantised_prompt_config,
)
from pallas_kernels.experts.stack import Stack
from pallas_kernels.lib.quantised import Quantised


@partial(jax.jit, static_argnames="sizes")  # one trace, one kernel for all layers
def gate_up(
    x: jax.Array,  # [T, D], or sorted rows: [N * width, D]
    expert: jax.Array,  # int32[N]
    rows: jax.Array,  # int32[N]
    used: jax.Array,  # int32[1]
    pairs: jax.Array,  # int32[N, width]
    bias: jax.Array | None,  # [E, 2F]
    stack: Stack,  # [E, 2F, D]
    *,
    sizes: GemmSizes,
) -> jax.Array:  # [N * width, F]
    """The hidden values of the rows of all tiles; other rows hold anything."""
    gmem = Gmem(None, x, expert, used)
    if sizes.few:
        gmem = gmem._replace(rows=rows, pairs=pairs.reshape(-1))
    return _launched(gmem, bias, stack, sizes)


@partial(jax.jit, static_argnames="sizes")  # one trace, one kernel for all layers
def down(
    x: jax.Array,  # [N * width, F]
    expert: jax.Array,  # int32[N]
    rows: jax.Array,  # int32[N]
    used: jax.Array,  # int32[1]
    pairs: jax.Array,  # int32[N, width]
    place: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    bias: jax.Array | None,  # [E, D]
    stack: Stack,  # [E, D, F]
    *,
    sizes: GemmSizes,
) -> jax.Array:  # [N * width, D], or of few tokens float32[k, T, D]
    """The outputs of the rows of all tiles; of few tokens the weighted outputs of each choice."""
    gmem = Gmem(None, x, expert, used)
    if sizes.few:
        gmem = gmem._replace(rows=rows, pairs=pairs.reshape(-1))
        gmem = gmem._replace(place=place.reshape(-1), weights=weights.reshape(-1))
    return _launched(gmem, bias, stack, sizes)


def _launched(
    gmem: Gmem,
    bias: jax.Array | None,  # [E, halves * O]
    stack: Stack,
    sizes: GemmSizes,
) -> jax.Array:
    """The kernel for the number of tokens and the form of the weights."""
    outputs = (sizes.experts, sizes.halves, sizes.outer)
    if bias is not None:
        gmem = gmem._replace(bias=bias.reshape(outputs))
    if isinstance(stack, Quantised):
        if sizes.few:
            config = quantised_decode_config(sizes)
            assert config is not None  # checked before the call was chosen
            return decode_quantised.launch_with(config, sizes, gmem, stack)
        return prompt_quantised.launch_with(quantised_prompt_config(sizes), sizes, gmem, stack)
    gmem = gmem._replace(w=stack.reshape(*outputs, sizes.inner))
    if sizes.few:
        return decode.launch_with(decode_config(sizes), sizes, gmem)
    return prompt.launch_with(prompt_config(sizes), sizes, gmem)
