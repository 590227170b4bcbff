"""Pools of pages for kinds of entries: how a model's layers share them, and how large each is."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from msgspec.structs import replace

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.step import Bucket, PageGroup
from jaxinfer.exec.compile.memory_plan import plan_memory
from jaxinfer.exec.compile.page_pools import TYPICAL_TOKENS, fewest_pages, most_pages, split_pages
from jaxinfer.exec.compile.program import Program
from jaxinfer.nn.state import Entry, LayerState, PagedKind, keys_and_values, state_layout
from kit.drive import make_limits
from kit.mixed_family import mixed_model

BF16 = jnp.dtype(jnp.bfloat16)
# Gemma 4's: full attention has wider heads than windows have
WIDE, NARROW = keys_and_values(1, 512, BF16), keys_and_values(1, 256, BF16, 1024)
GEMMA4 = (PageGroup(), PageGroup(1024, 1, 1))
LONG = {"page_size": 16, "max_model_len": 65_536, "max_num_seqs": 512, "buckets": ()}


def test_each_kind_of_entry_has_a_pool() -> None:
    layout = state_layout([*[NARROW] * 5, WIDE] * 2)
    assert layout.groups == GEMMA4
    assert layout.pools == (*[1] * 10, 0, 0) * 2  # K and V of each layer
    assert layout.bytes_per_entry == (2 * 2 * 512 * 2, 2 * 10 * 256 * 2)
    shapes = [array.shape for array in layout.abstract((7, 9), 16, 0)]
    assert shapes == ([(9, 16, 1, 256)] * 10 + [(7, 16, 1, 512)] * 2) * 2


def test_a_layer_has_several_kinds() -> None:
    latent = Entry("latent", (8,), BF16)
    summary = (Entry("summary", (3,), BF16), Entry("scale", (), jnp.dtype(jnp.float32)))
    layer = LayerState((PagedKind((latent,), 7), PagedKind(summary, tokens_per_entry=4)))
    layout = state_layout([layer, LayerState((PagedKind((latent,)),))])
    assert layout.groups == (PageGroup(None, 4, 0), PageGroup(None, 1, 1), PageGroup(7, 1, 1))
    assert [place.groups for place in layout.layers] == [(2, 0), (1,)]
    assert layout.layers[0].arrays == (("latent", 0), ("summary", 1), ("scale", 2))
    assert layout.layers[1].arrays == (("latent", 0),)  # the groups of a pool share its arrays
    assert layout.bytes_per_entry == (3 * 2 + 4, 8 * 2)
    assert layout.bytes_per_token == 3 + 16
    with pytest.raises(AssertionError, match="two entries of one name"):
        state_layout([LayerState((PagedKind((latent,), 7), PagedKind((latent,))))])


@pytest.mark.parametrize("groups", [(PageGroup(),), (PageGroup(), PageGroup(512), PageGroup(512))])
def test_a_single_pool_gets_all_pages(groups: tuple[PageGroup, ...]) -> None:
    limits = make_limits(groups=groups, num_pages=0, **LONG)
    (most,) = most_pages(limits)
    for count in (0, 1, 2, 65, 1000, 99_999, most):
        assert split_pages(limits, count) == (count,)
    assert split_pages(limits, most + 9) == (most,)
    assert fewest_pages(limits, [321]) == 321


@pytest.mark.parametrize("count", [300, 5000, 20_000, 100_000, 250_000])
@pytest.mark.parametrize("groups", [GEMMA4, (PageGroup(None, 4), PageGroup(128, 1, 1))])
def test_pools_hold_the_same_context(groups: tuple[PageGroup, ...], count: int) -> None:
    """As many sequences of the typical length fit in one pool as in the other, but for a page of
    the last one and a chunk.
    """
    limits = make_limits(groups=groups, num_pages=(0, 0), **LONG)
    sizes = split_pages(limits, count)
    assert sum(sizes) == min(count, sum(most_pages(limits)))
    fuller = split_pages(limits, count + 100)
    assert all(more >= size for more, size in zip(fuller, sizes, strict=True))
    if count in (5000, 20_000):
        each = limits.of_pools(
            min(limits.most_pages(group, prefills=False), -(-TYPICAL_TOKENS // tokens_per_page))
            for group in groups
            for tokens_per_page in [limits.tokens_per_page(group)]
        )
        full, windowed = (size / own for size, own in zip(sizes, each, strict=True))
        assert abs(full - windowed) < 1.5
    least = [1 + needed for needed in limits.pages_needed(limits.max_model_len)]
    fewest = fewest_pages(limits, least)
    assert all(a >= b for a, b in zip(split_pages(limits, fewest), least, strict=True))
    assert any(a < b for a, b in zip(split_pages(limits, fewest - 1), least, strict=True))


def test_the_plan_fills_the_memory_with_all_pools() -> None:
    model, _ = mixed_model("compressed", "latent", "full", "compressed")
    limits = make_limits(
        groups=model.state.groups,
        num_pages=(0,) * len(model.state.bytes_per_entry),
        max_num_seqs=8,
        max_model_len=512,
        buckets=(Bucket(8), Bucket(8, 16, 4, scores=True)),
    )
    assert len(limits.num_pages) == 3
    config = EngineConfig(kv_cache_memory_bytes=200_000, max_model_len=512)
    plan = plan_memory(config, Program(model, limits), None)
    assert 200_000 - max(plan.page_bytes) < plan.kv_bytes <= 200_000
    planned = replace(limits, num_pages=plan.num_pages)
    assert planned.full_pool(512) is None
    state = Program(model, planned).state()
    assert sum(array.size * array.dtype.itemsize for array in state) == plan.kv_bytes
    # a bundle keeps the sum
    again = EngineConfig(num_pages=sum(plan.num_pages), max_model_len=512)
    assert plan_memory(again, Program(model, limits), None).num_pages == plan.num_pages
