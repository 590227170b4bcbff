"""The pure step: (weights, kv_state, slots, batch) -> (kv_state, slots, output).

Owns: ``StepFunction``, its output, and the flat form in which it is compiled. One call computes a
bucket's rows, draws their tokens and records them in the slots. Must not know: who compiles it, the
scheduler, requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.exec.batch import BatchLayout, DeviceBatch, copied_in, unpack
from jaxinfer.exec.cut import WeightsOfParts
from jaxinfer.exec.sampling import Logprobs, no_logprobs, sample, token_logprobs
from jaxinfer.exec.slots import SlotState, admit, with_settings
from jaxinfer.models.base import Model, Params, abstract_params, hidden_states, unembed
from jaxinfer.nn.attention import PagedAttend
from jaxinfer.nn.kv import KVState, LayerKV
from pallas_kernels.pins import Pins
from pallas_kernels.publish.api import publish

PROMPT_LOGPROBS_BLOCK = 64  # positions whose logits are alive at once: 64 * V floats

type Arrays = tuple[jax.Array, ...]


def flat_params(model: Model, params: Params) -> Arrays:
    """Weights as ``flat_step`` takes them; ``ValueError`` for those of another model."""
    return tuple(jax.tree.structure(abstract_params(model)).flatten_up_to(params))


def weights_of_parts(model: Model, num_layers: int) -> WeightsOfParts:
    """Of ``flat_params``: those of the first layers and of the others. What is no layer's (the
    embedding, which may be the head) is in both.
    """
    paths = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    later = [_layer(path[0].key) for path, _ in paths]
    first = (i for i, layer in enumerate(later) if layer is None or layer < num_layers)
    second = (i for i, layer in enumerate(later) if layer is None or layer >= num_layers)
    return WeightsOfParts(tuple(first), tuple(second))


def _layer(name: str) -> int | None:
    """Which layer a group of parameters is, by its name in every family's module."""
    number = name.removeprefix("layers_")
    return int(number) if number != name else None


def flat_kv_state(kv_state: KVState) -> Arrays:
    """Pages as ``flat_step`` takes and returns them: K, V, K, V, ..."""
    return tuple(pages for layer in kv_state for pages in layer)


class StepOutput(NamedTuple):
    """What the host reads of a step."""

    token_ids: jax.Array  # int32[B]: the token each row drew; meaningless where it draws none
    logprobs: Logprobs | None = None  # of token_ids, [B]; None of a step without extras
    prompt_logprobs: Logprobs | None = None  # of target_ids, [Tp]; the same


