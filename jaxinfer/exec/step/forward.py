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

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.exec.step.batch import BatchLayout, DeviceBatch, copy_batch, unpack
from jaxinfer.exec.step.drafts import NO_TOKEN, Drafter, num_accepted
from jaxinfer.exec.step.sampling import sample
from jaxinfer.exec.step.slots import SlotState, with_settings
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
from jaxinfer.nn.linear import Stream
from jaxinfer.nn.state import State
from pallas_kernels.pins import Pins
from pallas_kernels.publish.api import publish

type Arrays = tuple[jax.Array, ...]


def flat_params(model: Model, params: Params) -> Arrays:
    """The weights as arguments of a compiled step; raises ``ValueError`` for another model's."""
    return tuple(jax.tree.structure(abstract_params(model)).flatten_up_to(params))


class Part(NamedTuple):
    """The arguments of one half of a split step: indices into weights and state arrays."""

    weights: tuple[int, ...]
    arrays: tuple[int, ...]


def parts_of(model: Model, num_first: int) -> tuple[Part, Part]:
    """The parts with the first layers and with the others.

    Weights outside the layers are in both (the embedding may also be the head).
    """
    paths = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    layers = [layer_of(path[0].key) for path, _ in paths]
    first = (i for i, layer in enumerate(layers) if layer is None or layer < num_first)
    others = (i for i, layer in enumerate(layers) if layer is None or layer >= num_first)
    arrays_of = model.state.arrays_of
    return (
        Part(tuple(first), arrays_of(range(num_first))),
        Part(tuple(others), arrays_of(range(num_first, model.config.num_hidden_layers))),
    )


class StepOutput(NamedTuple):
    """The results of a step in addition to its state."""

    # int32[N]: the tokens of each row, see ``Draws``; ``NO_TOKEN`` after a refused draft,
    # undefined if the row draws none
    token_ids: jax.Array
    hidden: jax.Array | None = None  # [Tp, D] of all prompt tokens, if the bucket scores


