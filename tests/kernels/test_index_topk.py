"""Keys that a context repeats have equal scores, and the first ones are chosen."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_topk.api import IndexTopkArgs, index_topk

PERIOD, PAGE, CONTEXT = 25, 4, 260


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_repeated_keys_are_chosen_in_their_order(tokens: int) -> None:
    """A score has the same bits at each position, whatever the other tokens, rows and lengths."""
    rng = np.random.default_rng(tokens)
    keys = rng.standard_normal((3, PERIOD, 12), np.float32)
    table = 1 + rng.permutation(3 * CONTEXT // PAGE).reshape(3, -1)
    pages = np.full((1 + table.size, PAGE, 12), np.nan, np.float32)
    for row, position in np.ndindex(3, CONTEXT):
        pages[table[row, position // PAGE], position % PAGE] = keys[row, position % PERIOD]
    args = IndexTopkArgs(
        q=jnp.asarray(rng.standard_normal((tokens, 4, 12), np.float32)),
        weights=jnp.asarray(rng.standard_normal((tokens, 4), np.float32)),
        pages=jnp.asarray(pages),
        page_table=jnp.asarray(table, jnp.int32),
        rows=jnp.asarray(rng.integers(0, 3, tokens), jnp.int32),
        lens=jnp.asarray(rng.integers(8, CONTEXT, tokens), jnp.int32),
        top_k=8,
    )
    for chosen in np.asarray(index_topk(args)):
        for key in {*(chosen % PERIOD)}:
            repeats = np.sort(chosen[chosen % PERIOD == key])
            np.testing.assert_array_equal(repeats, key + PERIOD * np.arange(len(repeats)))
