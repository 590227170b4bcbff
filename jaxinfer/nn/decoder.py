"""The decoder of every family: a loop over layers of a mixer and a feed-forward network.

``decoder_config`` has the options. Layers are unrolled, with one array per layer and weight. Fused
weights need fewer arguments per call, and their GEMM reads each activation once. Weights are stored
as [in, out], and GEMMs are ``x @ w``. Parameters, whose shapes are those of ``models``:

    embed      [V, D]           layers_i/...    see ``nn.mixers`` and ``nn.ffn``
    positions  [positions, D]   layers_i/norms  [2, D] before or after mixer and feed-forward;
      with learned positions                    with both [4, D]: before and after each
    final_norm [D]              layer norms may have a bias after each weight: [4, D],
    lm_head    [D, V]           and final_norm [2, D]; parallel blocks may share a norm: [1, D]
      unless tied               plain layer norms are not here
    lm_head_bias [V]                rope_alpha float32[H / 2]
      with a head bias                with a learned rope
    lm_head_scale [V], times ``head_scale`` the factors of logits
    embed_norm [D], [2, D]          project_in [E, D], project_out [D, E]
      with a norm of embeddings       with embeddings, and a head, of another width E
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.between_blocks import at_point, output, without_block
from jaxinfer.nn.context import Angles, StepContext
from jaxinfer.nn.decoder_config import DecoderSpec, LayerSpec
from jaxinfer.nn.layer_spec import NORM_PLACES, BlockFactors, NormSpec
from jaxinfer.nn.linear import (
    Norm,
    Outputs,
    Stream,
    added,
    layer_norm,
    normalised,
    scaled,
)
from jaxinfer.nn.points import GivenPoints, Points
from jaxinfer.nn.residual import Add
from jaxinfer.nn.residual_spec import ResidualSpec
from jaxinfer.nn.rope import rope_tables
from jaxinfer.nn.state import LayerArrays, State
from jaxinfer.nn.weight import Matmul, param, take_rows, weight
from pallas_kernels.all_gather.api import AllGatherArgs, all_gather
from pallas_kernels.all_reduce.api import Peers
from pallas_kernels.harness.pins import ALL_XLA, Pins
from pallas_kernels.lib.activations import ACTIVATIONS


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward network; the next block adds their outputs to the stream.

    Its fields are few, since Flax hashes all of them at every call: with the whole decoder, 651
    calls took a third of the time in which 35 steps are traced.
    """

    spec: LayerSpec
    norm: NormSpec
    residual: ResidualSpec

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[Stream, LayerArrays | None]:
        """One layer. With ``only`` (see ``Attention``) the result has only those tokens."""
        norms, spec = self._norms(stream.x.shape[-1]), self.spec
        mixer, ffn = (None if b.is_absent else b.module() for b in (spec.mixer, spec.ffn))
        for block in (mixer, ffn):
            if block is not None:
                nn.share_scope(self, block)
        stream = at_point("resid_pre", stream.with_peers(ctx.peers), ctx)
        started: LayerArrays = {}
        if spec.start is not None:
            stream, started = spec.start.module()(stream, state, ctx)
            state = state and {n: one for n, one in state.items() if n not in started}
        if self.spec.parallel:
            stream, state = self._side_by_side(mixer, ffn, stream, state, ctx, only)
            return at_point("resid_post", stream, ctx).with_peers(None), state
        if mixer is None:
            stream = without_block("attn_out", stream, ctx, only)
        else:
            own, add = self.residual.module("mixer_residual").read(stream, only)
            before = norms[0]
            if spec.on_norms is not None:
                own, before, add = _on_norm(own, before, spec.on_norms[0], ctx)
            x, delta, state = mixer(own, before, state, ctx, only)
            stream = add(x, output("attn_out", x, delta, norms[1], ctx))
        stream = at_point("resid_mid", stream, ctx)
        if ffn is None:
            stream = without_block("mlp_out", stream, ctx)
        else:
            own, add = self.residual.module("ffn_residual").read(stream, None)
            before, own_ctx = norms[2], ctx if only is None else ctx.of_tokens(only)
            if spec.on_norms is not None:
                own, before, add = _on_norm(own, before, spec.on_norms[1], own_ctx)
            x, delta = ffn(own, before, own_ctx)
            stream = add(x, output("mlp_out", x, delta, norms[3], ctx))
        if self.spec.end is not None:
            end = self.spec.end.module()
            nn.share_scope(self, end)
            stream = end(stream, self.norm.eps, ctx if only is None else ctx.of_tokens(only))
        state = {**state, **started} if started and state is not None else state
        return at_point("resid_post", stream, ctx).with_peers(None), state

    def _side_by_side(
        self,
        mixer: Any,
        ffn: Any,
        stream: Stream,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, LayerArrays | None]:
        """A parallel layer: both blocks read the stream, and their outputs are added together."""
        assert self.residual.num_streams == 1 and self.spec.end is None, "not in parallel layers"
        first, _, second, _ = self._norms(stream.x.shape[-1])
        _, add = self.residual.module("mixer_residual").read(stream, only)
        stream, h = normalised(stream, first, ctx)
        _, delta, state = mixer(Stream(h), first.as_none(), state, ctx, only)
        x, own = stream.x, ctx
        if only is not None:
            x, h, own = take_rows(x, only), take_rows(h, only), ctx.of_tokens(only)
        if self.spec.norms == "before":
            _, h = normalised(Stream(x), second, own)
        _, other = ffn(Stream(h), second.as_none(), own)
        delta = output("attn_out", x, delta, None, ctx)
        other = output("mlp_out", x, other, None, ctx)
        if ctx.uses("resid_mid"):  # the stream and the mixer's output, which no block reads
            return add(at_point("resid_mid", add(x, delta), ctx).total(ctx.pins), other), state
        assert not isinstance(delta, Outputs) and not isinstance(other, Outputs)
        return add(x, added(delta, other)), state

    def _norms(self, width: int) -> tuple[Norm, Norm | None, Norm, Norm | None]:
        """The norms before and after the mixer, before and after the feed-forward network."""
        own = self.norm
        if own.kind in ("layer_plain", "none") or self.spec.is_empty:
            norms = [Norm(None, 0, own.eps, own.kind)] * 4
        elif own.kind == "rms_plain":
            norms = [_plain_norm(width, own)] * 4
        else:
            weights, rows_each = param(self, "norms"), 2 if own.kind == "layer" else 1
            starts = range(0, len(weights), rows_each)
            norms = [Norm(weights, row, own.eps, own.kind, own.groups) for row in starts]
        places, none = NORM_PLACES[self.spec.norms], norms[0].as_none()
        before = [none if i is None else norms[i] for i in places[::2]]
        after = [None if i is None else replace(norms[i], eps=own.post_eps) for i in places[1::2]]
        return before[0], after[0], before[1], after[1]


