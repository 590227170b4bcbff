"""sample: one token of each row, greedy or drawn under temperature, top_k, min_p and top_p.

A sampled token is the Gumbel maximum over the row's logits, with noise that is a function of (seed,
position, token id). Other rows can therefore change it only through the rounding of its logits, and
only if two candidates are within that rounding of each other: about 1e-6 per token. (Inverting one
uniform number over a cumulative sum would be cheaper, but there a rounding error moves all
boundaries: about 1e-3 per token over 50,000 entries.)
"""

from __future__ import annotations

from dataclasses import fields

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.sample import cases, launch, native, ref, xla
from pallas_kernels.sample.ref import SampleArgs

_triton = imported_when_called("pallas_kernels.sample.triton", "sample")

OP = KernelOp(
    name="sample",
    ref=ref.sample,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("native", native.sample, platforms=("cpu",), supports=native.supports),
        Impl("xla", xla.sample),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"int32": 0.0},
    feeds=((7, 0),),
)


def sample(args: SampleArgs, impl: str | None = None) -> jax.Array:  # int32[B]
    """The next token of each row, an id in [0, V) for any logits, NaN included.

    A row of temperature 0 takes the first of its largest logits; its other parameters may be junk.
    For any other row the logits are divided by the temperature and three filters are applied in
    this order: logits below the ``top_k``-th largest are dropped (0 or less: none), then tokens
    less likely than ``min_p`` times the most likely one, then all but the smallest set of the most
    likely remaining tokens that has ``top_p`` of their probability (1: none). Entries equal to a
    threshold are kept. The token is the Gumbel maximum of the rest: the first of the largest sums
    of logit and noise, where noise is a function of (seed, position, token id). A logit of -inf is
    drawn only if all are -inf, and so is that of a token t for which bit t % 32 of word t // 32 of
    the row's mask is 0.

    Two implementations may differ by the rounding of a sum of probabilities and of a logarithm,
    about 1e-6 each: in whether the token at the edge of top_p's set belongs to it, and in which of
    two sums that close is larger. A row's token does not depend on the other rows.
    ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.

    top_k: Fan et al., 2018 (arXiv:1805.04833); top_p: Holtzman et al., 2020 (arXiv:1904.09751);
    min_p: Nguyen et al., 2024 (arXiv:2407.01082); the Gumbel maximum: Maddison et al., 2014
    (arXiv:1411.0030).
    """
    logits, masks = args.logits, args.masks
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"sample: logits are {logits.dtype}{logits.shape}, not float32[B, V]")
    for field in fields(args):
        if field.name in ("logits", "masks"):
            continue
        if (shape := getattr(args, field.name).shape) != logits.shape[:1]:
            raise ValueError(f"sample: {field.name} {shape} does not fit logits {logits.shape}")
    if masks is not None and (len(masks) != len(logits) or 32 * masks.shape[1] < logits.shape[1]):
        raise ValueError(f"sample: masks {masks.shape} do not fit logits {logits.shape}")
    return dispatch(OP, (args,), {}, impl)
