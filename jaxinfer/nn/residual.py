"""The plain residual stream: blocks read the stream itself, and their outputs are added to it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxinfer.nn.linear import Stream

# The stream after a block, of the tokens of the block's output: of its input [T, D], and of its
# output [T, D], which may be split-K partials float32[S, T, D].
type Add = Callable[[jax.Array, jax.Array], Stream]


class Plain:
    """One stream. A block's output is not added before the next norm: see ``Stream``.

    The module of another ``ResidualSpec`` has the same methods. ``begin`` and ``end`` are called
    for the decoder, ``read`` for each block. In between the stream is [T, n * D].
    """

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The stream that embeddings begin."""
        return Stream(x)

    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """The input [T, D] of a block, and how its output is added: that of all tokens, or ``only``
        of these.
        """
        del only  # the block returns its input with the output of the last block added
        return stream, Stream

    def end(self, stream: Stream) -> Stream:
        """The input [T, D] of the final norm."""
        return stream
