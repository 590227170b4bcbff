"""The pure step: (weights, state, slots, batch) -> (state, slots, output).

One call computes a bucket's rows, draws their tokens and writes them into the slots. The step is
compiled whole, or split into two parts.

If it is split, the device runs the first part while the host launches the second. For a whole
prompt step of 1,024 tokens (Qwen3-4B, H200) the device waits 1.3 ms between the batch's copy and
the first kernel, as the host prepares every argument (1 us for each) and every kernel. A first part
with a quarter of the layers, and only their weights as arguments, takes a quarter of that. See
``docs/notes/0006-prompt-steps.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.core.points import Point
from jaxinfer.exec.step.batch import BatchLayout, DeviceBatch, copy_batch, unpack
from jaxinfer.exec.step.drafts import NO_TOKEN, DraftContext, Drafter, num_accepted
from jaxinfer.exec.step.points import Steering, StepEdits, points_of_step, read_points
from jaxinfer.exec.step.pooling import pooled
from jaxinfer.exec.step.sampling import NOT_FINITE, Awaited, place_to_publish, sample
from jaxinfer.exec.step.slots import SlotState, written_rows
from jaxinfer.models.base import (
    Model,
    Params,
    abstract_params,
    first_layers,
    hidden_states,
    layer_of,
    other_layers,
    unembed,
)
from jaxinfer.models.params import nested
from jaxinfer.nn.context import StepContext
from jaxinfer.nn.state import State
from pallas_kernels.all_reduce.api import Peers
from pallas_kernels.harness.pins import Pins
from pallas_kernels.publish.api import PublishArgs, publish

type Arrays = tuple[jax.Array, ...]


def flat_params(model: Model, params: Params) -> Arrays:
    """The weights as arguments of a compiled step; raises ``ValueError`` for another model's."""
    return tuple(jax.tree.structure(abstract_params(model)).flatten_up_to(params))


class Part(NamedTuple):
    """Consecutive layers of a step, and its arguments: indices into weights and state arrays."""

    layers: range
    weights: tuple[int, ...]
    arrays: tuple[int, ...]


def part_of(model: Model, layers: range) -> Part:
    """The part with these layers. Every part has the weights outside the layers.

    (The embedding may also be the head.)
    """
    paths = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    owners = [layer_of(path[0].key) for path, _ in paths]
    weights = (i for i, layer in enumerate(owners) if layer is None or layer in layers)
    return Part(layers, tuple(weights), model.state.arrays_of(layers))


class StepOutput(NamedTuple):
    """The results of a step in addition to its state."""

    # int32[N]: the tokens of each row, see ``Draws``; ``NO_TOKEN`` after a refused draft,
    # undefined if the row draws none
    token_ids: jax.Array
    hidden: jax.Array | None = None  # [Tp, D] of all prompt tokens, if the bucket scores
    taps: jax.Array | None = None  # [T, W of all points], if the bucket taps
    pooled: jax.Array | None = None  # float32[R, D], if the engine pools