def _on_norm(
    stream: Stream, norm: Norm, factors: BlockFactors, ctx: StepContext
) -> tuple[Stream, Norm, Add]:
    """A block's input after its norm, no norm before it, and how its output is added to that."""
    _, h = normalised(stream, norm, ctx)

    def add(x: jax.Array, delta: Any) -> Stream:
        return Stream(x * factors.stream, scaled(delta, factors.output))

    return Stream(h), norm.as_none(), add


def _plain_norm(width: int, norms: NormSpec) -> Norm:
    """An RMS norm without weights, for which kernels read ones."""
    return Norm(jnp.ones((1, width), norms.dtype), 0, norms.eps)


class DecoderLayerWithPoints(DecoderLayer):
    """A layer of the dense form with points in use: see ``nn.points.Points.run_layer``."""

    def __call__(  # type: ignore[override]
        self,
        stream: Stream,
        state: LayerArrays | None,
        ctx: StepContext,
        given: dict[str, jax.Array],
        taps: tuple[str, ...],
    ) -> tuple[tuple[jax.Array, LayerArrays | None], dict[str, jax.Array]]:
        """The stream after the layer and its state, with activations replaced, and those of
        ``taps``.
        """
        points = GivenPoints(given, taps)
        after, state = super().__call__(stream, state, replace(ctx, points=points))
        return (after.total(), state), points.found


