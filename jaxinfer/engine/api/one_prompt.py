"""The sizes of an engine for a single prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.core.config import DEFAULT_PAGE_SIZE

# Chunks of one prompt: the engine's smallest, and this one. Padding a short question to 256 tokens
# takes 1.5 s longer for a model of 1.5 B parameters on 2 cores; loading a second executable 0.06 s.
SINGLE_CHUNK = 256
SINGLE_CONTEXT = 4096  # tokens of prompt and answer, enough for nearly every single prompt
_SIZES = (
    *("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override", "num_pages"),
    *("block_size", "page_size"),
)


def settings_for_one(max_total_tokens: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's settings for one prompt, with those that the user did not set.

    One prompt needs a single sequence and chunks of two sizes: with fewer executables the first
    token comes sooner. The KV cache is small, and of one size, so that all such engines share
    executables. A request that may not fit gets the engine's defaults, up to the model's own
    context. ``max_total_tokens``: the most that prompt and answer may have.
    """
    chunk = settings.get("max_num_batched_tokens", SINGLE_CHUNK)
    sized = {"max_num_seqs": 1, "max_num_batched_tokens": chunk, **settings}
    if settings.keys().isdisjoint(_SIZES) and max_total_tokens <= SINGLE_CONTEXT:
        sized["num_pages"] = 1 + SINGLE_CONTEXT // DEFAULT_PAGE_SIZE
    return sized
