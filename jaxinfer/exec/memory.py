"""How many pages fit: the memory plan made before anything is loaded.

Owns: ``MemoryPlan`` and the arithmetic. Must not know: who uses the pages.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import jax

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.shapes import cdiv
from jaxinfer.models.base import Model, abstract_params

MIB = 1 << 20


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


def plan_memory(
    config: EngineConfig,
    model: Model,
    *,
    max_model_len: int,
    max_num_seqs: int,
    device_bytes: int | None,
) -> MemoryPlan:
    """Pages for this model: as many as asked for, else what fits; at most what all slots fill.

    ``device_bytes`` is the device's memory where it reports one (a GPU); ``None`` (a CPU) leaves
    the budget to ``kv_cache_memory_bytes``. Raises ``ConfigError`` when a context of
    ``config.max_model_len`` does not fit; a derived context may shrink to the pages instead.
    """
    params = jax.tree.leaves(abstract_params(model))
    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in params)
    page_bytes = config.page_size * model.kv_spec.bytes_per_token()
    pages_per_seq = cdiv(max_model_len, config.page_size)
    num_pages = 1 + max_num_seqs * pages_per_seq  # every slot with a full context
    if config.num_pages is not None:
        num_pages = min(num_pages, config.num_pages)
    else:
        num_pages = min(num_pages, _kv_budget(config, weight_bytes, device_bytes) // page_bytes)
    derived = config.max_model_len is None or config.num_pages is not None
    needed = 2 if derived else 1 + pages_per_seq
    if num_pages < needed:
        what = "one page" if derived else f"a context of {max_model_len} tokens"
        raise ConfigError(
            f"{what} needs {needed} pages of KV cache ({needed * page_bytes / MIB:.1f} MiB, the "
            f"padding page included) and there is room for {num_pages}; raise num_pages or "
            "kv_cache_memory_bytes (on a GPU: gpu_memory_utilization), or lower max_model_len"
        )
    return MemoryPlan(weight_bytes, page_bytes, num_pages)


def _kv_budget(config: EngineConfig, weight_bytes: int, device_bytes: int | None) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device_bytes is None:
        raise ConfigError("this device reports no memory size; set kv_cache_memory_bytes")
    return max(int(device_bytes * config.gpu_memory_utilization) - weight_bytes, 0)


def release_free_heap() -> None:
    """Give the C heap's free memory back to the system, where the C library can (glibc).

    Compiling or loading executables leaves about 100 MiB each free but mapped, restoring weights
    70 MiB; both would add to what comes next in the process's resident size.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def device_memory_bytes() -> int | None:
    """The first device's memory limit, or None where it reports none (a CPU)."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None
