"""Keys of pools of tokens, and the tokens to which those pools stand for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.nn.mixers.indexed_latent_spec import IndexerConfig
from jaxinfer.nn.mixers.pooled_latent import PooledLatentAttention
from jaxinfer.nn.mixers.pooled_latent_spec import PooledLatentConfig
from kit.tiny_models import tiny_model
from pallas_kernels.lib.page_scales import BITS


def config(pool: int) -> PooledLatentConfig:
    indexer = IndexerConfig(num_heads=2, head_dim=4, interleaved=False)
    sizes = {"num_heads": 2, "nope_dim": 4, "rope_dim": 0, "value_dim": 4, "rank": 8}
    return PooledLatentConfig(
        **sizes, query_rank=8, scale=0.5, rope=None, top_k=2 * pool, pool=pool, indexer=indexer
    )


@pytest.mark.parametrize("pool", [1, 3, 4])
def test_tokens_of_pools(pool: int) -> None:
    """Those of the chosen pools, and those behind the last complete pool; nothing else."""
    lens = np.arange(3 * pool + 2)
    chosen = [[i // pool - 1, -1] if i >= pool else [-1, -1] for i in lens]
    found = PooledLatentAttention(config(pool)).tokens_of(jnp.asarray(chosen), jnp.asarray(lens))
    assert found.shape == (len(lens), config(pool).most_tokens)
    for length, (own, _), row in zip(lens, chosen, np.asarray(found), strict=True):
        last = range(length - length % pool, length)
        whole = range(own * pool, own * pool + pool) if own >= 0 else ()
        assert sorted(at for at in row if at >= 0) == [*whole, *last]


def test_state_of_pools() -> None:
    """Two of four layers have an indexer: a key for four tokens, and an incomplete pool."""
    state = tiny_model("glm5_next")[0].state
    assert state.bytes_per_entry == (3 * 4 * 16, 2 * 4 * 16)
    assert [group.tokens_per_entry for group in state.groups] == [1, 4]
    assert [e.name for e, pool in zip(state.arrays, state.pools, strict=True) if pool is None] == [
        *("delta", "conv"),
        *["open_key"] * 2,
    ]
    assert [layer.follows for layer in state.layers] == [(), (), (("chosen", 1),), ()]


def test_pages_have_no_form_of_8_bits() -> None:
    assert tiny_model("glm5_next")[0].config.with_pages(BITS) is None
