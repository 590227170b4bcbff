"""How a layer's queries meet keys and values: one protocol, two implementations.

Owns: ``Attend`` (the protocol a decoder layer calls), ``Rotary``, ``DenseCausal`` (no cache:
research and golden tests; differentiable) and ``PagedAttend`` (serving: append to pages, attend
over them).
Must not know: model families, the scheduler, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxinfer.nn.kv import LayerKV
from pallas_kernels.append_decode.api import append_decode
from pallas_kernels.kv_append.api import kv_append
from pallas_kernels.numerics import split_and_rotate, split_heads
from pallas_kernels.paged_prefill.api import paged_prefill
from pallas_kernels.pins import Pins
from pallas_kernels.qk_rope_append.api import qk_rope_append


class Rotary(NamedTuple):
    """What is done to queries and keys first: a norm over H where there is one, then rope."""

    cos: jax.Array  # float32[T, H / 2]
    sin: jax.Array  # float32[T, H / 2]
    qk_norms: jax.Array | None  # [2, H]: of queries, of keys
    eps: float  # static; of the norm

    def of(self, tokens: jax.Array | slice) -> Rotary:
        """That of some tokens."""
        return self._replace(cos=self.cos[tokens], sin=self.sin[tokens])


class Attend(Protocol):
    """Append this step's keys and values, attend, return the output and the layer's new KV.

    A pytree, for layers are jitted functions of it: its arrays are leaves, all else is static.

    ``qkv`` holds a token's heads: N of queries, K of keys, K of values. They come together, and
    their rotation with them, so that one kernel may do all that lies before attention.

    ``last`` names the last token of each row, where only these are to attend: in the last layer
    nobody reads what becomes of the others, whose keys and values are appended all the same.
    """

    def __call__(
        self,
        qkv: jax.Array,  # [T, N + 2K, H]
        kv: LayerKV | None,
        *,
        num_kv_heads: int,
        rotary: Rotary | None,
        scale: float,
        window: int | None,
        last: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, LayerKV | None]: ...  # [T, N, H], or with last [B, N, H]


class AttentionBatch(NamedTuple):
    """Where a step's tokens live. Rows [0, num_decodes) are one token each; prefill rows follow.

    Padding rows have ``seq_lens`` 0, padding tokens map to page 0, and padding entries of
    ``query_start_loc`` repeat the last real value.
    """

    slot_mapping: jax.Array  # int32[T]: page_id * page_size + offset of each token
    page_table: jax.Array  # int32[B, M]
    seq_lens: jax.Array  # int32[B]: context length, this step's tokens included
    query_start_loc: jax.Array  # int32[R + 1]: where each prefill row starts in the prefill part


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttend:
    """Attention over pages for one bucket; ``num_decodes`` and ``pins`` are static.

    ``arrivals``: see ``append_decode``; one array of zeros for all layers of a step.
    """

    batch: AttentionBatch
    num_decodes: int = field(metadata={"static": True})
    arrivals: jax.Ref | None = None  # int32[>= num_decodes * K]
    pins: Pins = field(default=Pins(), metadata={"static": True})

    def __call__(
        self,
        qkv: jax.Array,  # [T, N + 2K, H]
        kv: LayerKV | None,
        *,
        num_kv_heads: int,
        rotary: Rotary | None,
        scale: float,
        window: int | None,
        last: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, LayerKV]:
        """See ``Attend``."""
        assert kv is not None, "paged attention needs a KV state"
        batch, d, pinned = self.batch, self.num_decodes, self.pins.of
        if qkv.shape[0] == d:
            return self._decode(qkv, kv, rotary, scale=scale, window=window)
        # Both parts are appended before the prompts' is read: a write after a read makes XLA copy
        # pools. (``append_decode`` reads what it has written itself.)
        prompts, slots = qkv[d:], batch.slot_mapping[d:]
        if rotary is None:
            q, k, v = split_heads(prompts, num_kv_heads)
            kv = LayerKV(*kv_append(k, v, *kv, slots, impl=pinned("kv_append")))
        else:
            impl = pinned("qk_rope_append")
            turns = (rotary.cos[d:], rotary.sin[d:], rotary.qk_norms)
            q, *pools = qk_rope_append(prompts, *turns, *kv, slots, eps=rotary.eps, impl=impl)
            kv = LayerKV(*pools)
        if last is not None:  # a decode step of all rows; it appends their tokens once more
            rotary = None if rotary is None else rotary.of(last)
            return self._decode(qkv[last], kv, rotary, scale=scale, window=window)
        parts: list[jax.Array] = []
        if d:
            turn = None if rotary is None else rotary.of(slice(d))
            out, kv = self._decode(qkv[:d], kv, turn, scale=scale, window=window)
            parts.append(out)
        impl = pinned("paged_prefill")
        where = (batch.page_table[d:], batch.seq_lens[d:], batch.query_start_loc)
        parts.append(paged_prefill(q, *kv, *where, scale=scale, window=window, impl=impl))
        return jnp.concatenate(parts) if d else parts[0], kv

    def _decode(
        self,
        qkv: jax.Array,  # [rows, N + 2K, H]
        kv: LayerKV,
        rotary: Rotary | None,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[jax.Array, LayerKV]:  # [rows, N, H]
        """Append and attend, for one token of each of the first rows."""
        rows = qkv.shape[0]
        cos, sin, norms, eps = rotary or (None, None, None, 0.0)
        out, *pools = append_decode(
            qkv,
            cos,
            sin,
            norms,
            *kv,
            self.batch.page_table[:rows],
            self.batch.seq_lens[:rows],
            self.arrivals if rows == self.num_decodes else None,
            scale=scale,
            eps=eps,
            window=window,
            impl=self.pins.of("append_decode"),
        )
        return out, LayerKV(*pools)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseCausal:
    """Causal attention of one whole sequence over itself; no cache. Differentiates and vmaps."""

    def __call__(
        self,
        qkv: jax.Array,  # [T, N + 2K, H]
        kv: LayerKV | None,
        *,
        num_kv_heads: int,
        rotary: Rotary | None,
        scale: float,
        window: int | None,
        last: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, None]:
        """See ``Attend``; ``kv`` must be None."""
        assert kv is None, "dense attention keeps no KV state"
        if rotary is None:
            q, k, v = split_heads(qkv, num_kv_heads)
        else:
            q, k, v = split_and_rotate(qkv, *rotary[:3], num_kv_heads, rotary.eps)
        t, n, h = q.shape
        grouped = q.reshape(t, k.shape[1], n // k.shape[1], h)
        scores = jnp.einsum("TKGH,SKH->KGTS", grouped, k, preferred_element_type=jnp.float32)
        distance = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]  # [T, S]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        scores = jnp.where(visible, scores * scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("KGTS,SKH->TKGH", weights, v).reshape(t, n, h)
        return out if last is None else out[last], None
