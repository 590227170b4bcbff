"""The workspace of mixers, for the memory plan of an engine; needs no Flax.

Each function is that of a spec, see ``BlockSpec.workspace``. They count what prompts need: a decode
row needs less than its matrices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.mixers.chunks import most_chunks
from jaxinfer.nn.mixers.compressed_spec import CompressedAttentionConfig
from jaxinfer.nn.mixers.convolved_spec import ConvolvedAttentionConfig
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.mixers.gated_conv_spec import GatedConvConfig
from jaxinfer.nn.mixers.indexed_attention_spec import IndexedAttentionConfig
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.mixers.lightning_spec import LightningConfig
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config
from jaxinfer.nn.mixers.mamba_spec import MambaConfig
from jaxinfer.nn.mixers.pooled_latent_spec import PooledLatentConfig
from jaxinfer.nn.mixers.rg_lru_spec import RgLruConfig
from jaxinfer.nn.mixers.rwkv_spec import SHIFT, ChannelMixConfig, TimeMixConfig
from jaxinfer.nn.state import used_chunk
from pallas_kernels.block_topk import api as block_topk
from pallas_kernels.block_topk.ref import BlockTopkArgs
from pallas_kernels.compressed_attention import api as compressed_attention
from pallas_kernels.compressed_attention.ref import CompressedAttentionArgs
from pallas_kernels.delta_prefill import api as delta_prefill
from pallas_kernels.harness.registry import KernelOp, workspace_of
from pallas_kernels.index_topk import api as index_topk
from pallas_kernels.index_topk.ref import IndexTopkArgs
from pallas_kernels.latent_prefill import api as latent_prefill
from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib.chunk_scan import CHUNK
from pallas_kernels.lib.latent_pages import ROPE_DTYPE, num_groups
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.paged_prefill import api as paged_prefill
from pallas_kernels.paged_prefill.ref import FEW_TOKENS, PrefillArgs
from pallas_kernels.short_conv import api as short_conv
from pallas_kernels.sparse_attention import api as sparse_attention
from pallas_kernels.sparse_attention.ref import SparseAttentionArgs
from pallas_kernels.sparse_latent import api as sparse_latent
from pallas_kernels.sparse_latent.ref import SparseLatentArgs
from pallas_kernels.ssd_prefill import api as ssd_prefill

MOST_PAGES = 1 << 20  # of a sequence: its context has as many splits as any
# Tokens of a step whose prompts may have few, as the others are decode rows.
MOST_MIXED = 4 * FEW_TOKENS


def attention_bytes(config: AttentionConfig, step: StepShape) -> int:
    """The converted pages of prompts, or the states of splits if a step has few prompt tokens."""
    if not step.num_prompts:
        return 0
    tokens = step.x.shape[0]
    counts = (tokens, min(tokens, FEW_TOKENS)) if tokens <= MOST_MIXED else (tokens,)
    return max(_prefill_bytes(config, step, count) for count in counts)


def _prefill_bytes(config: AttentionConfig, step: StepShape, tokens: int) -> int:
    of: Any = jax.ShapeDtypeStruct
    x, op, rows = step.x, paged_prefill.OP, step.num_prompts
    if (chunk := used_chunk(config.chunk)) is not None:
        rows *= most_chunks(x.shape[0], chunk.size)
    head = config.head_dim
    page_dtype = config.page_dtype or x.dtype
    pool = of((1, 16, config.num_kv_heads, head), page_dtype)
    scales = of(pool.shape[:3], jnp.float32) if page_dtype == BITS else None
    args = PrefillArgs(
        q=of((tokens, config.num_heads, head), x.dtype),
        k_pages=pool,
        v_pages=pool,
        page_table=of((rows, MOST_PAGES), jnp.int32),
        seq_lens=of((rows,), jnp.int32),
        query_start_loc=of((rows + 1,), jnp.int32),
        sinks=of((config.num_heads,), x.dtype) if config.sinks else None,
        k_scales=scales,
        v_scales=scales,
        slopes=of((config.num_heads,), jnp.float32) if config.alibi else None,
        root=config.alibi is not None and config.alibi.root,
        scale=config.scale,
        window=config.window,
        cap=config.cap,
    )
    return workspace_of(op, step.platform, args, step.pins.of(op.name))


def latent_bytes(config: LatentAttentionConfig, step: StepShape) -> int:
    """The states of splits, where a step has few prompt tokens."""
    if not step.num_prompts or step.x.shape[0] > MOST_MIXED:
        return 0
    of: Any = jax.ShapeDtypeStruct
    tokens, c, dtype = min(step.x.shape[0], FEW_TOKENS), config, step.x.dtype
    is_scaled = c.page_dtype == BITS
    args = LatentPrefillArgs(
        q=of((tokens, c.num_heads, c.head_dim), dtype),
        entries=of((tokens, c.entry_dim), dtype),
        k_up=of((c.num_heads * c.nope_dim, c.rank), dtype),
        v_up=of((c.num_heads * c.value_dim, c.rank), dtype),
        pages=of((1, 16, c.rank if is_scaled else c.entry_dim), c.page_dtype or dtype),
        page_table=of((step.num_prompts, MOST_PAGES), jnp.int32),
        seq_lens=of((step.num_prompts,), jnp.int32),
        query_start_loc=of((step.num_prompts + 1,), jnp.int32),
        scales=of((1, 16, num_groups(c.rank)), jnp.float32) if is_scaled else None,
        rope_pages=of((1, 16, c.rope_dim), ROPE_DTYPE) if is_scaled else None,
        scale=c.scale,
    )
    op = latent_prefill.OP
    return workspace_of(op, step.platform, args, step.pins.of(op.name))


def indexed_latent_bytes(config: Any, step: StepShape) -> int:
    """The bytes that the choice and attention to it allocate, for any length of context, and the
    positions of all tokens; of attention within a window, too.
    """
    of: Any = jax.ShapeDtypeStruct
    c, (tokens, dtype) = config, (step.x.shape[0], step.x.dtype)
    is_scaled = c.page_dtype == BITS
    rows, table = of((tokens,), jnp.int32), of((tokens, MOST_PAGES), jnp.int32)
    sparse = SparseLatentArgs(
        q=of((tokens, c.num_heads, c.head_dim), dtype),
        k_up=of((c.num_heads * c.nope_dim, c.rank), dtype),
        v_up=of((c.num_heads * c.value_dim, c.rank), dtype),
        pages=of((1, 16, c.rank if is_scaled else c.entry_dim), c.page_dtype or dtype),
        page_table=table,
        rows=rows,
        positions=of((tokens, c.most_tokens), jnp.int32),
        scales=of((1, 16, num_groups(c.rank)), jnp.float32) if is_scaled else None,
        rope_pages=of((1, 16, c.rope_dim), ROPE_DTYPE) if is_scaled else None,
        scale=c.scale,
    )
    ops: list[tuple[KernelOp, Any]] = [(sparse_latent.OP, sparse)]
    if (index := c.indexer) is not None:
        among = IndexTopkArgs(
            q=of((tokens, index.num_heads, index.head_dim), dtype),
            weights=of((tokens, index.num_heads), jnp.float32),
            pages=of((1, 16, index.head_dim), dtype),
            page_table=table,
            rows=rows,
            lens=rows,
            top_k=c.top_k // c.tokens_per_key,
        )
        ops.append((index_topk.OP, among))
    found = (workspace_of(op, step.platform, args, step.pins.of(op.name)) for op, args in ops)
    return max(found) + 4 * tokens * c.most_tokens


def pooled_latent_bytes(config: PooledLatentConfig, step: StepShape) -> int:
    """The same, and the keys and gates of pools in float32, as they are gathered, and their weights
    (``windows.compressed``).
    """
    found, c = indexed_latent_bytes(config, step), config
    if c.indexer is None:
        return found
    tokens = step.x.shape[0]
    pools = tokens // c.pool + 2 * step.num_prompts
    return found + 4 * c.indexer.head_dim * (5 * (tokens + c.pool * pools) + 9 * pools)


def indexed_attention_bytes(config: IndexedAttentionConfig, step: StepShape) -> int:
    """The bytes that the choice and attention to it allocate, for any length of context, and the
    queries and blocks of all tokens.
    """
    of: Any = jax.ShapeDtypeStruct
    c, index, (tokens, dtype) = config, config.indexer, (step.x.shape[0], step.x.dtype)
    is_scaled = c.page_dtype == BITS
    rows, table = of((tokens,), jnp.int32), of((tokens, MOST_PAGES), jnp.int32)
    shared: dict[str, Any] = {"page_table": table, "rows": rows, "lens": rows, "block": index.block}
    among = BlockTopkArgs(
        q=of((tokens, index.num_heads, index.head_dim), dtype),
        pages=of((1, 16, index.head_dim), dtype),
        top_k=index.top_k,
        local=index.local,
        **shared,
    )
    pool = of((1, 16, c.num_kv_heads, c.head_dim), c.page_dtype or dtype)
    scales = of(pool.shape[:3], jnp.float32) if is_scaled else None
    sparse = SparseAttentionArgs(
        q=of((tokens, c.num_heads, c.head_dim), dtype),
        k_pages=pool,
        v_pages=pool,
        k_scales=scales,
        v_scales=scales,
        blocks=of((tokens, index.num_heads, index.top_k), jnp.int32),
        scale=c.scale,
        **shared,
    )
    ops: list[tuple[KernelOp, Any]] = [(block_topk.OP, among), (sparse_attention.OP, sparse)]
    found = (workspace_of(op, step.platform, args, step.pins.of(op.name)) for op, args in ops)
    heads = (c.num_heads * c.head_dim + index.num_heads * index.head_dim) * dtype.itemsize
    return max(found) + tokens * (heads + 4 * index.num_heads * index.top_k)


def compressed_bytes(config: CompressedAttentionConfig, step: StepShape) -> int:
    """The bytes that attention and a choice allocate, for any length of context; the queries,
    outputs and keys of all tokens and their forms in float32; and the values and gates of windows.
    """
    of: Any = jax.ShapeDtypeStruct
    c, own, (tokens, dtype) = config, config.compressor, (step.x.shape[0], step.x.dtype)
    rows, table = of((tokens,), jnp.int32), of((tokens, MOST_PAGES), jnp.int32)
    index = None if own is None else own.indexer
    far: dict[str, Any] = {}
    if own is not None:
        far = {"far_pages": of((1, 16, c.head_dim // own.num_pieces), dtype), "far_table": table}
        far["reads"] = rows if index is None else of((tokens, index.top_k), jnp.int32)
    attended = CompressedAttentionArgs(
        q=of((tokens, c.num_heads, c.head_dim), dtype),
        pages=of((1, 16, c.head_dim), dtype),
        page_table=table,
        sinks=of((c.num_heads,), jnp.float32),
        rows=rows,
        last=rows,
        **far,
        window=c.window,
        scale=c.scale,
    )
    ops: list[tuple[KernelOp, Any]] = [(compressed_attention.OP, attended)]
    # values and gates in float32, as they are gathered by windows, and their weights
    compressed = chosen = 0
    if own is not None:
        channels = own.num_series * (c.head_dim + (0 if index is None else index.head_dim))
        windows = tokens // own.ratio + 2 * step.num_prompts
        compressed = 4 * channels * (5 * (tokens + own.ratio * windows) + 9 * windows)
    if index is not None:
        among = IndexTopkArgs(
            q=of((tokens, index.num_heads, index.head_dim), dtype),
            weights=of((tokens, index.num_heads), jnp.float32),
            pages=of((1, 16, index.head_dim), dtype),
            page_table=table,
            rows=rows,
            lens=rows,
            top_k=index.top_k,
        )
        ops.append((index_topk.OP, among))
        chosen = tokens * (4 * index.top_k + 8 * index.num_heads * index.head_dim)
    found = (workspace_of(op, step.platform, args, step.pins.of(op.name)) for op, args in ops)
    queries = tokens * c.num_heads * c.head_dim * (4 + 2 * dtype.itemsize)
    return max(found) + queries + chosen + compressed


def delta_bytes(config: DeltaConfig, step: StepShape) -> int:
    """The bytes of both ops, the arguments between them (queries and keys of unit length, a copy of
    the values, betas and decays in float32), the channels of prompts after decode rows, and gates
    that have latents.
    """
    if not step.num_prompts:
        return 0
    of, x, float32 = jax.ShapeDtypeStruct, step.x, jnp.dtype(jnp.float32)
    channels, tokens = sum(config.channels.widths), x.shape[0]
    inputs = channels + config.values * (config.gate_rank is None)
    conv = conv_bytes(step, channels, config.conv_width, inputs=inputs, bias=False)
    betas = of((tokens, config.num_v_heads), float32)
    decays = (*betas.shape, config.k_dim) if config.decay == "channel" else betas.shape
    keys = of((tokens, config.num_k_heads, config.k_dim), x.dtype)
    call: dict[str, Any] = {
        "q": keys,
        "k": keys,
        "v": of((tokens, config.num_v_heads, config.v_dim), x.dtype),
        "log_decay": of(decays, float32),
        "beta": betas,
        "states": of((1, config.num_v_heads, config.k_dim, config.v_dim), float32),
    }
    args = delta_prefill.DeltaPrefillArgs(**call, **_row_indices(step.num_prompts))
    op = delta_prefill.OP
    delta = workspace_of(op, step.platform, args, step.pins.of(op.name))
    gates = config.num_v_heads + config.decays
    between = channels * x.dtype.itemsize + gates * float32.itemsize
    sliced = (channels + config.values) * x.dtype.itemsize
    expanded = 0  # and joined, and those of prompts after decode rows
    if config.decay_floor is not None:
        expanded = 2 * gates * float32.itemsize
    elif config.gate_rank is not None:
        expanded = 2 * (gates + config.values) * x.dtype.itemsize
    return conv + delta + tokens * (between + sliced + expanded)


def gated_conv_bytes(config: GatedConvConfig, step: StepShape) -> int:
    """The inputs of the convolution, its outputs, and their products with the gates."""
    if not step.num_prompts:
        return 0
    conv = conv_bytes(step, config.width, config.conv_width, silu=False)
    return conv + 3 * step.x.shape[0] * config.width * step.x.dtype.itemsize


def convolved_bytes(config: ConvolvedAttentionConfig, step: StepShape) -> int:
    """The larger of both convolutions, and four arrays of queries and keys in float32."""
    if not step.num_prompts:
        return 0
    first = conv_bytes(step, config.channels, config.conv_width, silu=False)
    second = conv_bytes(step, config.channels + config.delayed, 2, silu=False)
    return max(first, second) + 4 * step.x.shape[0] * config.channels * 4


def mamba2_bytes(config: Mamba2Config, step: StepShape) -> int:
    """The bytes of the convolution and of the scan, and the channels between them, twice: those of
    prompts after decode rows are copied.
    """
    if not step.num_prompts:
        return 0
    channels = sum(config.channels.widths)
    conv = conv_bytes(step, channels, config.conv_width)
    heads = (config.num_heads, config.head_dim, config.state_dim)
    scan = _scan_bytes(step, channels, heads, has_steps=True)
    return conv + scan + 2 * step.x.shape[0] * channels * step.x.dtype.itemsize


def lightning_bytes(config: LightningConfig, step: StepShape) -> int:
    """The scan's bytes, as in Mamba-2, and in float32 the queries, keys and values, the outputs,
    and their norms.
    """
    if not step.num_prompts:
        return 0
    heads = (config.num_heads, config.head_dim, config.head_dim)
    scan = _scan_bytes(step, 3 * config.inner, heads, has_steps=False)
    return scan + 6 * 4 * step.x.shape[0] * config.inner


def mamba_bytes(config: MambaConfig, step: StepShape) -> int:
    """In float32 some 8 arrays of the states after each token of one chunk, and 6 of the channels
    of all tokens.
    """
    if not step.num_prompts:
        return 0
    conv = conv_bytes(step, config.inner, config.conv_width)
    return conv + 4 * CHUNK * config.inner * (8 * config.state_dim + 6 * _num_chunks(step))


def rg_lru_bytes(config: RgLruConfig, step: StepShape) -> int:
    """In float32 some 8 arrays of the channels of all tokens."""
    if not step.num_prompts:
        return 0
    conv = conv_bytes(step, config.inner, config.conv_width, silu=False)
    return conv + 4 * CHUNK * config.inner * 8 * (1 + _num_chunks(step))


def rwkv_bytes(config: TimeMixConfig | ChannelMixConfig, step: StepShape) -> int:
    """In float32 some 8 arrays of the inputs of all tokens, and 12 of the channels."""
    if not step.num_prompts:
        return 0
    conv = conv_bytes(step, config.width, SHIFT, silu=False, bias=False)
    return conv + 4 * CHUNK * (8 * config.width + 12 * config.inner) * (1 + _num_chunks(step))


def _num_chunks(step: StepShape) -> int:
    """The most chunks that the tokens of a step's prompts are divided into."""
    return step.x.shape[0] // CHUNK + step.num_prompts


