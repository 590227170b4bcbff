"""The workspace of mixers, for the memory plan of an engine; needs no Flax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.mixers.gated_conv_spec import GatedConvConfig
from jaxinfer.nn.mixers.lightning_spec import LightningConfig
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config
from jaxinfer.nn.mixers.mamba_spec import MambaConfig
from pallas_kernels.delta_prefill import api as delta_prefill
from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import workspace_of
from pallas_kernels.lib.chunk_scan import CHUNK
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.paged_prefill import api as paged_prefill
from pallas_kernels.paged_prefill.ref import FEW_TOKENS, PrefillArgs
from pallas_kernels.short_conv import api as short_conv

MOST_PAGES = 1 << 20  # of a sequence: its context has as many splits as any
MOST_MIXED = (
    4 * FEW_TOKENS
)  # tokens of a step whose prompts may have few: the others are decode rows


def attention_bytes(
    config: AttentionConfig,
    params: Mapping[str, Any],
    x: jax.ShapeDtypeStruct,  # [T, D]
    num_prompts: int,
    platform: str,
    pins: Pins,
) -> int:
    """See ``BlockSpec.workspace``: of prompts with few tokens the states of splits."""
    del params
    if not num_prompts or x.shape[0] > MOST_MIXED:
        return 0
    of: Any = jax.ShapeDtypeStruct
    head = config.head_dim
    page_dtype = config.page_dtype or x.dtype
    pool = of((1, 16, config.num_kv_heads, head), page_dtype)
    scales = of(pool.shape[:3], jnp.float32) if page_dtype == BITS else None
    args = PrefillArgs(
        q=of((min(x.shape[0], FEW_TOKENS), config.num_heads, head), x.dtype),
        k_pages=pool,
        v_pages=pool,
        page_table=of((num_prompts, MOST_PAGES), jnp.int32),
        seq_lens=of((num_prompts,), jnp.int32),
        query_start_loc=of((num_prompts + 1,), jnp.int32),
        sinks=of((config.num_heads,), x.dtype) if config.sinks else None,
        k_scales=scales,
        v_scales=scales,
        slopes=of((config.num_heads,), jnp.float32) if config.alibi else None,
        scale=config.scale,
        window=config.window,
        cap=config.cap,
    )
    return workspace_of(paged_prefill.OP, platform, args, pins.of(paged_prefill.OP.name))


def delta_bytes(
    config: DeltaConfig,
    params: Mapping[str, Any],
    x: jax.ShapeDtypeStruct,  # [T, D]
    num_prompts: int,
    platform: str,
    pins: Pins,
) -> int:
    """See ``BlockSpec.workspace``: that of prompts, as a decode row needs less than its matrices.

    It is that of both ops, the arguments between them (queries and keys of unit length, a copy of
    the values, betas and decays in float32), the channels of prompts after decode rows, and gates
    that have latents.
    """
    del params
    if not num_prompts:
        return 0
    of, tokens, float32 = jax.ShapeDtypeStruct, x.shape[0], jnp.dtype(jnp.float32)
    channels, rows = sum(config.channels.widths), of((num_prompts,), jnp.int32)
    betas = of((tokens, config.num_v_heads), float32)
    decays = (*betas.shape, config.k_dim) if config.decay == "channel" else betas.shape
    keys = of((tokens, config.num_k_heads, config.k_dim), x.dtype)
    indices: dict[str, Any] = {
        "query_start_loc": of((num_prompts + 1,), jnp.int32),
        "begins": rows,
        "reads": rows,
        "writes": rows,
    }
    conv: dict[str, Any] = {
        "x": of((tokens, channels + config.values * (config.gate_rank is None)), x.dtype),
        "weights": of((config.conv_width, channels), x.dtype),
        "kept": of((1, config.conv_width, channels), x.dtype),
    }
    delta: dict[str, Any] = {
        "q": keys,
        "k": keys,
        "v": of((tokens, config.num_v_heads, config.v_dim), x.dtype),
        "log_decay": of(decays, float32),
        "beta": betas,
        "states": of((1, config.num_v_heads, config.k_dim, config.v_dim), float32),
    }
    ops = (
        (short_conv.OP, short_conv.ShortConvArgs(**conv, **indices)),
        (delta_prefill.OP, delta_prefill.DeltaPrefillArgs(**delta, **indices)),
    )
    gates = config.num_v_heads + config.decays
    between = channels * x.dtype.itemsize + gates * float32.itemsize
    sliced = (channels + config.values) * x.dtype.itemsize
    expanded = 0  # and joined, and those of prompts after decode rows
    if config.gate_rank is not None:
        expanded = 2 * (gates + config.values) * x.dtype.itemsize
    return tokens * (between + sliced + expanded) + sum(
        workspace_of(op, platform, args, pins.of(op.name)) for op, args in ops
    )


def gated_conv_bytes(
    config: GatedConvConfig,
    params: Mapping[str, Any],
    x: jax.ShapeDtypeStruct,  # [T, D]
    num_prompts: int,
    platform: str,
    pins: Pins,
) -> int:
    """See ``BlockSpec.workspace``: the inputs of the convolution, its outputs, and their products
    with the gates.
    """
    del params
    if not num_prompts:
        return 0
    channels = config.width
    conv = _conv_bytes(x, channels, config.conv_width, num_prompts, platform, pins, silu=False)
    return conv + 3 * x.shape[0] * channels * x.dtype.itemsize


def mamba2_bytes(
    config: Mamba2Config,
    params: Mapping[str, Any],
    x: jax.ShapeDtypeStruct,  # [T, D]
    num_prompts: int,
    platform: str,
    pins: Pins,
) -> int:
    """See ``BlockSpec.workspace``: of each chunk and head, in float32, some 4 matrices of chunk by
    chunk, 6 of keys and 6 of inputs.
    """
    del params
    if not num_prompts:
        return 0
    channels, tokens = sum(config.channels.widths), x.shape[0]
    conv = _conv_bytes(x, channels, config.conv_width, num_prompts, platform, pins, silu=True)
    scan = _scan_bytes(tokens, num_prompts, config.num_heads, config.state_dim, config.head_dim)
    return conv + scan + 2 * tokens * channels * x.dtype.itemsize


def lightning_bytes(
    config: LightningConfig,
    params: Mapping[str, Any],
    x: jax.ShapeDtypeStruct,  # [T, D]
    num_prompts: int,
    platform: str,
    pins: Pins,
) -> int:
    """See ``BlockSpec.workspace``: the scan's, as in Mamba-2, and in float32 the queries, keys and
    values, the outputs, and their norms.
    """
    del params, platform, pins
    if not num_prompts:
        return 0
    tokens, width = x.shape[0], config.head_dim
    scan = _scan_bytes(tokens, num_prompts, config.num_heads, width, width)
    return scan + 6 * 4 * tokens * config.inner


def _scan_bytes(tokens: int, num_prompts: int, heads: int, keys: int, inputs: int) -> int:
    """The arrays of ``nn.mixers.ssd`` for so many tokens and heads, with these widths."""
    chunks = tokens // CHUNK + num_prompts
    return 4 * chunks * CHUNK * heads * (4 * CHUNK + 6 * keys + 6 * inputs)


def mamba_bytes(
    config: MambaConfig,
    params: Mapping[str, Any],
    x: jax.ShapeDtypeStruct,  # [T, D]
    num_prompts: int,
    platform: str,
    pins: Pins,
) -> int:
    """See ``BlockSpec.workspace``: in float32 some 8 arrays of the states after each token of one
    chunk, and 6 of the channels of all tokens.
    """
    del params
    if not num_prompts:
        return 0
    inner, chunks = config.inner, x.shape[0] // CHUNK + num_prompts
    conv = _conv_bytes(x, inner, config.conv_width, num_prompts, platform, pins, silu=True)
    scan = 4 * CHUNK * inner * (8 * config.state_dim + 6 * chunks)
    return conv + scan


def _conv_bytes(
    x: jax.ShapeDtypeStruct,  # [T, D]
    channels: int,
    width: int,
    num_prompts: int,
    platform: str,
    pins: Pins,
    *,
    silu: bool,
) -> int:
    """The workspace of a convolution with a bias of so many channels and taps."""
    of = jax.ShapeDtypeStruct
    rows = of((num_prompts,), jnp.int32)
    call: dict[str, Any] = {
        "x": of((x.shape[0], channels), x.dtype),
        "weights": of((width, channels), x.dtype),
        "kept": of((1, width, channels), x.dtype),
        "query_start_loc": of((num_prompts + 1,), jnp.int32),
        "begins": rows,
        "reads": rows,
        "writes": rows,
        "bias": of((channels,), x.dtype),
        "silu": silu,
    }
    op = short_conv.OP
    return workspace_of(op, platform, short_conv.ShortConvArgs(**call), pins.of(op.name))
