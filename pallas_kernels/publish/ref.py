"""The definition of publish, as far as XLA sees it."""

from __future__ import annotations

import jax


def publish(
    tokens: jax.Array,  # int32[B]
    place: jax.Array,  # int32[3]
) -> jax.Array:  # int32[B]
    """The tokens, written nowhere."""
    del place
    return tokens
