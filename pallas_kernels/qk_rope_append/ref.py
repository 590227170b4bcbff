"""The definition of qk_rope_append: head by head, rotated by multiplying complex numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import STATIC
from pallas_kernels.kv_append.ref import KvAppendArgs, kv_append
from pallas_kernels.lib.numerics import Values, heads_of_new_token, with_values


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RopeAppendArgs:
    """The arguments of ``qk_rope_append``."""

    qkv: jax.Array  # [T, N + 2K, H]; with values "keys" [T, N + K, H]
    cos: jax.Array  # float32[T, H / 2]
    sin: jax.Array  # float32[T, H / 2]
    qk_norms: jax.Array | None = None  # [2, H]
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array  # [P, S, K, H]
    slot_mapping: jax.Array  # int32[T]
    k_scales: jax.Array | None = None  # float32[P, S, K]: of 8-bit pages
    v_scales: jax.Array | None = None  # float32[P, S, K]
    eps: float = field(metadata=STATIC)
    values: Values = field(default="projected", metadata=STATIC)

    @property
    def num_heads(self) -> int:
        """N."""
        return self.qkv.shape[1] - heads_of_new_token(self.values) * self.k_pages.shape[2]

    def with_values(self, *, fixed: bool = False) -> RopeAppendArgs:
        """The same call with values that are projected; ``fixed`` is as in ``sum_last``."""
        if self.values == "projected":
            return self
        heads = self.k_pages.shape[2]
        heads = with_values(self.qkv, heads, self.values, self.eps, fixed=fixed)
        return replace(self, qkv=heads, values="projected")

    def appended(self, k: jax.Array, v: jax.Array) -> KvAppendArgs:  # [T, K, H] each
        """The arguments of ``kv_append`` for rotated keys, and values."""
        return KvAppendArgs(
            k=k,
            v=v,
            k_pages=self.k_pages,
            v_pages=self.v_pages,
            slot_mapping=self.slot_mapping,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
        )


def qk_rope_append(
    args: RopeAppendArgs,
) -> tuple[jax.Array, ...]:  # [T, N, H] and the pools
    """Normalised heads are rounded to their dtype before the rotation, as in models."""
    num_heads, num_kv_heads = args.num_heads, args.k_pages.shape[2]
    args = jax.tree.map(jnp.asarray, args).with_values()
    rotation = jax.lax.complex(jnp.asarray(args.cos), jnp.asarray(args.sin))  # [T, H / 2]

    def rotated_head(head: int) -> jax.Array:  # [T, H]
        x = jnp.asarray(args.qkv[:, head])
        if args.qk_norms is not None:
            x32 = x.astype(jnp.float32)
            rms = jnp.sqrt((x32 * x32).mean(-1) + args.eps)[:, None]
            weight = jnp.asarray(args.qk_norms[int(head >= num_heads)], jnp.float32)
            x = (x32 / rms * weight).astype(x.dtype)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        product = jax.lax.complex(first, second) * rotation
        return jnp.concatenate([product.real, product.imag], axis=-1).astype(x.dtype)

    heads = jnp.stack([rotated_head(head) for head in range(num_heads + num_kv_heads)], axis=1)
    k, v = heads[:, num_heads:], jnp.asarray(args.qkv)[:, num_heads + num_kv_heads :]
    return heads[:, :num_heads], *kv_append(args.appended(k, v))
