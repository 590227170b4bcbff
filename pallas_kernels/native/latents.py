"""latent_decode by the native library, in float32.

Entries are keys, and their latents values, of one kv head that all queries share: see
``latent_decode.ref``. Prompts stay with XLA, which expands keys and values: 256 tokens at once took
it 36 ms a layer of DeepSeek-V2-Lite, and the absorbed form 48 (with other work on the cores).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_append.xla import last_slots, written
from pallas_kernels.latent_decode.ref import LatentDecodeArgs
from pallas_kernels.native.attention import LANES, MOST, attend, nothing
from pallas_kernels.native.library import missing
from pallas_kernels.paged_prefill.ref import PrefillArgs


def supports(args: LatentDecodeArgs) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    rank, width = args.q_latent.shape[2], args.pages.shape[2]
    if (reason := missing()) is not None:
        return reason
    if args.q_latent.dtype != jnp.float32 or args.pages.dtype != jnp.float32:
        return f"tokens are {args.q_latent.dtype} and pages {args.pages.dtype}, not float32"
    if rank % LANES or width % LANES or rank > MOST:
        return f"latents of {rank} in {width} are not multiples of {LANES} up to {MOST}"
    return None


def latent_decode(args: LatentDecodeArgs) -> tuple[jax.Array, ...]:  # [B, N, C] and the pool
    """See ``latent_decode.api``."""
    slots = last_slots(args.page_table, args.seq_lens, args.pages.shape[1])
    # without the barrier XLA copies the pool
    pages = jax.lax.optimization_barrier(written(args.pages, args.entries, slots))
    one_head = pages[:, :, None]
    given = PrefillArgs(
        q=jnp.concatenate((args.q_latent, args.q_rope), axis=2),
        k_pages=one_head,
        v_pages=one_head,
        page_table=args.page_table,
        seq_lens=args.seq_lens,
        query_start_loc=nothing(),
        scale=args.scale,
    )
    return attend(given, args.q_latent.shape[2]), pages
