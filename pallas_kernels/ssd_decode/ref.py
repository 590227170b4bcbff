"""The definition of ssd_decode: one token of each row."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC
from pallas_kernels.ssd_prefill.ref import NO_LIMIT, num_groups, step, token_inputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SsdDecodeArgs:
    """The arguments of ``ssd_decode``; tokens and decays as in ``SsdPrefillArgs``.

    With a convolution, ``mixed`` is what comes before it. ``convs`` holds its last W inputs of a
    sequence: that of position p at p % W.
    """

    mixed: jax.Array  # [B, C]
    steps: jax.Array | None  # [B, H], before the bias and the softplus; None: all steps are 1
    # logarithms of the rates, biases of the steps, factors by which inputs are added to outputs
    decay: jax.Array  # float32[3, H]
    states: jax.Array  # float32[S, H, P, N]
    positions: jax.Array  # int32[B]: of the token; at 0 the state is zeros
    rows: jax.Array  # int32[B]: where the state of its sequence is, which is replaced
    # where it is stored besides, with all inputs of the convolution; the same row: nowhere
    keeps: jax.Array | None = None  # int32[B]
    conv: jax.Array | None = None  # [W, C]; the last tap is of the token itself
    conv_bias: jax.Array | None = None  # [C]
    convs: jax.Array | None = None  # [S, W, C]
    limits: tuple[float, float] = field(default=NO_LIMIT, metadata=STATIC)  # of the steps

    @property
    def num_groups(self) -> int:
        """G."""
        return num_groups(self.mixed, self.states)


def ssd_decode(
    args: SsdDecodeArgs,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [B, H, P]
    """The outputs of tokens, and with theirs the states and the inputs of convolutions."""
    mixed, convs = args.mixed, None
    if args.conv is not None:
        mixed, convs = _convolved(args)
    x, b, c, sizes = token_inputs(mixed, args.steps, args.decay, args.states, args.limits)
    rates, _, skip = np.asarray(args.decay, np.float64)
    states, out = np.asarray(args.states, np.float64).copy(), np.zeros(x.shape)
    for row, position in enumerate(np.asarray(args.positions)):
        own = args.rows[row]
        state = states[own] if position else np.zeros(states.shape[1:])
        states[own], out[row] = step(state, x[row], b[row], c[row], sizes[row], -np.exp(rates))
        out[row] += skip[:, None] * x[row]
        if args.keeps is not None:
            states[args.keeps[row]] = states[own]
    stored = None if args.convs is None else jnp.asarray(convs, args.convs.dtype)
    return jnp.asarray(out, args.mixed.dtype), jnp.asarray(states, args.states.dtype), stored


def _convolved(args: SsdDecodeArgs) -> tuple[np.ndarray, np.ndarray]:  # [B, C], [S, W, C]
    """SiLU of the convolution, and its inputs with those of the tokens."""
    given = (args.mixed, args.conv, args.convs)
    tokens, conv, convs = (np.asarray(x, np.float64).copy() for x in given)
    bias = 0.0 if args.conv_bias is None else np.asarray(args.conv_bias, np.float64)
    width, out = len(conv), np.zeros(tokens.shape)
    for row, position in enumerate(np.asarray(args.positions)):
        own = args.rows[row]
        convs[own, position % width] = tokens[row]
        inputs = {p: convs[own, p % width] for p in range(position - width + 1, position + 1)}
        taps = [x if p >= 0 else np.zeros_like(x) for p, x in inputs.items()]
        total = np.einsum("wc,wc->c", conv, np.stack(taps)) + bias
        out[row] = total / (1 + np.exp(-total))
        if args.keeps is not None:
            convs[args.keeps[row]] = convs[own]
    return out, convs
