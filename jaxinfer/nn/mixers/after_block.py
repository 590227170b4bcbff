"""A mixer after a block that several layers use. Parameters of ``AfterBlock``:

those of the other mixer, and
    to_input [D, D]: of the block's output
    qkv_a [2D, 3R], qkv_b [3R, (N + 2K) * H]   with addends of queries, keys and values
    gate_up_a [D, R], gate_up_b [R, 2F]        with addends of gates and ups

and of ``SharedBlocks`` for each block, within ``block_0`` and so on:

    attention/...: those of ``mixers.attention``, for inputs of 2D   attention_norm [1, 2D]
    network/...: those of ``ffn.dense``                              network_norm [1, D]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import BlockInputs, PlainOutput, StepContext
from jaxinfer.nn.layer_spec import SharedBlocksConfig
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.after_block_spec import AfterBlockConfig
from jaxinfer.nn.mixers.side_by_side import divided_state
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight


class SharedBlocks(nn.Module):
    """The parameters of all blocks, and the embeddings that they read."""

    config: SharedBlocksConfig

    @nn.compact
    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        x: jax.Array,  # [T, D]: their embeddings in the residual stream
        ctx: StepContext,
    ) -> BlockInputs:
        """See ``SharedBlocksConfig``."""
        del token_ids, ctx
        return BlockInputs(x, tuple([param(self, f"block_{i}") for i in range(self.config.count)]))


class AfterBlock(nn.Module):
    """The block, and the mixer with the norm before it."""

    config: AfterBlockConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``attention.Attention``. Points within the mixers are those of attention."""
        c = self.config
        mixer = c.other.module()
        nn.share_scope(self, mixer)
        own, others = divided_state(c.other, state, stream.x.dtype)
        x = stream.total(ctx.pins)
        out, own = self._block(x, own, ctx, norm)
        delta = linear(out, weight(self, "to_input"), ctx).y
        _, delta, others = mixer(Stream(x, delta), norm, others, replace(ctx, points=None), only)
        x = x if only is None else take_rows(x, only)
        return x, delta, own if others is None else {**(own or {}), **others}

    def _block(
        self,
        x: jax.Array,  # [T, D]
        state: LayerArrays | None,
        ctx: StepContext,
        norm: Norm,
    ) -> tuple[jax.Array, LayerArrays | None]:  # [T, D]
        """The output of the block's network, and the state of its attention."""
        c, given = self.config, ctx.layer_inputs
        assert isinstance(given, BlockInputs), "the decoder has no blocks for its layers"
        params = given.blocks[c.block]
        first, second = (
            replace(norm, weights=params[f"{name}_norm"], row=0)
            for name in ("attention", "network")
        )
        attention, network = dict(params["attention"]), dict(params["network"])
        if c.qkv_rank is not None:
            attention["qkv"] = self._adapted("qkv", attention)
        if c.gate_up_rank is not None:
            network["gate_up"] = self._adapted("gate_up", network)
        module: Any = c.attention.module().clone(parent=None)
        both = Stream(jnp.concatenate([x, given.embeddings], axis=1))
        _, delta, state = module.apply({"params": attention}, both, first, state, ctx)
        module = c.network.module().clone(parent=None)
        h = Stream(jnp.zeros_like(x), delta)
        _, delta = module.apply({"params": network}, h, second, replace(ctx, points=None))
        return Stream(jnp.zeros_like(x), delta).total(ctx.pins), state

    def _adapted(self, name: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The stored form of a weight with this layer's addend: see ``nn.weight``."""
        return {"base": params[name], "a": param(self, f"{name}_a"), "b": param(self, f"{name}_b")}
