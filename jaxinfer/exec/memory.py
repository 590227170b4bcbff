"""How many pages fit: the memory plan made before anything is loaded.

Owns: ``MemoryPlan`` and the arithmetic. Must not know: who uses the pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.shapes import cdiv
from jaxinfer.models.base import Model, Params

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights and KV pages, and the pages that come of it (the padding page included)."""

    weight_bytes: int
    page_bytes: int
    num_pages: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes


def tree_bytes(tree: Params) -> int:
    """Bytes of all arrays (or shapes) in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def plan_memory(
    config: EngineConfig,
    model: Model,
    params: Params,
    *,
    max_model_len: int,
    max_num_seqs: int,
    device_bytes: int | None,
) -> MemoryPlan:
    """Pages for this model: as many as asked for, else what fits, never more than can be used.

    ``device_bytes`` is the device's memory where it reports one (a GPU); ``None`` (a CPU) leaves
    the budget to ``kv_cache_memory_bytes``. Raises ``ConfigError`` when one full context does not
    fit.
    """
    weight_bytes = tree_bytes(params)
    page_bytes = config.page_size * model.kv_spec.bytes_per_token()
    pages_per_seq = cdiv(max_model_len, config.page_size)
    useful = 1 + max_num_seqs * pages_per_seq
    num_pages = config.num_pages
    if num_pages is None:
        budget = config.kv_cache_memory_bytes
        if budget is None:
            if device_bytes is None:
                raise ConfigError("kv_cache_memory_bytes is needed on a device without a limit")
            budget = int(device_bytes * config.gpu_memory_utilization) - weight_bytes
        num_pages = min(useful, max(budget, 0) // page_bytes)
        if num_pages < 1 + pages_per_seq:
            raise ConfigError(
                f"max_model_len {max_model_len} needs {(1 + pages_per_seq) * page_bytes / GIB:.2f} "
                f"GiB of KV cache and {max(budget, 0) / GIB:.2f} GiB are available; "
                f"lower max_model_len to {max(num_pages - 1, 0) * config.page_size} "
                "or raise kv_cache_memory_bytes"
            )
    return MemoryPlan(weight_bytes, page_bytes, num_pages)


def device_memory_bytes() -> int | None:
    """The first device's memory limit, or None where it reports none (a CPU)."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None