@dataclass(frozen=True)
class StepFunction:
    """The step of one bucket: a pure function. ``flat_step`` is compiled, pages and slots donated.

    Without ``extras`` it has no branch, and no row may ask for any: see ``sampling.Extras``.
    """

    model: Model
    layout: BatchLayout
    page_size: int
    extras: bool
    pins: Pins = Pins()
    copies_in: bool = False  # the batch, to memory of the step's own: see ``batch.copied_in``

    def __call__(
        self,
        params: Params,
        kv_state: KVState,
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
    ) -> tuple[KVState, SlotState, StepOutput]:
        """Compute, draw, record."""
        flat = copied_in(flat) if self.copies_in else flat
        batch = unpack(flat, self.layout, slots.token_ids, self.page_size)
        num_decodes = self.layout.bucket.num_decodes
        if self.layout.bucket.num_prefills:
            slots = with_settings(slots, batch.seq_slots[num_decodes:], batch.settings)
        attend = PagedAttend(batch.attention, num_decodes, self._arrivals(), self.pins)
        last = batch.logits_indices if self._ends_with_last_tokens else None
        inputs = (batch.token_ids, batch.positions, kv_state, attend, self.pins, last)
        hidden, new_kv = hidden_states(self.model, params, *inputs)
        one_a_row = last is not None or not self.layout.bucket.num_prefills
        drawn_from = hidden if one_a_row else hidden[batch.logits_indices]  # [B, D]
        logits = unembed(self.model, params, drawn_from)  # [B, V]
        extras = batch.extras if self.extras else None
        seq_lens = batch.attention.seq_lens
        impl = self.pins.of("sample")
        token_ids = sample(logits, slots, batch.seq_slots, seq_lens, extras, impl)
        token_ids = publish(token_ids, batch.place, impl=self.pins.of("publish"))
        new_slots = self._record(slots, batch, token_ids)
        output = StepOutput(token_ids)
        if self.extras:
            output = StepOutput(
                token_ids=token_ids,
                logprobs=token_logprobs(logits, token_ids, batch.extras.logprobs),
                prompt_logprobs=self._prompt_logprobs(params, hidden, batch),
            )
        return new_kv, new_slots, output  # type: ignore[return-value]

    def flat_step(
        self,
        weights: Arrays,  # see ``flat_params``
        pages: Arrays,  # see ``flat_kv_state``
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
        rows: jax.Array | None = None,  # int32[A, ...]: see ``slots.RowSections``
    ) -> tuple[Arrays, SlotState, StepOutput]:
        """The same with flat arguments, which is what is compiled: each call walks all of them,
        and takes a tenth longer where they lie in nested dicts. ``rows``, of a step with extras,
        are admitted first: a lone prompt then takes one call, not two.
        """
        if rows is not None:
            slots = admit(slots, rows)
        params = jax.tree.unflatten(jax.tree.structure(abstract_params(self.model)), weights)
        kv_state = tuple(LayerKV(*both) for both in batched(pages, 2))
        kv_state, slots, output = self(params, kv_state, slots, flat)
        return flat_kv_state(kv_state), slots, output

    @property
    def _ends_with_last_tokens(self) -> bool:
        """Whether the last layer computes the last token of each row alone: all that a prompt
        without extras is asked for. Beside decode rows, rows would be as many as no other step has,
        and kernels for them are seconds of a start.
        """
        bucket = self.layout.bucket
        return bool(bucket.num_prefills) and not (bucket.num_decodes or self.extras)

    def _arrivals(self) -> jax.Ref | None:
        """Zeros for ``append_decode``, made once a step: int32[num_decodes * K]. None where nobody
        decodes.
        """
        bucket = self.layout.bucket
        if not bucket.num_decodes:
            return None
        heads = max(layer.num_kv_heads for layer in self.model.kv_spec.layers)
        return jax.new_ref(jnp.zeros(bucket.num_decodes * heads, jnp.int32))

    def _record(self, slots: SlotState, batch: DeviceBatch, token_ids: jax.Array) -> SlotState:
        """The slots with each drawn token at its position; rows that draw none write nothing."""
        position = jnp.where(batch.samples, batch.attention.seq_lens, slots.token_ids.shape[1])
        history = slots.token_ids.at[batch.seq_slots, position].set(token_ids, mode="drop")
        return slots._replace(token_ids=history)

    def _prompt_logprobs(
        self,
        params: Params,
        hidden: jax.Array,  # [T, D]
        batch: DeviceBatch,
    ) -> Logprobs:  # [Tp]
        """Logprobs of the prompt tokens that follow this step's, a block of positions at a time."""
        bucket = self.layout.bucket
        tokens = bucket.num_prefill_tokens
        if not tokens:
            return no_logprobs(0)
        block = min(PROMPT_LOGPROBS_BLOCK, tokens)
        padding = -tokens % block

        def compute(_: None) -> Logprobs:
            rows = jnp.pad(hidden[bucket.num_decodes :], ((0, padding), (0, 0)))
            targets = jnp.pad(jnp.maximum(batch.target_ids, 0), (0, padding))

            def one(arguments: tuple[jax.Array, jax.Array]) -> Logprobs:
                logits = unembed(self.model, params, arguments[0])
                return token_logprobs(logits, arguments[1], jnp.bool_(True))

            blocks = (rows.reshape(-1, block, rows.shape[1]), targets.reshape(-1, block))
            result = lax.map(one, blocks)
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:tokens], result)

        return lax.cond(batch.extras.prompt_logprobs, compute, lambda _: no_logprobs(tokens), None)
