"""``EXTRAS``: draws tokens with extras after a step.

A step draws a token for each row from the raw logits. Rows with logit_bias, min_tokens, penalties,
masks or logprobs are drawn again by ``ExtrasFunction``, which has a fixed number of rows and no
layers, so it serves every bucket. It reads the input of the step's draw from the rows' slots, and
its tokens replace the step's in the slots before the next step reads them.

So no request changes the shape of a step that it shares with others, and extras take time only if a
row needs them: with Qwen3-4B on an H100 0.26 ms, to read the head's weights again. On a CPU a call
computes only what its rows need, and their draw in the step is cheap: see ``draws_once``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.constraint import ALL_TOKENS
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.sampling_checks import MAX_LOGPROBS
from jaxinfer.core.shapes import ladder, round_up
from jaxinfer.core.step import ScheduledSeq
from jaxinfer.exec.calls.call import Call, Work
from jaxinfer.exec.step.batch import ALIGN, NO_PLACE
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.exec.step.sampling import (
    BLOCK,
    LOGPROBS_WIDTH,
    SAMPLING_COPIES,
    any_extras,
    by_blocks,
    place_to_publish,
    sample,
    token_logprobs,
    with_extras,
    with_masks,
)
from jaxinfer.exec.step.slots import SlotState, read_settings
from jaxinfer.models.base import Model, Params, unembed
from pallas_kernels.harness.pins import Pins
from pallas_kernels.publish.api import PublishArgs, publish

WIRE_ROWS = 3 + MAX_LOGPROBS  # see ``pack_extras``
LOGPROBS = len(NO_PLACE)  # column of the first row: whether any row needs logprobs
HISTORY_COPIES = 12  # live arrays int32[block, max_model_len] for penalties; measured on a CPU: 10
MIN_ROWS = 8  # of a GPU's smallest executable; a CPU's has 1
# Of a CPU's largest one. With 32 rows of 49,152 glibc maps 37 MB anew at each call: 14 ms, not 5.
MAX_ROWS_ON_CPU = 8
ROWS_FACTOR = 8  # ratio of the numbers of rows of successive executables


class ExtrasOutput(NamedTuple):
    """Results of a call, for the host."""

    token_ids: jax.Array  # int32[N]
    logprobs: jax.Array  # int32[N, ...] of token_ids: see ``sampling.read_logprobs``


@dataclass(frozen=True)
class ExtrasFunction:
    """Draws ``rows`` tokens with extras: a pure function whose slots are donated."""

    model: Model
    rows: int
    keeps_logits: bool  # whether ``SlotState.drawn_from`` holds logits, else hidden states
    pins: Pins = Pins()
    # Whether the step has drawn nothing for these rows (see ``slots.settings_of``), and branches
    # skip logit_bias, min_tokens and penalties, and logprobs, if no row needs them: 0.7 of 1.2 ms
    # for 8 rows of SmolLM2 on two cores. On a GPU the host would wait for each branch.
    draws_once: bool = False
    axis: str | None = None  # see ``StepContext``

    def __call__(
        self,
        head: Params,  # see ``models.base.head_params``
        slots: SlotState,
        flat: jax.Array,  # int32[WIRE_ROWS * W]: see ``pack_extras``
        masks: jax.Array,  # uint32[rows, V / 32]: see ``sampling.with_masks``
    ) -> tuple[SlotState, ExtrasOutput]:
        """Draw tokens, write them into the slots and publish them."""
        wire = flat.reshape(WIRE_ROWS, -1)
        place, seq_slots, seq_lens = wire[0, : len(NO_PLACE)], *wire[1:3, : self.rows]
        named = wire[3:, : self.rows].T
        drawn_from = slots.drawn_from[seq_slots]
        logits = drawn_from
        if not self.keeps_logits:
            logits = unembed(self.model, head, drawn_from, self.pins, self.axis)

        def changed(logits: jax.Array, *of_rows: jax.Array) -> jax.Array:
            seq_slots, seq_lens, masks = of_rows
            biased = with_extras(logits, slots, seq_slots, seq_lens)
            return with_masks(logits, biased, masks)

        def drawn() -> jax.Array:
            biased = by_blocks(changed, logits, seq_slots, seq_lens, masks)
            return draw(changed=biased)[0]

        draw = partial(
            sample, logits, slots, seq_slots, seq_lens, self.pins, draws_once=self.draws_once
        )
        wanted = partial(any_extras, slots, seq_slots, seq_lens)
        token_ids = self._if(wanted, drawn, lambda: draw(masks=masks)[0])
        published = PublishArgs(tokens=token_ids, place=place_to_publish(place, self.axis))
        token_ids = publish(published, self.pins.of("publish"))

        def of_tokens() -> jax.Array:
            temperature = read_settings(slots, seq_slots)[1].logprobs_temperature
            of_block = partial(token_logprobs, fixed=self.pins.invariant)
            return by_blocks(of_block, logits, token_ids, temperature, named)

        nothing = partial(jnp.zeros, (self.rows, LOGPROBS_WIDTH + named.shape[1]), jnp.int32)
        logprobs = self._if(lambda: wire[0, LOGPROBS] > 0, of_tokens, nothing)
        history = slots.token_ids.at[seq_slots, seq_lens].set(token_ids, mode="drop")
        return slots._replace(token_ids=history), ExtrasOutput(token_ids, logprobs)

    def _if(
        self,
        wanted: Callable[[], jax.Array],  # bool[]
        function: Callable[[], jax.Array],
        other: Callable[[], jax.Array],
    ) -> jax.Array:
        """The result of ``function``; with ``draws_once`` the other one's result if not wanted."""
        return lax.cond(wanted(), function, other) if self.draws_once else function()