@dataclass(frozen=True)
class StepFunction:
    """The step of one bucket: a pure function. ``flat_step`` is compiled, state and slots donated.

    It has no branches, so the host never waits within it on a GPU.
    """

    model: Model
    layout: BatchLayout
    keeps_logits: bool  # whether ``SlotState.drawn_from`` holds logits, else hidden states
    pins: Pins = Pins()
    copies_batch: bool = False  # see ``batch.copy_batch``
    drafter: Drafter | None = None

    def __call__(
        self,
        params: Params,
        state: State,
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
    ) -> tuple[State, SlotState, StepOutput]:
        """Compute the rows, draw their tokens and write them into the slots."""
        batch, ctx = self._begin(slots, flat)
        only = batch.rows.last_tokens if self._ends_with_last_tokens else None
        hidden, new = hidden_states(self.model, params, batch.token_ids, ctx, state, only)
        assert new is not None
        return (new, *self._draw(params, slots, batch, hidden))

    def flat_step(
        self, weights: Arrays, state: State, slots: SlotState, flat: jax.Array
    ) -> tuple[State, SlotState, StepOutput]:
        """The step with flat weights, which is the compiled form.

        Each call traverses all of its arguments, which takes 10 % longer for nested dicts.
        """
        params = jax.tree.unflatten(jax.tree.structure(abstract_params(self.model)), weights)
        return self(params, state, slots, flat)

    def first_part(
        self,
        weights: Arrays,  # of the first ``Part``
        arrays: Arrays,  # of the first ``Part``
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
        *,
        num_first: int,
    ) -> tuple[Arrays, Stream]:
        """The first layers of a step: returns their state and the residual stream after them."""
        own, _ = parts_of(self.model, num_first)
        params, state = self._part_inputs(own, weights, arrays)
        batch, ctx = self._begin(slots, flat)
        stream, state = first_layers(self.model, params, batch.token_ids, ctx, state, num_first)
        return tuple(state[i] for i in own.arrays), stream

    def second_part(
        self,
        weights: Arrays,  # of the second ``Part``
        arrays: Arrays,  # of the second ``Part``
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
        stream: Stream,
        *,
        num_first: int,
    ) -> tuple[Arrays, SlotState, StepOutput]:
        """The other layers and the draws of a step.

        It unpacks the batch again instead of getting more arrays from the first part. That is
        cheap, and kernels that read an array in new memory would be recorded again in the CUDA
        graph.
        """
        _, own = parts_of(self.model, num_first)
        params, state = self._part_inputs(own, weights, arrays)
        batch, ctx = self._begin(slots, flat)
        only = batch.rows.last_tokens if self._ends_with_last_tokens else None
        hidden, state = other_layers(self.model, params, stream, ctx, state, num_first, only)
        slots, output = self._draw(params, slots, batch, hidden)
        return tuple(state[i] for i in own.arrays), slots, output

    def _part_inputs(self, part: Part, weights: Arrays, arrays: Arrays) -> tuple[Params, State]:
        """The weights and state of a part; the arrays of other layers are None."""
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(abstract_params(self.model))
        ]
        params = nested({names[i]: w for i, w in zip(part.weights, weights, strict=True)})
        given = dict(zip(part.arrays, arrays, strict=True))
        state = tuple(given.get(i) for i in range(len(self.model.state.arrays)))
        return params, state  # type: ignore[return-value]

    def _begin(self, slots: SlotState, flat: jax.Array) -> tuple[DeviceBatch, StepContext]:
        """The batch, and the context of the layers."""
        flat = copy_batch(flat) if self.copies_batch else flat
        batch, bucket = unpack(flat, self.layout, slots, self.drafter), self.layout.bucket
        ctx = StepContext(
            positions=batch.positions,
            rows=batch.rows,
            pages=batch.pages,
            arrivals=self._arrivals(),
            # rows with drafts attend as prompts do, so they do not count as decodes
            num_decodes=bucket.num_decodes if bucket.query_tokens == 1 else 0,
            pins=self.pins,
        )
        return batch, ctx

    def _draw(
        self,
        params: Params,
        slots: SlotState,
        batch: DeviceBatch,
        hidden: jax.Array,  # [T, D], or [B, D] if only last tokens were computed
    ) -> tuple[SlotState, StepOutput]:
        """Draw the tokens of each row and write them into its slot."""
        bucket, rows = self.layout.bucket, batch.rows
        if bucket.num_prefills:
            slots = with_settings(slots, rows.slots[bucket.num_decodes :], batch.settings)
        is_one_per_draw = self._ends_with_last_tokens or not bucket.num_prefills
        drawn_from = hidden if is_one_per_draw else hidden[batch.draws.tokens]  # [N, D]
        logits = unembed(self.model, params, drawn_from)  # [N, V]
        impl = self.pins.of("sample")
        token_ids = sample(logits, slots, batch.draws.slots, batch.draws.lens, impl)
        record = self._record if batch.drafts is None else self._record_accepted
        token_ids, slots = record(
            slots, batch, token_ids, logits if self.keeps_logits else drawn_from
        )
        token_ids = publish(token_ids, batch.place, impl=self.pins.of("publish"))
        scored = hidden[bucket.num_decode_tokens :] if bucket.scores else None
        return slots, StepOutput(token_ids, scored)

    @property
    def _ends_with_last_tokens(self) -> bool:
        """True if the last layer computes only the last token of each row.

        Prompts need no other outputs, unless the bucket scores.
        """
        bucket = self.layout.bucket
        return bool(bucket.num_prefills) and not (bucket.num_decodes or bucket.scores)

    def _arrivals(self) -> jax.Ref | None:
        """Zeros int32[num_decodes * K] for ``append_decode``, made once per step.

        None in a step without decode rows, or for a model without keys and values.
        """
        bucket = self.layout.bucket
        heads = max((e.shape[0] for e in self.model.state.arrays if e.name == "k"), default=0)
        if not bucket.num_decodes or bucket.query_tokens > 1 or not heads:
            return None
        return jax.new_ref(jnp.zeros(bucket.num_decodes * heads, jnp.int32))

    def _record(
        self,
        slots: SlotState,
        batch: DeviceBatch,
        token_ids: jax.Array,  # int32[B]
        drawn_from: jax.Array,  # [B, D] or float32[B, V]
    ) -> tuple[jax.Array, SlotState]:
        """The tokens, and the slots with each token at its position and the input of its draw.

        Rows that draw none write no token.
        """
        position = jnp.where(batch.samples, batch.seq_lens, slots.token_ids.shape[1])
        if slots.lengths is not None:
            known = batch.seq_lens + batch.samples.astype(jnp.int32)
            slots = slots._replace(lengths=slots.lengths.at[batch.rows.slots].set(known))
        return token_ids, slots._replace(
            token_ids=slots.token_ids.at[batch.rows.slots, position].set(token_ids, mode="drop"),
            drawn_from=slots.drawn_from.at[batch.rows.slots].set(drawn_from),
        )

    def _record_accepted(
        self,
        slots: SlotState,
        batch: DeviceBatch,
        token_ids: jax.Array,  # int32[N]
        drawn_from: jax.Array,  # [N, D] or float32[N, V]
    ) -> tuple[jax.Array, SlotState]:
        """As ``_record``, for decode rows with drafts.

        The tokens after a refused draft are ``NO_TOKEN`` and are not written. The slot stores the
        new length of the sequence.
        """
        bucket, draws, drafts = self.layout.bucket, batch.draws, batch.drafts
        assert drafts is not None and slots.lengths is not None
        d, q = bucket.num_decodes, bucket.query_tokens
        accepted = num_accepted(drafts.token_ids, token_ids[: d * q].reshape(d, q), drafts.limits)
        index = jnp.arange(d * q, dtype=jnp.int32)
        is_accepted = index % q <= accepted[index // q]
        drawn = jnp.concatenate((is_accepted, batch.samples[d:]))
        token_ids = jnp.where(drawn, token_ids, NO_TOKEN)
        position = jnp.where(drawn, draws.lens, slots.token_ids.shape[1])
        last = jnp.concatenate(
            (jnp.arange(d) * q + accepted, d * q + jnp.arange(bucket.num_prefills))
        )
        lengths = jnp.concatenate(
            (
                batch.rows.begins[:d] + 2 + accepted,
                batch.seq_lens[d:] + batch.samples[d:].astype(jnp.int32),
            )
        )
        return token_ids, slots._replace(
            token_ids=slots.token_ids.at[draws.slots, position].set(token_ids, mode="drop"),
            drawn_from=slots.drawn_from.at[batch.rows.slots].set(drawn_from[last]),
            lengths=slots.lengths.at[batch.rows.slots].set(lengths),
        )
