"""quantised_mlp as two calls of quantised_gemm: definitions, plain XLA, and its best kernels.

The arrays of the two matrices follow one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arrangements import of_either_order
from pallas_kernels.pins import Pins
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm import ref, xla
from pallas_kernels.quantised_gemm.api import quantised_gemm
from pallas_kernels.quantised_gemm.fp8 import tokens

ARRAYS = 5  # of a matrix


def reference(
    x: jax.Array,  # [T, D]
    *arrays: jax.Array | None,
    kinds: tuple[str, str],
    split: bool,
    pins: Pins,
) -> jax.Array:  # [T, D]
    """The definition."""
    del split, pins
    return _of(of_either_order(ref.quantised_gemm), x, arrays, kinds)


def reference_fp8(
    x: jax.Array,  # [T, D]
    *arrays: jax.Array | None,
    kinds: tuple[str, str],
    split: bool,
    pins: Pins,
) -> jax.Array:  # [T, D]
    """The definition where tokens and hidden values are quantised, too; these from float32."""
    del split, pins
    return _of(tokens.quantised_gemm, x.astype(jnp.float32), arrays, kinds).astype(x.dtype)


def plain_xla(
    x: jax.Array,  # [T, D]
    *arrays: jax.Array | None,
    kinds: tuple[str, str],
    split: bool,
    pins: Pins,
) -> jax.Array:  # [T, D]
    """Both matmuls in plain XLA; supports differentiation and vmap."""
    del split, pins
    return _of(of_either_order(xla.quantised_gemm), x, arrays, kinds)


def _of(
    gemm: Callable[..., jax.Array],
    x: jax.Array,  # [T, D]
    arrays: tuple[jax.Array | None, ...],
    kinds: tuple[str, str],
) -> jax.Array:  # [T, D]
    static = {"split": False, "wide": False}
    hidden = gemm(x, *arrays[:ARRAYS], kind=kinds[0], swiglu=True, **static)
    return gemm(hidden, *arrays[ARRAYS:], kind=kinds[1], swiglu=False, **static)


def unfused(
    x: jax.Array,  # [T, D]
    *arrays: Any,
    kinds: tuple[str, str],
    split: bool,
    pins: Pins,
) -> jax.Array:  # [T, D]; with split possibly float32[S, T, D]
    """Each matmul in the implementation that ``pins`` or ``registry.select`` chooses."""
    impl = pins.of("quantised_gemm")
    gate_up, down = Quantised(kinds[0], *arrays[:ARRAYS]), Quantised(kinds[1], *arrays[ARRAYS:])
    hidden = quantised_gemm(x, gate_up, swiglu=True, impl=impl)
    return quantised_gemm(hidden, down, split=split, impl=impl)
