"""The definition of short_conv: each token of a row in turn, with the inputs before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ShortConvArgs:
    """The arguments of ``short_conv``.

    ``kept`` has the last W inputs of a sequence: that of position p is at place p % W. So a decode
    row replaces one place, and kernels of several heads need no order among them.
    """

    x: jax.Array  # [T, at least C]: the inputs, of which the first C channels are taken
    weights: jax.Array  # [W, C]; the last tap is of the token itself
    kept: jax.Array  # [P, W, C]
    query_start_loc: jax.Array  # int32[R + 1]
    begins: jax.Array  # int32[R]: the position of each row's first token; 0: a new sequence
    reads: jax.Array  # int32[R]: where the inputs before that token are
    writes: jax.Array  # int32[R]: where those up to the last token go
    # where inputs are stored besides: those up to so many tokens of the row; 0 is none
    save_tokens: jax.Array | None = None  # int32[R, N]
    save_rows: jax.Array | None = None  # int32[R, N]
    bias: jax.Array | None = None  # [C]
    silu: bool = field(default=True, metadata=STATIC)  # False: the sum itself is the output


def short_conv(args: ShortConvArgs) -> tuple[jax.Array, jax.Array]:  # [T, C], [P, W, C]
    """Tokens of no row yield zeros, and a row without tokens stores nothing.

    Inputs before a sequence's first token are zeros, in ``kept`` too.
    """
    x, weights, before = (np.asarray(a, np.float64) for a in (args.x, args.weights, args.kept))
    width, channels = weights.shape
    x, kept, out = x[:, :channels], before.copy(), np.zeros((len(x), channels))
    starts, bias = np.asarray(args.query_start_loc), np.zeros(channels)
    if args.bias is not None:
        bias = np.asarray(args.bias, np.float64)
    for row in np.flatnonzero(np.diff(starts)).tolist():
        begin = int(args.begins[row])
        inputs = {p: np.zeros(channels) for p in range(begin - width, 0)}  # by position
        for position in range(max(begin - width + 1, 0), begin):
            inputs[position] = before[args.reads[row], position % width]
        for token in range(starts[row], starts[row + 1]):
            position = begin + token - starts[row]
            inputs[position] = x[token]
            taps = [inputs[p] for p in range(position - width + 1, position + 1)]
            total = np.einsum("wc,wc->c", weights, np.stack(taps)) + bias
            out[token] = total / (1 + np.exp(-total)) if args.silu else total
        for count, to in _stores(args, row, starts[row + 1] - starts[row]):
            for position in range(begin + count - width, begin + count):
                kept[to, position % width] = inputs[position]
    return jnp.asarray(out, args.x.dtype), jnp.asarray(kept, args.kept.dtype)


def _stores(args: ShortConvArgs, row: int, num_tokens: int) -> list[tuple[int, int]]:
    """After how many tokens of a row inputs are stored, and where."""
    stores = [(num_tokens, int(args.writes[row]))]
    if args.save_tokens is not None and args.save_rows is not None:
        pairs = zip(args.save_tokens[row], args.save_rows[row], strict=True)
        stores += [(int(count), int(to)) for count, to in pairs if count]
    return stores
