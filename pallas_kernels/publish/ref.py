"""The definition of publish, without its writes to host memory."""

from __future__ import annotations

import jax


def publish(
    tokens: jax.Array,  # int32[B]
    place: jax.Array,  # int32[3]
) -> jax.Array:  # int32[B]
    """See ``publish.api``; writes nothing."""
    del place
    return tokens