@dataclass(frozen=True)
class StepFunction:
    """The step of one bucket, or a part of it; its state and slots are donated.

    It has no branches, so the host never waits within it on a GPU.
    """

    model: Model
    layout: BatchLayout
    part: Part
    keeps_logits: bool  # whether ``SlotState.drawn_from`` holds logits, else hidden states
    pins: Pins = Pins()
    copies_batch: bool = False  # see ``batch.copy_batch``
    zeros_padding: bool = False  # see ``StepContext``
    reads_masks: bool = False  # see ``Program.reads_masks``
    drafter: Drafter | None = None
    points: tuple[Point, ...] = ()  # if the bucket taps
    pooling: str = ""  # if the engine pools: one of ``core.pooling.KINDS``
    edits: StepEdits | None = None
    axis: str | None = None  # see ``StepContext``

    def first_part(
        self,
        weights: Arrays,  # of the part
        arrays: Arrays,  # of the part
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
    ) -> tuple[Arrays, jax.Array]:
        """The first layers of a split step: their state, and the residual stream after them
        [T, n * D].

        The stream is one array, so that two arrays of one size are never in use at a time
        (``batch.copy_batch``).

        Each call traverses all of its arguments, which takes 10 % longer for nested dicts than for
        flat weights.
        """
        params, state = self._inputs(weights, arrays)
        batch, ctx = self._begin(slots, flat)
        count = self.part.layers.stop
        x, state = first_layers(self.model, params, batch.token_ids, ctx, state, count)
        return self._own(state), x

    def last_part(
        self,
        weights: Arrays,  # of the part
        arrays: Arrays,  # of the part
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
        x: jax.Array | None = None,  # [T, n * D]
    ) -> tuple[Arrays, SlotState, StepOutput]:
        """The other layers and the draws of a split step; without ``x``, the whole step.

        It unpacks the batch again instead of getting more arrays from the first part. That is
        cheap, and kernels that read an array in new memory would be recorded again in the CUDA
        graph.
        """
        params, state = self._inputs(weights, arrays)
        batch, ctx = self._begin(slots, flat)
        only = batch.rows.last_tokens if self._ends_with_last_tokens else None
        if x is None:
            hidden, state = hidden_states(self.model, params, batch.token_ids, ctx, state, only)
            assert state is not None
        else:
            begin = self.part.layers.start
            ids = batch.token_ids
            hidden, state = other_layers(self.model, params, x, ids, ctx, state, begin, only)
        of_drafter = weights[len(self.part.weights) :]
        return self._own(state), *self._draw(params, slots, batch, ctx, hidden, of_drafter)

    def tapped(
        self,
        weights: Arrays,
        arrays: Arrays,
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
        steering: Steering,
    ) -> tuple[Arrays, SlotState, StepOutput]:
        """The whole step of a bucket that taps: steered rows are shifted at the points, and all
        activations there are returned. Rows without steering get every bit of a plain step.
        """
        params, state = self._inputs(weights, arrays)
        batch, ctx = self._begin(slots, flat)
        points = points_of_step(self.points, steering, batch, self.axis)
        ctx = replace(ctx, points=points)
        hidden, state = hidden_states(self.model, params, batch.token_ids, ctx, state)
        assert state is not None
        slots, output = self._draw(params, slots, batch, ctx, hidden)
        return self._own(state), slots, output._replace(taps=read_points(self.points, points))

    def _inputs(self, weights: Arrays, arrays: Arrays) -> tuple[Params, State]:
        """The weights and state of the part; the arrays of other layers are None."""
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(abstract_params(self.model))
        ]
        own = zip(self.part.weights, weights, strict=False)  # the drafter's may follow
        params = nested({names[i]: w for i, w in own})
        given = dict(zip(self.part.arrays, arrays, strict=True))
        state = tuple(given.get(i) for i in range(len(self.model.state.arrays)))
        return params, state  # type: ignore[return-value]

    def _own(self, state: State) -> Arrays:
        return tuple(state[i] for i in self.part.arrays)

    def _begin(self, slots: SlotState, flat: jax.Array) -> tuple[DeviceBatch, StepContext]:
        """The batch, and the context of the layers."""
        flat = copy_batch(flat) if self.copies_batch else flat
        batch, bucket = unpack(flat, self.layout, slots), self.layout.bucket
        ctx = StepContext(
            positions=batch.positions,
            rows=batch.rows,
            pages=batch.pages,
            arrivals=self._arrivals(),
            # rows with drafts attend as prompts do, so they do not count as decodes
            num_decodes=bucket.num_decodes if bucket.query_tokens == 1 else 0,
            pins=self.pins,
            zeros_padding=self.zeros_padding,
            axis=self.axis,
            peers=self._peers(batch),
            points=None if self.edits is None else self.edits.points(batch, self.axis),
        )
        return batch, ctx

    def _peers(self, batch: DeviceBatch) -> Peers | None:
        if not self.layout.num_peers:
            return None
        rank = lax.axis_index(self.axis).reshape(1).astype(jnp.int32)
        decodes = not self.layout.bucket.num_prefills
        return Peers(rank=rank, addresses=batch.peers, decodes=decodes).ordered()

    def _draw(
        self,
        params: Params,
        slots: SlotState,
        batch: DeviceBatch,
        ctx: StepContext,
        hidden: jax.Array,  # [T, D], or [B, D] if only last tokens were computed
        of_drafter: Arrays = (),  # its parameters
    ) -> tuple[SlotState, StepOutput]:
        """Draw the tokens of each row and write them into its slot."""
        if self.pooling:
            return self._pool(slots, batch, hidden)
        bucket, rows = self.layout.bucket, batch.rows
        if bucket.num_prefills:
            new = slots.settings.at[rows.slots[bucket.num_decodes :]].set(batch.settings)
            slots = slots._replace(settings=new)
        is_one_per_draw = self._ends_with_last_tokens or not bucket.num_prefills
        drawn_from = hidden if is_one_per_draw else hidden[batch.draws.tokens]  # [N, D]
        mesh = self.pins, self.axis, ctx.peers
        logits = unembed(self.model, params, drawn_from, *mesh)  # [N, V]
        awaited = Awaited(batch.masked, batch.mask_place) if self.reads_masks else None
        own, lens = batch.draws.slots, batch.draws.lens
        token_ids, masked = sample(logits, slots, own, lens, self.pins, awaited=awaited)
        # rows that waited are not drawn again; to keep raw logits, XLA would copy those of all rows
        kept = masked if self.keeps_logits else drawn_from
        token_ids, slots = self._record(slots, batch, token_ids, kept, drawn_from, of_drafter)
        place = place_to_publish(batch.place, self.axis)
        published = PublishArgs(tokens=token_ids, place=place)
        token_ids = publish(published, self.pins.of("publish"))
        scored = hidden[bucket.num_decode_tokens :] if bucket.scores else None
        return slots, StepOutput(token_ids, scored)

    def _pool(
        self,
        slots: SlotState,
        batch: DeviceBatch,
        hidden: jax.Array,  # [T, D], or [R, D] if only last tokens were computed
    ) -> tuple[SlotState, StepOutput]:
        """The vector of each row's tokens up to here. Its token says only whether it is finite."""
        own, vectors = pooled(self.pooling, hidden, batch, slots.drawn_from)
        token_ids = jnp.where(jnp.isfinite(vectors).all(axis=1), 0, NOT_FINITE)
        place = place_to_publish(batch.place, self.axis)
        published = PublishArgs(tokens=token_ids, place=place)
        token_ids = publish(published, self.pins.of("publish"))
        return slots._replace(drawn_from=own), StepOutput(token_ids, pooled=vectors)

    @property
    def _ends_with_last_tokens(self) -> bool:
        """True if the last layers compute only the last token of each row (``run_layers``).

        Prompts need no other outputs, unless the bucket scores or all tokens are pooled. Edits are
        of all tokens.
        """
        bucket = self.layout.bucket
        others = bucket.num_decodes or bucket.scores or self.pooling not in ("", "last")
        others = others or self.edits is not None
        return bool(bucket.num_prefills) and not others

    def _arrivals(self) -> jax.Ref | None:
        """Zeros for the counters of ``append_decode``, made once per step.

        None in a step that needs none, or for a model without keys and values.
        """
        bucket = self.layout.bucket
        heads = max((e.shape[0] for e in self.model.state.arrays if e.name == "k"), default=0)
        decodes = bucket.num_decodes if bucket.query_tokens == 1 else 0
        return jax.new_ref(jnp.zeros(decodes * heads, jnp.int32)) if decodes * heads else None

    def _record(
        self,
        slots: SlotState,
        batch: DeviceBatch,
        token_ids: jax.Array,  # int32[N]
        drawn_from: jax.Array,  # [N, D] or float32[N, V]
        hidden: jax.Array,  # [N, D]
        of_drafter: Arrays,
    ) -> tuple[jax.Array, SlotState]:
        """The tokens, and the slots with each token at its position and the input of its last draw.

        Rows that draw none write no token. The tokens after a refused draft are ``NO_TOKEN`` and
        are not written. With a drafter the slot stores the new length of the sequence and drafts of
        the next tokens.
        """
        bucket, draws = self.layout.bucket, batch.draws
        drawn, lengths = batch.samples, batch.seq_lens + batch.samples.astype(jnp.int32)
        if batch.drafts is not None:
            d, q = bucket.num_decodes, bucket.query_tokens
            draws_of_rows = token_ids[: d * q].reshape(d, q)
            accepted = num_accepted(batch.drafts.token_ids, draws_of_rows, batch.drafts.limits)
            index = jnp.arange(d * q, dtype=jnp.int32)
            drawn = jnp.concatenate((index % q <= accepted[index // q], batch.samples[d:]))
            token_ids = jnp.where(drawn, token_ids, NO_TOKEN)
            prefills = d * q + jnp.arange(bucket.num_prefills)
            last = jnp.concatenate((jnp.arange(d) * q + accepted, prefills))
            drawn_from, hidden = drawn_from[last], hidden[last]
            lengths = jnp.concatenate((batch.rows.begins[:d] + 2 + accepted, lengths[d:]))
        if slots.lengths is not None:
            slots = slots._replace(lengths=slots.lengths.at[batch.rows.slots].set(lengths))
        position = jnp.where(drawn, draws.lens, slots.token_ids.shape[1])
        slots = slots._replace(
            token_ids=slots.token_ids.at[draws.slots, position].set(token_ids, mode="drop"),
            drawn_from=written_rows(slots.drawn_from, batch.rows.slots, drawn_from),
        )
        if self.drafter is not None:
            assert slots.drafts is not None and slots.drafter is not None
            ctx = DraftContext(batch.rows.slots, batch.rows.begins, lengths, batch.samples)
            params = self.drafter.params_of(of_drafter)
            drafts, state = self.drafter.propose(params, slots.drafter, slots, hidden, ctx)
            assert drafts.shape == (len(lengths), self.drafter.count), "``count`` tokens a row"
            slots = slots._replace(drafts=slots.drafts.at[ctx.slots].set(drafts), drafter=state)
        return token_ids, slots