# Equal layers share one trace.
SharedLayer = nn.jit(DecoderLayer)
SharedLayerWithPoints = nn.jit(DecoderLayerWithPoints, static_argnums=5)


class Decoder(nn.Module):
    """Tokens to hidden states (``__call__``), hidden states to logits (``unembed``).

    ``with_points`` are the layers with points in use (``nn.points.Points.layers``), which in a step
    share no trace with equal ones; ``dense`` says that they run in the dense form.
    """

    spec: DecoderSpec
    with_points: frozenset[int] = frozenset()
    dense: bool = False

    def setup(self) -> None:
        """The modules of the layers, and the parameters outside them."""
        c = self.spec
        self.embed = weight(self, "embed", by_output=True)
        if c.num_positions is not None:
            self.positions = param(self, "positions")
        unshared: Any = SharedLayerWithPoints if self.dense else DecoderLayer
        self.layers = [
            (unshared if i in self.with_points else SharedLayer)(layer, c.norms, c.residual)
            for i, layer in enumerate(c.layers)
        ]
        self.residual = c.residual.module("residual")
        if c.layer_inputs is not None:
            self.layer_inputs = c.layer_inputs.module()

    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        state: State | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, State | None]:  # [T, D], or with only [B, D]
        """Hidden states after the final norm, and the state with this step's tokens."""
        stream, every = self.embedded(token_ids, ctx), range(len(self.layers))
        ctx = self.with_layer_inputs(token_ids, ctx)
        stream, state = self.run_layers(stream, state, ctx, layers=every, only=only)
        return self.finished(stream, ctx), state

    def embedded(self, token_ids: jax.Array, ctx: StepContext) -> Stream:
        """The stream that begins with tokens int32[T] at the positions of the context."""
        x = self._embedding(token_ids, ctx)
        if self.spec.embed_norm:
            _, x = normalised(Stream(x), self._outer_norm("embed_norm"), ctx)
        places = ctx.positions + self.spec.first_position
        if self.spec.num_positions is not None:
            x = x + take_rows(self.positions, places)
        if self.spec.sinusoids is not None:
            x = x + self.spec.sinusoids.of(places, x.shape[-1]).astype(x.dtype)
        return self.residual.begin(ctx.at("embed", ctx.without_padding(x)))

    def _embedding(self, token_ids: jax.Array, ctx: StepContext) -> jax.Array:  # [T, D]
        x = self.embed.take_of(token_ids, ctx).astype(self.spec.dtype)
        if self.spec.embed_width is not None:
            x = x @ param(self, "project_in")
        if self.spec.embed_scale is not None:
            x = x * jnp.asarray(self.spec.embed_scale, x.dtype)  # rounded first, as published
        return x

    def with_layer_inputs(self, token_ids: jax.Array, ctx: StepContext) -> StepContext:
        """The context for ``run_layers``: with the inputs of layers, of a decoder that has them.

        They depend on the tokens int32[T] alone, so that each part of a step computes them.
        """
        if self.spec.layer_inputs is None:
            return ctx
        x = self._embedding(token_ids, ctx)
        return replace(ctx, layer_inputs=self.layer_inputs(token_ids, x, ctx))

    def run_layers(
        self,
        stream: Stream,
        state: State | None,
        ctx: StepContext,
        *,
        layers: range,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[Stream, State | None]:
        """The stream after these layers, and the new state. Other layers' arrays may be None.

        With ``only`` the result has these tokens alone. The last layer with a state of its own
        stores that of all tokens; layers after it compute B tokens, as those of decode rows.
        """
        c = self.spec
        last = len(c.layers) - 1 if state is None else c.layout.last_with_state
        learned = param(self, "rope_alpha") if c.learned_rope else None
        tables = (Angles(*rope_tables(rope, ctx.positions, learned)) for rope in c.ropes)
        ctx = replace(ctx, angles=tuple(tables))
        returned: dict[int | None, LayerArrays | None] = {}  # by mixers
        for i in layers:
            rope, place = c.layers[i].mixer.rope, c.layout.layers[i]
            own = c.layout.given(i, state, returned)
            rotation = None if rope is None else c.ropes.index(rope)
            if only is not None and i > last:
                x = stream.total(ctx.pins)
                stream = Stream(x if i > layers.start else take_rows(x, only))
                ctx, only = ctx.of_rows(only), None
            own_only = only if i == last else None
            own_ctx = ctx.of_layer(i, place.groups, rotation)
            if self.dense and i in self.with_points:
                assert isinstance(ctx.points, Points)
                cut: Any = partial(self._layer(i), stream, own, own_ctx)
                total, returned[i] = ctx.points.run_layer(i, cut)
                stream = Stream(total)
                continue
            stream, own = self._layer(i)(stream.with_peers(None), own, own_ctx, own_only)
            stream, returned[i] = stream.with_peers(ctx.peers), own
            if state is not None and own is not None:
                state = place.put(state, own)
        return stream, state

    def _layer(self, i: int) -> Callable[..., Any]:
        """Layer ``i``, with the weights of an earlier one if it borrows them."""
        layer, of = self.layers[i], self.spec.layers[i].weights_of
        if of is None:
            return layer
        weights = self.variables["params"]
        own = {"params": {**weights[f"layers_{of}"], **weights.get(f"layers_{i}", {})}}
        c = self.spec
        return partial(type(layer)(c.layers[i], c.norms, c.residual, parent=None).apply, own)

    def finished(self, stream: Stream, ctx: StepContext) -> jax.Array:  # [T, D]
        """The final norm of the stream."""
        norm = self._outer_norm("final_norm", self.spec.final_norm_eps)
        _, hidden = normalised(self.residual.end(stream), norm, ctx)
        return ctx.at("final_norm", hidden)

    def _outer_norm(self, name: str, eps: float | None = None) -> Norm:
        """A norm outside the layers, by the name of its parameter, with an epsilon of its own."""
        norms = replace(self.spec.norms, eps=eps or self.spec.norms.eps)
        if norms.kind == "rms_plain" or name == "embed_norm" and self.spec.embed_norm == "plain":
            return _plain_norm(self.spec.hidden_size, norms)
        plain = norms.kind in ("layer_plain", "none")
        weights = None if plain else jnp.atleast_2d(param(self, name))
        return Norm(weights, 0, norms.eps, norms.kind, norms.groups)

    def unembed(
        self,
        hidden: jax.Array,  # [..., D]
        pins: Pins = ALL_XLA,
        axis: str | None = None,
        peers: Peers | None = None,
    ) -> jax.Array:  # float32[..., V]
        """Logits of hidden states, on a mesh of [T, D]; ``axis`` and ``peers`` are as in
        ``StepContext``.
        """
        head = self.embed if self.spec.tie_word_embeddings else weight(self, "lm_head")
        if self.spec.embed_width is not None:
            hidden = hidden @ param(self, "project_out")
        if self.spec.head_activation is not None:
            hidden = ACTIVATIONS[self.spec.head_activation](hidden @ param(self, "head_in"))
            norm = self._outer_norm("head_norm")
            hidden = layer_norm(hidden, *norm.affine(), norm.eps, fixed=pins.invariant)
        logits = head.matmul(hidden, Matmul(pins, wide=True))
        if self.spec.head_bias:
            logits = logits + param(self, "lm_head_bias").astype(logits.dtype)
        if (factor := self.spec.head_scale) is not None:
            logits = logits * (param(self, "lm_head_scale").astype(logits.dtype) * factor)
        if (scale := self.spec.logit_scale) is not None:
            logits = logits * scale
        if (cap := self.spec.logit_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        if axis is not None:
            # the last devices may have zeros behind the vocabulary
            own = AllGatherArgs(x=logits, columns=self.spec.vocab_size, peers=peers, axis=axis)
            logits = all_gather(own, pins.of("all_gather"))
        for start, stop in self.spec.never:
            logits = logits.at[..., start:stop].set(jnp.finfo(logits.dtype).min)
        return logits
