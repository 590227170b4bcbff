"""``SCORE``: prompt logprobs, from the hidden states that buckets that score return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.step import Bucket, ScheduledSeq
from jaxinfer.exec.calls.call import Call, Work
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.exec.step.sampling import BLOCK, LOGPROBS_WIDTH, by_blocks, token_logprobs
from jaxinfer.models.base import Model, Params, unembed
from pallas_kernels.harness.pins import Pins

COPIES = 4  # live arrays float32[block, V] while prompts are scored; measured on a CPU: 2


def scored(
    model: Model,
    head: Params,  # see ``models.base.head_params``
    hidden: jax.Array,  # [Tp, D]
    target_ids: jax.Array,  # int32[Tp]: the token whose logprob is computed, else -1
    pins: Pins,
    axis: str | None = None,  # see ``StepContext``
) -> jax.Array:  # int32[Tp, ...]: see ``sampling.read_logprobs``
    """Logprobs of the target tokens of a step's prompts, a block of positions at a time."""

    def of_block(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = unembed(model, head, hidden, pins, axis)
        return token_logprobs(logits, targets, fixed=pins.invariant)

    return by_blocks(of_block, hidden, jnp.maximum(target_ids, 0))


def pack_targets(rows: Sequence[ScheduledSeq], num_tokens: int) -> np.ndarray:  # int32[Tp]
    """The targets of a step's prefill rows, concatenated; -1 for tokens without a target."""
    targets = np.full(num_tokens, -1, np.int32)
    ends = accumulate(row.num_scheduled_tokens for row in rows)
    for row, end in zip(rows, ends, strict=True):
        if row.target_ids is not None:
            targets[end - len(row.target_ids) : end] = row.target_ids
    return targets


def score_bound(model: Model, num_tokens: int) -> int:
    """A bound on the bytes of a call that scores prompt tokens: logits of a block, and results."""
    logits = COPIES * min(num_tokens, BLOCK) * model.config.vocab_size
    results = 2 * LOGPROBS_WIDTH * num_tokens
    return 4 * (logits + results) + model.config.hidden_size * num_tokens * 4


def _size_of_bucket(bucket: Bucket) -> int:
    return bucket.num_prefill_tokens if bucket.scores else 0


def _sizes(shape: EngineShape) -> tuple[int, ...]:
    return tuple(sorted({*map(_size_of_bucket, shape.limits.buckets)} - {0}))


def _pack(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    del shape
    rows, num_tokens = work.plan.prefills, work.plan.bucket.num_prefill_tokens
    if any(row.target_ids is not None for row in rows):
        yield (pack_targets(rows, num_tokens),), num_tokens


SCORE = Call(
    "score",
    "after",
    lambda shape, _: partial(scored, shape.model, pins=shape.pins, axis=shape.placement.axis),
    lambda _, size: (pack_targets((), size),),
    _pack,
    reads=("head", "hidden"),
    has_result=True,
    sizes=_sizes,
    size_of_bucket=_size_of_bucket,
    workspace=lambda shape, size: score_bound(shape.model, size),
)
