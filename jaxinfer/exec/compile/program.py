"""Names and traces every executable of an engine: the steps of the buckets, and a few small others.

It needs shapes only, no weights and no device memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import jax

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.step import TAPS, Bucket
from jaxinfer.exec.calls.call import Call
from jaxinfer.exec.calls.steer import tables
from jaxinfer.exec.calls.table import CALLS
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.exec.step.forward import Part, StepFunction, flat_params, part_of
from pallas_kernels.harness.pins import LINKS
from pallas_kernels.harness.registry import UnfitKernel
from pallas_kernels.lib.exchange import MAX_VALUES

FIRST = "_first"  # suffix of the first executable of a split step
# Up to this many decode rows, let XLA autotune matmuls (Triton or cuBLAS). The head's matmul is
# then bound by memory, and Triton's reaches that bound (Qwen3-4B, H200, 8 rows: 176 us). For larger
# steps cuBLAS's default is as fast as the autotuned choice (4,096 tokens: 57.5 ms, autotuned 58.0;
# 16,384 tokens: 331 ms and 332), and autotuning took half of XLA's time in a first start.
AUTOTUNED_ROWS = 32
ONLY_CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0})
# The memory plan nearly fills a GPU. XLA's allocator over virtual memory reports no limit, so XLA
# assumes 80 % of the card, and would recompute values to stay below.
NO_REMATERIALIZATION = MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})
# Kernels are launched one by one: a graph is recorded again when its memory has moved, and that of
# rare calls always has.
NO_GRAPH = MappingProxyType({"xla_gpu_enable_command_buffer": ""})  # none of the kinds of kernels
# XLA records a CUDA graph again whose temporaries have moved. On several devices they did at each
# step of 2 to 8 rows: Qwen3-8B on two H200s took 7.6 ms. With addresses of their own they do not
# move: 3.9 ms. On one GPU they do not move anyway (note 0008), and the time is the same.
KEPT_TEMPORARIES = MappingProxyType({"xla_gpu_command_buffer_update_mode": "SKIP_TEMP"})
# From this many tokens on, kernels are launched without a CUDA graph, as the host launches them
# much faster than the device runs them. A graph would not start sooner, and needs host memory.
NO_GRAPH_TOKENS = 1024
# The first executable of a split prompt step has 1/4 of the layers (``forward``), which keep the
# device busy while the host launches the others. Qwen3-4B, H200, 512 tokens: 7.7 ms (a sixth of
# the layers: 7.9, not split: 8.3).
FIRST_PART_DIVISOR = 4
# Prompt steps of more tokens are not split: with 4,096 the gain is 1 %, and each further executable
# makes a first start longer.
MAX_SPLIT_TOKENS = 2048
# Prompt steps of up to so many tokens, such as the rest of a reused prefix, take the device hardly
# longer than the host needs to launch them. They are not split, and have no CUDA graph, whose
# launch would have to end before the first kernel begins: the last 16 tokens of 4,096 take 6.0 ms
# (split, with graphs: 7.5; whole, with a graph: 6.8; Qwen3-4B, H200).
MAX_LAUNCHED_TOKENS = 128


@dataclass(frozen=True)
class Program(EngineShape):
    """The executables of an engine: a step for each bucket, which serves every request, and calls.

    Extras are computed by calls after the step (``exec.calls``), so only the number of a request's
    tokens determines its bucket.
    """

    def __post_init__(self) -> None:
        """Check that the limits fit the model's groups of layers and the drafter's tokens."""
        divided, devices = self.model.devices, self.placement.num_devices
        assert divided == devices, f"the model is divided among {divided} of {devices} devices"
        own, planned = self.model.state.groups, self.limits.groups
        assert own == planned, f"limits are for groups {planned}, the model has {own}"
        align, planned = self.model.state.align, self.limits.align
        assert align == planned, f"limits align chunks to {planned} tokens, the model to {align}"
        count = 0 if self.drafter is None else self.drafter.count
        assert self.limits.query_tokens <= 1 + count, "the drafter fills the decode rows"
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

    @cached_property  # used for each step
    def calls(self) -> tuple[Call, ...]:
        """The calls that requests can need: the library's, and those of the model's family."""
        own = self.model.family.calls
        assert not {c.name for c in CALLS} & {c.name for c in own}, "calls of one name"
        known = (*CALLS, *own)
        return tuple(call for call in known if call.sizes(self))

    @cached_property
    def _by_name(self) -> dict[str, tuple[Call, int]]:
        """The call and the size of each executable that is no step."""
        return {c.executable(size): (c, size) for c in self.calls for size in c.sizes(self)}

    def trace(self, name: str) -> jax.stages.Traced:
        """Trace one executable, by name; raises ``ConfigError`` for a kernel that cannot run."""
        try:
            return self._trace(name)
        except UnfitKernel as error:
            remedy = "; leave out batch_invariant" if self.pins.invariant else ""
            raise ConfigError(f"{name} cannot be compiled: {error}{remedy}") from error

    def _trace(self, name: str) -> jax.stages.Traced:
        if name in self._steps:
            return self._trace_step(name)
        call, size = self._by_name[name]
        return call.trace(self, size)

    def _trace_step(self, name: str) -> jax.stages.Traced:
        bucket, part = self._steps[name]
        function, config = self._function(bucket, part), self.model.config
        arguments = self._arguments(function)
        trace, donated = self.placement.trace, (1, 2)  # state and slots
        if TAPS in bucket.variants:
            return trace(function.tapped, (*arguments, tables(self)), donated)
        if part.layers.stop < len(config.layers):
            return trace(function.first_part, arguments, (1,))
        if part.layers.start:
            stream = jax.ShapeDtypeStruct((bucket.num_tokens, config.stream_width), config.dtype)
            arguments = (*arguments, stream)
        return trace(function.last_part, arguments, donated)

    def _function(self, bucket: Bucket, part: Part) -> StepFunction:
        return StepFunction(
            self.model,
            self.layout(bucket),
            part,
            self.keeps_logits,
            self.pins,
            copies_batch=self.platform != "cpu",
            zeros_padding=self.platform == "cpu",
            reads_masks=self.reads_masks,
            drafter=self.drafter,
            points=self.limits.points if TAPS in bucket.variants else (),
            pooling=self.limits.pooling,
            edits=self.edits,
            axis=self.placement.axis,
        )

    def _arguments(self, function: StepFunction) -> tuple[Any, ...]:
        weights, state, own = flat_params(self.model, self.params), self.state(), function.part
        ends = own.layers.stop == len(self.model.config.layers)
        return (
            (*(weights[i] for i in own.weights), *(self.drafter_weights if ends else ())),
            tuple(state[i] for i in own.arrays),
            self.slots(),
            function.layout.abstract(),
        )

    @property
    def drafter_weights(self) -> list[jax.ShapeDtypeStruct]:
        """The abstract parameters of the drafter, arguments of a step after the model's weights."""
        leaves = () if self.drafter is None else self.drafter.weights()
        return [self.placement.abstract(leaf.shape, leaf.dtype) for leaf in leaves]

    def compiler_options(self, name: str) -> dict[str, Any]:
        """XLA's compiler options for one executable, by name."""
        if self.platform == "cpu":
            return {}
        is_step = name in self._steps
        # the rows of the head's matmul are decode rows, and the sizes of calls
        bucket = self._steps[name][0] if is_step else Bucket(self._by_name[name][1])
        options: dict[str, Any] = dict(NO_REMATERIALIZATION)
        if self.placement.num_hosts > 1:  # only host 0 compiles
            options["xla_gpu_shard_autotuning"] = False
        decodes_few = bucket.num_seqs <= AUTOTUNED_ROWS and not bucket.num_prefills
        # XLA does not use cuBLAS for a matrix and one vector: without Triton it multiplies in
        # float32, with a copy of the head (Qwen3-4B on an H200: 1.6 GB of workspace).
        if not decodes_few and bucket.num_seqs > 1:
            options |= ONLY_CUBLAS
        is_long = bucket.num_tokens >= NO_GRAPH_TOKENS
        if is_long or not is_step or _is_short(bucket) or self._has_collectives(bucket):
            options |= NO_GRAPH
        elif self.placement.num_devices > 1:
            options |= KEPT_TEMPORARIES
        return options

    def _has_collectives(self, bucket: Bucket) -> bool:
        """True if a step with prompts on several devices adds their results by NCCL.

        XLA would make a graph of the kernels between each two sums. On two H200s answers of 2 to 8
        rows then took about 0.25 s longer (Qwen3-8B, 73 sums): probably to make these graphs.
        """
        values = bucket.num_tokens * self.model.config.stream_width
        own = self.num_peers > 0 and values <= MAX_VALUES
        return self.placement.num_devices > 1 and bucket.num_prefills > 0 and not own

    def links_kernels(self, name: str) -> bool:
        """True if neighbouring kernels of an executable become one linked call.

        Each of them may then start early (``pallas_kernels.lib.pdl``). This is done in steps that
        only decode, as their kernels are short, and in those of short prompts, for which the host
        then has fewer calls to launch.
        """
        if name not in self._steps:
            return False
        bucket, _ = self._steps[name]
        decodes = bucket.num_prefills == 0 and bucket.query_tokens == 1
        links = decodes or _is_short(bucket)
        return links and self.platform != "cpu" and self.pins.of(LINKS) is None

    def is_split(self, bucket: Bucket) -> bool:
        """True if the step of a bucket is split into two executables.

        On a GPU, steps with only prompts are: often no other step runs while the host launches
        them. Buckets that score are not, as they are rarely used.
        """
        only_prompts = 0 < bucket.num_prefill_tokens <= MAX_SPLIT_TOKENS and not (
            bucket.num_decodes or bucket.scores or bucket.variants or self.edits
        )
        splits = only_prompts and not _is_short(bucket) and len(self.parts) > 1
        return self.platform != "cpu" and splits

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a split step; a single one if the model has too few layers."""
        depth = len(self.model.config.layers)
        border = self.model.state.border_before(depth // FIRST_PART_DIVISOR)
        borders = dict.fromkeys((0, border, depth))
        return tuple(part_of(self.model, range(*pair)) for pair in pairwise(borders))

    def stream_bytes(self, name: str, compiled: jax.stages.Compiled) -> int:
        """Bytes of the residual stream that a split step's second executable gets; else 0."""
        if name not in self._steps or not self._steps[name][1].layers.start:
            return 0
        *_, x = compiled.args_info[0]
        return prod(x.shape) * x.dtype.itemsize

    def names(self) -> tuple[str, ...]:
        """The names of all executables that requests can need."""
        return (*self._by_name, *self._steps)

    def names_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The names of the executables that a step of this bucket may call; others are shared."""
        parts = (bucket.name + FIRST, bucket.name) if self.is_split(bucket) else (bucket.name,)
        return (*parts, *(call.executable(size) for call, size in self.calls_of(bucket)))

    def own_arrays(self) -> dict[str, Any]:
        """The abstract arrays that calls own, by the call's name."""
        return {call.name: call.owns(self) for call in self.calls if call.owns is not None}

    def calls_of(self, bucket: Bucket) -> list[tuple[Call, int]]:
        """The calls that only steps of this bucket make, with the size of each."""
        own = ((c, c.size_of_bucket(bucket)) for c in self.calls if c.size_of_bucket)
        return [(call, size) for call, size in own if size]

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


def _is_short(bucket: Bucket) -> bool:
    return 0 < bucket.num_prefill_tokens <= MAX_LAUNCHED_TOKENS and not bucket.num_decodes