def pack_extras(
    rows: Sequence[ScheduledSeq],
    count: int,
    sink_slot: int,
    sampling: Sequence[SamplingParams] = (),  # of each row
) -> np.ndarray:  # int32[WIRE_ROWS * W]
    """The flat array of a call of ``count`` rows: place (not set here) and whether any row needs
    logprobs, slots, lengths, and up to ``MAX_LOGPROBS`` tokens that each row names. Each part is
    aligned for kernels.
    """
    wire = np.zeros((WIRE_ROWS, round_up(count, ALIGN)), np.int32)
    wire[0, LOGPROBS] = any([one.logprobs is not None for one in sampling])
    wire[1] = sink_slot
    wire[1, : len(rows)] = [row.slot for row in rows]
    wire[2, : len(rows)] = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
    for column, one in enumerate(sampling):
        if token_ids := one.logprob_token_ids:
            wire[3 : 3 + len(token_ids), column] = token_ids
    return wire.ravel()


def extras_bound(model: Model, rows: int, max_model_len: int) -> int:
    """A bound on the bytes of a call that draws ``rows`` rows with extras."""
    logits = SAMPLING_COPIES * rows * model.config.vocab_size
    return 4 * (logits + HISTORY_COPIES * min(rows, BLOCK) * max_model_len)


def extras_rows(shape: EngineShape) -> tuple[int, ...]:
    """The rows of each executable that draws with extras; () in an engine that pools."""
    if shape.limits.pooling:
        return ()
    most = shape.limits.max_num_seqs
    first = min(MIN_ROWS, most)
    if shape.platform == "cpu":
        first, most = 1, min(MAX_ROWS_ON_CPU, most)
    sizes = ladder(first, most, ROWS_FACTOR)
    return tuple(size if size <= BLOCK else round_up(size, BLOCK) for size in sizes)


def _function(shape: EngineShape, size: int) -> ExtrasFunction:
    of_engine = (shape.keeps_logits, shape.pins, shape.draws_once, shape.placement.axis)
    return ExtrasFunction(shape.model, size, *of_engine)


def _padding(shape: EngineShape, size: int) -> tuple[np.ndarray, np.ndarray]:
    masks = np.full((size, shape.mask_words), ALL_TOKENS, np.uint32)
    return pack_extras((), size, shape.limits.max_num_seqs), masks


def _pack(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    assert work.masks is not None, "rows are drawn again once their masks are known"
    sizes, rows = extras_rows(shape), work.plan.rows
    for indices in batched(work.drawn, sizes[-1]):
        own = [rows[i] for i in indices]
        count = next(size for size in sizes if size >= len(own))
        sampling = [work.requests[i].sampling for i in indices]
        wire = pack_extras(own, count, shape.limits.max_num_seqs, sampling)
        yield (wire, work.masks(own, count)), count, indices


EXTRAS = Call(
    "extras",
    "draw",
    _function,
    _padding,
    _pack,
    reads=("head", "slots"),
    donates="slots",
    has_result=True,
    sizes=extras_rows,
    workspace=lambda shape, size: extras_bound(shape.model, size, shape.limits.max_model_len),
)