def _scan_bytes(
    step: StepShape, channels: int, heads: tuple[int, int, int], *, has_steps: bool
) -> int:
    """The workspace of ``ssd_prefill`` with states of so many heads, inputs and columns."""
    of, (tokens, _), float32 = jax.ShapeDtypeStruct, step.x.shape, jnp.dtype(jnp.float32)
    call: dict[str, Any] = {
        "mixed": of((tokens, channels), step.x.dtype),
        "steps": of((tokens, heads[0]), step.x.dtype) if has_steps else None,
        "decay": of((3, heads[0]), float32),
        "states": of((1, *heads), float32),
    }
    args = ssd_prefill.SsdPrefillArgs(**call, **_row_indices(step.num_prompts))
    op = ssd_prefill.OP
    return workspace_of(op, step.platform, args, step.pins.of(op.name))


def conv_bytes(
    step: StepShape,
    channels: int,
    width: int,
    *,
    inputs: int | None = None,
    silu: bool = True,
    bias: bool = True,
) -> int:
    """The workspace of a convolution over ``width`` tokens of the first ``channels`` of
    ``inputs``.
    """
    of, dtype = jax.ShapeDtypeStruct, step.x.dtype
    call: dict[str, Any] = {
        "x": of((step.x.shape[0], inputs or channels), dtype),
        "weights": of((width, channels), dtype),
        "kept": of((1, width, channels), dtype),
        "bias": of((channels,), dtype) if bias else None,
        "silu": silu,
    }
    args, op = short_conv.ShortConvArgs(**call, **_row_indices(step.num_prompts)), short_conv.OP
    return workspace_of(op, step.platform, args, step.pins.of(op.name))


def _row_indices(num_prompts: int) -> dict[str, Any]:
    """The arguments of an op that say where each prompt's tokens and states are."""
    rows = jax.ShapeDtypeStruct((num_prompts,), jnp.int32)
    starts = jax.ShapeDtypeStruct((num_prompts + 1,), jnp.int32)
    return {"query_start_loc": starts, "begins": rows, "reads": rows, "writes": rows}
