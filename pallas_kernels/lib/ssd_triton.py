"""Parts that the Triton kernels of Mamba-2's state space share: steps, and decays near 1."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_sizes(steps, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """The softplus of float32, within limits.

    A GPU's logarithm has an error of 1e-7 near 1, which is 1e-4 of a step of 1e-3. So the logarithm
    of 1 + e is the series 2 (z + z^3 / 3 + ...) of z = e / (2 + e), which is at most 1 / 3.
    """
    e = tl.exp(-tl.abs(steps))
    z = e / (2.0 + e)
    square = z * z
    series = 1 / 13 + square * 0.0
    for divisor in tl.static_range(11, 0, -2):  # type: ignore[attr-defined]
        series = series * square + 1.0 / divisor
    sizes = tl.maximum(steps, 0.0) + 2.0 * z * series
    return tl.minimum(tl.maximum(sizes, LOWEST), HIGHEST)


@triton.jit
def lost_of(exponent):
    """exp(x) - 1 of x <= 0, without the loss of digits near 0: there its Taylor series."""
    series = exponent * 0.0 + 1.0
    for divisor in tl.static_range(9, 1, -1):  # type: ignore[attr-defined]
        series = 1.0 + exponent * series * (1.0 / divisor)
    return tl.where(exponent > -0.5, exponent * series, tl.exp(exponent) - 1.0)
