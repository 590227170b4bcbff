"""The two GEMMs of experts in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from pallas_kernels.experts import decode, prompt
from pallas_kernels.experts.launch import GemmSizes, decode_config, prompt_config


@partial(jax.jit, static_argnames="sizes")  # one trace, one kernel for all layers
def gate_up(
    x: jax.Array,  # [T, D], or sorted rows: [N * width, D]
    expert: jax.Array,  # int32[N]
    rows: jax.Array,  # int32[N]
    used: jax.Array,  # int32[1]
    pairs: jax.Array,  # int32[N, width]
    w: jax.Array,  # [E, 2F, D]
    bias: jax.Array | None,  # [E, 2F]
    *,
    sizes: GemmSizes,
) -> jax.Array:  # [N * width, F]
    """The hidden values of the rows of all tiles; other rows hold anything."""
    arrays: Any = {"x": x, "expert": expert, "used": used, **_halved(w, bias, sizes)}
    if not sizes.few:
        return prompt.launch_with(prompt_config(sizes), sizes, arrays)
    arrays |= {"rows": rows, "pairs": pairs.reshape(-1)}
    return decode.launch_with(decode_config(sizes), sizes, arrays)


@partial(jax.jit, static_argnames="sizes")  # one trace, one kernel for all layers
def down(
    x: jax.Array,  # [N * width, F]
    expert: jax.Array,  # int32[N]
    rows: jax.Array,  # int32[N]
    used: jax.Array,  # int32[1]
    pairs: jax.Array,  # int32[N, width]
    place: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    w: jax.Array,  # [E, D, F]
    bias: jax.Array | None,  # [E, D]
    *,
    sizes: GemmSizes,
) -> jax.Array:  # [N * width, D], or of few tokens float32[k, T, D]
    """The outputs of the rows of all tiles; of few tokens the weighted outputs of each choice."""
    arrays: Any = {"x": x, "expert": expert, "used": used, **_halved(w, bias, sizes)}
    if not sizes.few:
        return prompt.launch_with(prompt_config(sizes), sizes, arrays)
    arrays |= {"rows": rows, "pairs": pairs.reshape(-1)}
    arrays |= {"place": place.reshape(-1), "weights": weights.reshape(-1)}
    return decode.launch_with(decode_config(sizes), sizes, arrays)


def _halved(w: jax.Array, bias: jax.Array | None, sizes: GemmSizes) -> dict[str, Any]:
    """Weights and biases with gates and ups apart."""
    outputs = (sizes.experts, sizes.halves, sizes.outer)
    return {
        "w": w.reshape(*outputs, sizes.inner),
        "bias": None if bias is None else bias.reshape(outputs),
    }
