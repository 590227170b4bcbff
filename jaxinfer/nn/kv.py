"""KV state as a spec, not a tensor: what each layer keeps per token, and the pool that holds it.

Owns: ``LayerKVSpec``, ``KVSpec`` (static facts a model states), ``LayerKV``, ``KVState`` (arrays).
Must not know: who owns which page (the scheduler) or how attention reads it (``pallas_kernels``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class LayerKVSpec:
    """What one layer of full attention keeps per token: K and V of ``num_kv_heads`` heads.

    ``window`` is how far back the layer looks, in tokens (None: everything). Pages outside the
    window are masked, not yet returned.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """The KV layout of a model: one entry per layer, and the dtype of the pages."""

    layers: tuple[LayerKVSpec, ...]
    dtype: jnp.dtype

    def bytes_per_token(self) -> int:
        """Bytes that one token of context takes over all layers."""
        item = jnp.dtype(self.dtype).itemsize
        return sum(2 * layer.num_kv_heads * layer.head_dim * item for layer in self.layers)


class LayerKV(NamedTuple):
    """One layer's pages."""

    k_pages: jax.Array  # [P, page_size, K, H]
    v_pages: jax.Array  # [P, page_size, K, H]


type KVState = tuple[LayerKV, ...]  # one entry per layer; separate arrays, donated every step


def abstract_kv_state(spec: KVSpec, num_pages: int, page_size: int) -> KVState:
    """Shapes and dtypes of the pool, without memory."""

    def pages(layer: LayerKVSpec) -> Any:  # a ShapeDtypeStruct in an array's place
        shape = (num_pages, page_size, layer.num_kv_heads, layer.head_dim)
        return jax.ShapeDtypeStruct(shape, spec.dtype)

    return tuple(LayerKV(pages(layer), pages(layer)) for layer in spec.layers)


def init_kv_state(spec: KVSpec, num_pages: int, page_size: int) -> KVState:
    """A zeroed pool; a page read before it is written therefore never holds NaN."""
    abstract = abstract_kv_state(spec, num_pages, page_size)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)
