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


def _in_turn(gemm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Both matmuls by ``gemm``, which takes the arguments of ``quantised_gemm.ref``."""

    def run(
        x: jax.Array,  # [T, D]
        *arrays: jax.Array | None,
        kinds: tuple[str, str],
        split: bool,
        pins: Pins,
    ) -> jax.Array:  # [T, D]
        del split, pins
        gate_up, down = _halves(arrays)
        static = {"split": False, "wide": False}
        hidden = gemm(x, *gate_up, kind=kinds[0], swiglu=True, **static)
        return gemm(hidden, *down, kind=kinds[1], swiglu=False, **static)

    return run


def _of_float32(gemm: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def run(x: jax.Array, *arrays: jax.Array | None, **static: Any) -> jax.Array:  # [T, D]
        return gemm(x.astype(jnp.float32), *arrays, **static).astype(x.dtype)

    return run


def _halves(arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    half = len(arrays) // 2
    return arrays[:half], arrays[half:]


# The definition.
reference = _in_turn(of_either_order(ref.quantised_gemm))
# The definition where tokens and hidden values are quantised, too; these from float32.
reference_fp8 = _of_float32(_in_turn(tokens.quantised_gemm))
# Both matmuls in plain XLA; supports differentiation and vmap.
plain_xla = _in_turn(of_either_order(xla.quantised_gemm))


def unfused(
    x: jax.Array,  # [T, D]
    *arrays: Any,
    kinds: tuple[str, str],
    split: bool,
    pins: Pins,
) -> jax.Array:  # [T, D]; with split possibly float32[S, T, D]
    """Each matmul in the implementation that ``pins`` or ``registry.select`` chooses."""
    impl = pins.of("quantised_gemm")
    gate_up, down = (Quantised(k, *part) for k, part in zip(kinds, _halves(arrays), strict=True))
    hidden = quantised_gemm(x, gate_up, swiglu=True, impl=impl)
    return quantised_gemm(hidden, down, split=split, impl=impl)
