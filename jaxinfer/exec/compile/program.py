"""Names and traces every executable of an engine: the steps of the buckets, and a few small others.

It needs shapes only, no weights and no device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from string import digits
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.core.config import Limits
from jaxinfer.core.constraint import BITS
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.shapes import cdiv, ladder, round_up
from jaxinfer.core.step import Bucket, SlotAdmission
from jaxinfer.exec.step.batch import BatchLayout
from jaxinfer.exec.step.drafts import Drafter
from jaxinfer.exec.step.extras import BLOCK, ExtrasFunction, pack_extras, scored
from jaxinfer.exec.step.forward import Part, StepFunction, flat_params, part_of
from jaxinfer.exec.step.points import Steering, StepEdits, steered
from jaxinfer.exec.step.slots import SlotState, admit, empty_rows, init_slots, slot_rows
from jaxinfer.models.base import Model, Params, head_params
from jaxinfer.models.params import nested
from jaxinfer.nn.placement import Placement, default_placement
from jaxinfer.nn.state import State
from pallas_kernels.mask.api import reads_board
from pallas_kernels.pins import LINKS, Pins
from pallas_kernels.registry import UnfitKernel, current_platform

ADMIT = "admit"
EXTRAS = "extras"  # prefix of executables that draw with extras; the number of rows follows
SCORE = "score"  # prefix of executables that score prompts; the number of tokens follows
STEER = "steer"  # writes the steering of a request into its slot
FIRST = "_first"  # suffix of the first executable of a split step
ROWS_PER_ADMIT = 8  # slots that a call of ``ADMIT`` fills on a GPU
# Up to this many decode rows, let XLA autotune matmuls (Triton or cuBLAS). The head's matmul is
# then bound by memory, and Triton's reaches that bound (Qwen3-4B, H200, 8 rows: 176 us). For larger
# steps cuBLAS's default is as fast as the autotuned choice (4,096 tokens: 57.5 ms, autotuned 58.0;
# 16,384 tokens: 331 ms and 332), and autotuning took half of XLA's time in a first start.
AUTOTUNED_ROWS = 32
ONLY_CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0})
# The memory plan nearly fills a GPU. XLA's allocator over virtual memory reports no limit, so XLA
# assumes 80 % of the card, and would recompute values to stay below.
NO_REMATERIALIZATION = MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})
# From this many tokens on, kernels are launched without a CUDA graph, as the host launches them
# much faster than the device runs them. A graph would not start sooner, and needs host memory.
NO_GRAPH_TOKENS = 1024
MIN_EXTRAS_ROWS = 8  # rows of a GPU's smallest executable that draws with extras; a CPU's has 1
# Of a CPU's largest one. With 32 rows of 49,152 glibc maps 37 MB anew at each call: 14 ms, not 5.
MAX_EXTRAS_ROWS_ON_CPU = 8
EXTRAS_ROWS_FACTOR = 8  # ratio of the numbers of rows of successive executables
# The first executable of a split prompt step has 1/4 of the layers (``forward``), which keep the
# device busy while the host launches the others. Qwen3-4B, H200, 512 tokens: 7.7 ms (a sixth of
# the layers: 7.9, not split: 8.3).
FIRST_PART_DIVISOR = 4
# Prompt steps of more tokens are not split: with 4,096 the gain is 1 %, and each further executable
# makes a first start longer.
MAX_SPLIT_TOKENS = 2048


@dataclass(frozen=True)
class Program:
    """Everything that determines the compiled executables: model, limits, platform, placement.

    Each bucket has one step, which serves every request. Extras are computed by a few small
    executables after the step (``exec.step.extras``), so only the number of a request's tokens
    determines its bucket.
    """

    model: Model
    limits: Limits
    platform: str = field(default_factory=current_platform)
    pins: Pins = Pins()
    placement: Placement = field(default_factory=default_placement)
    drafter: Drafter | None = None
    # functions that every step applies: executables with some must not be saved for other engines
    edits: StepEdits | None = None

    def __post_init__(self) -> None:
        """Check that the limits fit the model's groups of layers and the drafter's tokens."""
        own, planned = self.model.state.groups, self.limits.groups
        assert own == planned, f"limits are for groups {planned}, the model has {own}"
        align, planned = self.model.state.align, self.limits.align
        assert align == planned, f"limits align chunks to {planned} tokens, the model to {align}"
        query_tokens = 1 if self.drafter is None else 1 + self.drafter.count
        assert self.limits.query_tokens == query_tokens, "the drafter fills the decode rows"
        assert self.drafter is None or not self.limits.points, "drafts are not tapped"
        assert self.edits is None or not self.limits.points, "a step has edits or tapped points"
        decodes = any(bucket.num_decodes for bucket in self.limits.buckets)
        assert not (self.limits.pooling and decodes), "an engine that pools draws no tokens"
        has_state = bool(self.model.state.bytes_per_slot)
        snapshots, reuses = self.limits.num_snapshots > 0, self.limits.enable_prefix_caching
        if has_state and self.drafter is not None:
            raise ConfigError(
                "this model keeps a state for each sequence, which a refused draft would have "
                "changed; serve it without drafts"
            )
        assert has_state or not snapshots, "snapshots of a model without state for each sequence"
        assert snapshots or not (has_state and reuses), "prefix caching needs snapshots of state"

    def layout(self, bucket: Bucket) -> BatchLayout:
        """The wire layout of a bucket's batch."""
        return BatchLayout.of(bucket, self.limits)

    @cached_property  # used for each trace
    def params(self) -> Params:
        """The abstract weights."""
        abstract, arrays = self.placement.abstract, self.model.arrays
        return nested({path: abstract(a.shape, a.dtype, a.axes) for path, a in arrays.items()})

    def state(self) -> State:
        """The abstract layer state: the page pool, and the entries of slots and snapshots."""
        limits = self.limits
        sizes = (limits.num_pages, limits.page_size, limits.num_state_rows)
        return self.model.state.abstract(*sizes, self.placement)

    def slots(self) -> SlotState:
        """The abstract slot state, which is replicated on every device."""
        made = jax.eval_shape(self.zero_slots)
        return jax.tree.map(lambda a: self.placement.abstract(a.shape, a.dtype), made)

    def steering(self) -> Steering:
        """The abstract steering of slots, replicated; a table for each point."""
        rows = self.limits.max_num_seqs + 1
        widths = (point.width for point in self.limits.points)
        return tuple(self.placement.abstract((rows, width), jnp.float32) for width in widths)  # type: ignore[misc]

    def zero_slots(self) -> SlotState:
        """The initial slot state."""
        config, limits = self.model.config, self.limits
        drawn_from = jax.ShapeDtypeStruct((config.hidden_size,), config.dtype)
        if self.limits.pooling:
            drawn_from = jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)
        elif self.keeps_logits:
            drawn_from = jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)
        sizes = (limits.max_num_seqs, limits.max_model_len)
        return init_slots(*sizes, drawn_from, has_drafts=self.drafter is not None)

    def admission_rows(self, admissions: Sequence[SlotAdmission]) -> np.ndarray:
        """The argument of an ``ADMIT`` call."""
        limits = self.limits
        empty = empty_rows(self.rows_per_admit, limits.max_num_seqs, limits.max_model_len)
        return slot_rows(admissions, empty, self.model.config.vocab_size)

    @property
    def keeps_logits(self) -> bool:
        """True if slots keep the logits that a token was drawn from, or else its hidden state.

        With logits, extras need not compute them again. On a CPU 16 rows are small, and the head's
        matmul takes half as long as a step of SmolLM2-135M. On a GPU 512 rows of Qwen3-4B are
        311 MB, and the head's matmul takes 0.26 ms (H100).
        """
        return self.platform == "cpu"

    @property
    def draws_once(self) -> bool:
        """True if draws with extras do only what is needed: ``ExtrasFunction.draws_once``."""
        return self.platform == "cpu"

    @property
    def reads_masks(self) -> bool:
        """True if steps wait for masks on the mask board; else rows with masks are drawn again."""
        return self.drafter is None and reads_board(self.platform, self.pins.of("mask"))

    @cached_property
    def mask_words(self) -> int:
        """W: the uint32 words of a mask of the vocabulary."""
        return cdiv(self.model.config.vocab_size, BITS)

    @cached_property  # used for each step
    def extras_rows(self) -> tuple[int, ...]:
        """The rows of each executable that draws with extras; () in an engine that pools."""
        if self.limits.pooling:
            return ()
        most = self.limits.max_num_seqs
        first = min(MIN_EXTRAS_ROWS, most)
        if self.platform == "cpu":
            first, most = 1, min(MAX_EXTRAS_ROWS_ON_CPU, most)
        sizes = ladder(first, most, EXTRAS_ROWS_FACTOR)
        return tuple(size if size <= BLOCK else round_up(size, BLOCK) for size in sizes)

    def trace(self, name: str) -> jax.stages.Traced:
        """Trace one executable, by name; raises ``ConfigError`` for a kernel that cannot run."""
        try:
            return self._trace(name)
        except UnfitKernel as error:
            raise ConfigError(f"{name} cannot be compiled: {error}") from error

    def _trace(self, name: str) -> jax.stages.Traced:
        if name in self._steps:
            return self._trace_step(name)
        config, limits = self.model.config, self.limits
        if name == ADMIT:
            return jax.jit(admit, donate_argnums=0).trace(self.slots(), self.admission_rows(()))
        if name == STEER:
            wire = jax.ShapeDtypeStruct((1 + sum(p.width for p in limits.points),), jnp.int32)
            return jax.jit(steered, donate_argnums=0).trace(self.steering(), wire)
        kind, count = _kind_and_count(name)
        head = head_params(self.params)
        if kind == EXTRAS:
            draw = ExtrasFunction(self.model, count, self.keeps_logits, self.pins, self.draws_once)
            wire = pack_extras((), count, limits.max_num_seqs)
            masks = jax.ShapeDtypeStruct((count, self.mask_words), jnp.uint32)
            return jax.jit(draw, donate_argnums=1).trace(head, self.slots(), wire, masks)
        hidden = jax.ShapeDtypeStruct((count, config.hidden_size), config.dtype)
        assert kind == SCORE, name
        targets = jax.ShapeDtypeStruct((count,), jnp.int32)
        score = jax.jit(scored, static_argnums=(0, 4))
        return score.trace(self.model, head, hidden, targets, self.pins)

    def _trace_step(self, name: str) -> jax.stages.Traced:
        bucket, part = self._steps[name]
        function, config = self._function(bucket, part), self.model.config
        arguments = self._arguments(function)
        if bucket.taps:
            return self._trace_shares(function.tapped, (*arguments, self.steering()))
        if part.layers.stop < len(config.layers):
            return self._trace_shares(function.first_part, arguments, keeps_slots=True)
        if part.layers.start:
            stream = jax.ShapeDtypeStruct((bucket.num_tokens, config.stream_width), config.dtype)
            arguments = (*arguments, stream)
        return self._trace_shares(function.last_part, arguments)

    def _trace_shares(
        self, step: Callable[..., Any], arguments: tuple[Any, ...], *, keeps_slots: bool = False
    ) -> jax.stages.Traced:
        """Trace a step, on several devices with each one's share of weights and state.

        Its other arguments and results are whole on each device, and equal. The state, the second
        argument, is donated, and the slots unless it ``keeps_slots``.
        """
        if self.placement.num_devices > 1:
            given = jax.tree.map(_partition, arguments)
            whole = (PartitionSpec(),) if keeps_slots else (PartitionSpec(), PartitionSpec())
            step = jax.shard_map(
                step,
                mesh=self.placement.mesh,
                in_specs=given,
                out_specs=(given[1], *whole),
                check_vma=False,  # it does not know this library's kernels
            )
        return jax.jit(step, donate_argnums=1 if keeps_slots else (1, 2)).trace(*arguments)

    def _function(self, bucket: Bucket, part: Part) -> StepFunction:
        return StepFunction(
            self.model,
            self.layout(bucket),
            part,
            self.keeps_logits,
            self.pins,
            copies_batch=self.platform != "cpu",
            reads_masks=self.reads_masks,
            drafter=self.drafter,
            points=self.limits.points if bucket.taps else (),
            pooling=self.limits.pooling,
            edits=self.edits,
            axis=self.placement.axis,
        )

    def _arguments(self, function: StepFunction) -> tuple[Any, ...]:
        weights, state, own = flat_params(self.model, self.params), self.state(), function.part
        return (
            tuple(weights[i] for i in own.weights),
            tuple(state[i] for i in own.arrays),
            self.slots(),
            function.layout.abstract(),
        )

    def compiler_options(self, name: str) -> dict[str, Any]:
        """XLA's compiler options for one executable, by name."""
        if self.platform == "cpu":
            return {}
        is_step = name in self._steps
        # the rows of the head's matmul are decode rows
        bucket = self._steps[name][0] if is_step else Bucket(_kind_and_count(name)[1])
        options: dict[str, Any] = dict(NO_REMATERIALIZATION)
        decodes_few = bucket.num_seqs <= AUTOTUNED_ROWS and not bucket.num_prefills
        # XLA does not use cuBLAS for a matrix and one vector: without Triton it multiplies in
        # float32, with a copy of the head (Qwen3-4B on an H200: 1.6 GB of workspace).
        if not decodes_few and bucket.num_seqs > 1:
            options |= ONLY_CUBLAS
        # A graph is recorded again when its memory has moved, and that of rare calls always has.
        if bucket.num_tokens >= NO_GRAPH_TOKENS or not is_step:
            options["xla_gpu_enable_command_buffer"] = ""  # none of the kinds of kernels
        return options

    def links_kernels(self, name: str) -> bool:
        """True if neighbouring kernels of an executable become one linked call.

        Each of them may then start early (``pallas_kernels.pdl``). This is done in steps that only
        decode, as their kernels are short.
        """
        if name not in self._steps:
            return False
        bucket, _ = self._steps[name]
        decodes = bucket.num_prefills == 0 and bucket.query_tokens == 1
        return decodes and self.platform != "cpu" and self.pins.of(LINKS) is None

    def is_split(self, bucket: Bucket) -> bool:
        """True if the step of a bucket is split into two executables.

        On a GPU, steps with only prompts are: often no other step runs while the host launches
        them. Buckets that score are not, as they are rarely used.
        """
        only_prompts = 0 < bucket.num_prefill_tokens <= MAX_SPLIT_TOKENS and not (
            bucket.num_decodes or bucket.scores or bucket.taps or self.edits
        )
        return self.platform != "cpu" and only_prompts and len(self.parts) > 1

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a split step; a single one if the model has too few layers."""
        depth = len(self.model.config.layers)
        borders = dict.fromkeys((0, depth // FIRST_PART_DIVISOR, depth))
        return tuple(part_of(self.model, range(*pair)) for pair in pairwise(borders))

    def stream_bytes(self, name: str, compiled: jax.stages.Compiled) -> int:
        """Bytes of the residual stream that a split step's second executable gets; else 0."""
        if name not in self._steps or not self._steps[name][1].layers.start:
            return 0
        *_, x = compiled.args_info[0]
        return prod(x.shape) * x.dtype.itemsize

    def names(self) -> tuple[str, ...]:
        """The names of all executables that requests can need."""
        sizes = sorted({b.num_prefill_tokens for b in self.limits.buckets if b.scores})
        return (
            ADMIT,
            *([STEER] if self.limits.points else []),
            *(f"{EXTRAS}{rows}" for rows in self.extras_rows),
            *(f"{SCORE}{size}" for size in sizes),
            *self._steps,
        )

    def names_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The names of the executables that a step of this bucket may call; others are shared."""
        parts = (bucket.name + FIRST, bucket.name) if self.is_split(bucket) else (bucket.name,)
        tokens = bucket.num_prefill_tokens
        score = (f"{SCORE}{tokens}",) if bucket.scores else ()
        return (*parts, *score)

    @property
    def rows_per_admit(self) -> int:
        """The number of slots that a call of ``ADMIT`` fills: a launch takes longer than a call."""
        return 1 if self.platform == "cpu" else ROWS_PER_ADMIT

    @cached_property
    def _steps(self) -> dict[str, tuple[Bucket, Part]]:
        """The bucket and the layers of each executable of a step."""
        whole = part_of(self.model, range(len(self.model.config.layers)))
        steps: dict[str, tuple[Bucket, Part]] = {}
        for bucket in self.limits.buckets:
            parts = self.parts if self.is_split(bucket) else (whole,)
            names = (bucket.name + FIRST, bucket.name)[-len(parts) :]
            steps |= {name: (bucket, part) for name, part in zip(names, parts, strict=True)}
        return steps


def _partition(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _kind_and_count(name: str) -> tuple[str, int]:
    """The kind of an executable that is not a step, and the number at the end of its name, or 0."""
    kind = name.rstrip(digits)
    return kind, int(name[len(kind) :] or 0)
