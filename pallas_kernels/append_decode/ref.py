"""The definition of append_decode: append the new tokens, then attend to all of the context."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.append_decode.attend_ref import attend
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.kv_append.ref import KvAppendArgs, kv_append
from pallas_kernels.lib.numerics import (
    Values,
    heads_of_new_token,
    rms_norm,
    rotate,
    split_heads,
    with_values,
)
from pallas_kernels.lib.page_scales import pools_of
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs, qk_rope_append


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeArgs:
    """The arguments of ``append_decode``.

    ``seq_lens`` count the new token. ``arrivals`` are counters by which the CTAs of a row find the
    last one to arrive. They are zero before and after, so one array serves all layers of a step
    (None: allocated by the call). ``sinks``, their values, ``slopes`` and ``root`` are those of
    ``attend_ref.attend``.
    ``values`` says how the new token's values are made.

    With a ``cap`` c scores x become c tanh(x / c).

    Without ``appends`` the new tokens' keys and values are in the pages already, and ``qkv`` has
    only queries.
    """

    qkv: jax.Array  # [B, N + 2K, H]; with values "keys" [B, N + K, H], without appends [B, N, H]
    cos: jax.Array | None = None  # float32[B, H / 2]
    sin: jax.Array | None = None  # float32[B, H / 2]
    qk_norms: jax.Array | None = None  # [2, H]: of queries, of keys; without appends [1, H]
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array  # [P, S, K, H]
    page_table: jax.Array  # int32[B, M]
    seq_lens: jax.Array  # int32[B]
    arrivals: jax.Ref | None = None  # int32[>= B * K]
    sinks: jax.Array | None = None  # [N], with values [B, N]
    k_scales: jax.Array | None = None  # float32[P, S, K]: of 8-bit pages
    v_scales: jax.Array | None = None  # float32[P, S, K]
    slopes: jax.Array | None = None  # float32[N]
    sink_values: jax.Array | None = None  # [B, N, H]
    scale: float = field(metadata=STATIC)
    eps: float = field(metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    values: Values = field(default="projected", metadata=STATIC)
    appends: bool = field(default=True, metadata=STATIC)
    cap: float | None = field(default=None, metadata=STATIC)
    root: bool = field(default=False, metadata=STATIC)

    @property
    def new_heads(self) -> int:
        """Heads of ``qkv`` that are keys or values."""
        of_each = heads_of_new_token(self.values) if self.appends else 0
        return of_each * self.k_pages.shape[2]

    @property
    def queries(self) -> jax.ShapeDtypeStruct:  # [B, N, H]
        """Shape and dtype of the queries in ``qkv``."""
        rows, heads, head_dim = self.qkv.shape
        return jax.ShapeDtypeStruct((rows, heads - self.new_heads, head_dim), self.qkv.dtype)

    @property
    def pools_by_name(self) -> dict[str, Any]:
        """The fields of the pools, in an op that appends, too."""
        names = ("k_pages", "v_pages", "k_scales", "v_scales")
        return {name: getattr(self, name) for name in names}

    @property
    def scores(self) -> dict[str, Any]:
        """How scores are made, as arguments of ``attend``."""
        return {name: getattr(self, name) for name in ("scale", "window", "cap", "root")}

    def with_values(self, *, fixed: bool = False) -> DecodeArgs:
        """The same call with values that are projected; ``fixed`` is as in ``sum_last``."""
        if self.values == "projected":
            return self
        heads = self.k_pages.shape[2]
        heads = with_values(self.qkv, heads, self.values, self.eps, fixed=fixed)
        return replace(self, qkv=heads, values="projected")

    def rotated_queries(self) -> jax.Array:  # [B, N, H]
        """The queries of a call without ``appends``, after their norm and rotation."""
        q = self.qkv
        if self.qk_norms is not None:
            q = rms_norm(q, self.qk_norms[0], self.eps)
        return q if self.cos is None or self.sin is None else rotate(q, self.cos, self.sin)


def append_decode(
    args: DecodeArgs,
) -> tuple[jax.Array, ...]:  # [B, N, H] and the pools
    """A row of length 0 is padding: its token goes to page 0, which is never read."""
    lens, page_size = np.asarray(args.seq_lens), args.k_pages.shape[1]
    beside = args.sinks, args.slopes, args.sink_values
    if not args.appends:
        q, pools = jax.tree.map(jnp.asarray, args).rotated_queries(), pools_of(args)
        return attend(q, pools, args.page_table, lens, *beside, **args.scores), *pools
    args = args.with_values()
    last = np.maximum(lens - 1, 0)
    page = np.asarray(args.page_table)[np.arange(len(lens)), last // page_size]
    slots = jnp.asarray(np.where(lens > 0, page * page_size + last % page_size, 0))
    new: dict[str, Any] = {**args.pools_by_name, "slot_mapping": slots}
    if args.cos is None or args.sin is None:
        q, k, v = split_heads(jnp.asarray(args.qkv), args.k_pages.shape[2])
        pools = kv_append(KvAppendArgs(k=k, v=v, **new))
    else:
        rotated = RopeAppendArgs(
            qkv=args.qkv, cos=args.cos, sin=args.sin, qk_norms=args.qk_norms, **new, eps=args.eps
        )
        q, *pools = qk_rope_append(rotated)
    return attend(q, (*pools,), args.page_table, lens, *beside, **args.scores), *pools
