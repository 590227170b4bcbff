"""The memory plan: the number of pages that fit, computed before anything is loaded or compiled.

The number of pages is part of every compiled shape, so it must be known before compilation, and it
depends on the workspace of executables. Compiling the largest step first, only to measure its
workspace, would nearly double the time of a first start; so the plan uses a bound computed from the
shapes. The measured workspace is in a bundle's manifest, and is checked against the plan when the
bundle is loaded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jaxinfer.core.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.limits import Limits
from jaxinfer.core.shapes import round_up
from jaxinfer.core.step import TAPS, Bucket
from jaxinfer.exec.compile.page_pools import fewest_pages, most_pages, split_pages
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.tier_memory import tier_memory
from jaxinfer.exec.step.sampling import SAMPLING_COPIES
from jaxinfer.models.base import Model, abstract_params, layer_of
from jaxinfer.models.quantised import sizes_by_form
from jaxinfer.nn.block import StepShape
from jaxinfer.nn.ngram_spec import without_table
from jaxinfer.nn.weight import matrices
from pallas_kernels.harness.pins import Pins
from pallas_kernels.lib.quantised import Quantised

MB = 1_000_000
# Quantised matrices that XLA holds dequantised at a time on a GPU, where it runs kernels in order.
DEQUANTISED_COPIES = 2
# live arrays of the inputs of layers: the embedding, the projection, the norm in float32, the sum
LAYER_INPUTS_COPIES = 5
TAPS_COPIES = 3  # live activations at points: themselves, what is added, the array of all
# Unplanned memory of a GPU: code and constants of executables, results of steps in flight (among
# them hidden states of 1,024 tokens), and arguments of calls other than steps.
RESERVE_BYTES = 256 << 20
MAPPED_BYTES = 2 << 20  # XLA's allocator over virtual memory rounds arrays up to this CUDA page
# The KV cache on a CPU is half as large as the weights, within these bounds. SmolLM2-135M's 8,192
# tokens of context need nearly all of the first; the second holds 3,600 tokens of Qwen3-4B.
MIN_KV, MAX_KV = 368 << 20, 1 << 30
MIN_SNAPSHOTS = 4  # also for an engine with fewer sequences
# Staging buffers of each size. Two steps are in flight, and the result of a step may be reported
# ready up to 1 ms after its end.
NUM_BUFFERS = 3


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory, and the part of it that JAX's allocator may take, in bytes."""

    total_bytes: int
    allocator_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of each device of an engine in bytes; ``num_pages`` includes the padding page.

    ``workspaces`` holds, by the name of the executable, a bound on its memory in addition to
    weights and state. ``device`` is None if it reports no memory (a CPU).
    """

    weights: dict[str, int]  # bytes by form, such as "int4 g128", or dtype
    page_bytes: tuple[int, ...]  # of a page of each pool
    num_pages: tuple[int, ...]
    slot_bytes: int
    state_bytes: int  # layer state of sequences, in slots and snapshots
    batch_bytes: int  # staging buffers for batches, and for units of tiers
    workspaces: dict[str, int]
    device: DeviceMemory | None
    num_devices: int = 1
    num_hosts: int = 1  # that have these devices

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on a device."""
        return sum(self.weights.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of all page pools."""
        return self.bytes_of(self.num_pages)

    def bytes_of(self, num_pages: Iterable[int]) -> int:
        """Bytes of so many pages of each pool."""
        pairs = zip(num_pages, self.page_bytes, strict=True)
        return sum(count * each for count, each in pairs)

    @property
    def workspace_bytes(self) -> int:
        """The bound of the largest workspace: only one executable runs at a time."""
        return max(self.workspaces.values())

    @property
    def total_bytes(self) -> int:
        """The sum of all planned memory."""
        state = self.kv_bytes + self.slot_bytes + self.state_bytes
        return self.weight_bytes + state + self.batch_bytes + self.workspace_bytes

    def described(self) -> str:
        """Two log lines before memory is allocated: the whole plan, and each workspace."""
        parts = [
            f"weights {shown(self.weight_bytes)}{_in_forms(self.weights)}",
            f"KV cache {shown(self.kv_bytes)} ({sum(self.num_pages)} pages)",
            f"slots {shown(self.slot_bytes)}",
        ]
        share = ""
        if self.state_bytes:
            parts.append(f"state of sequences and snapshots {shown(self.state_bytes)}")
        if self.device is not None:
            parts.append(f"batches {shown(self.batch_bytes)}")
            share = (
                f", {self.total_bytes / self.device.total_bytes:.1%} of the device's "
                f"{shown(self.device.total_bytes)}, of which JAX may take "
                f"{shown(self.device.allocator_bytes)}"
            )
        parts.append(f"workspace up to {shown(self.workspace_bytes)}")
        by_name = ", ".join(f"{name} {shown(bound)}" for name, bound in self.workspaces.items())
        each = f" of each of {self.num_devices} devices" if self.num_devices > 1 else ""
        return (
            f"memory{each}: {', '.join(parts)}: {shown(self.total_bytes)}{share}\n"
            f"workspace up to, by executable: {by_name}"
        )

    def measured(self, workspace_bytes: int) -> str:
        """One log line: the measured workspace of the executables."""
        return f"workspace: {shown(workspace_bytes)} of {shown(self.workspace_bytes)} planned"


def plan_memory(config: EngineConfig, program: Program, device: DeviceMemory | None) -> MemoryPlan:
    """The plan, with the number of pages, for a program whose limits have no pages yet.

    The number is the requested one or else the one that fits, and at most the pages that all slots
    can fill. ``device`` is None if it reports no memory (a CPU); then ``kv_cache_memory_bytes`` or
    its default is the budget. Raises ``ConfigError`` if the weights, a page for each sequence, or a
    context of ``config.max_model_len`` do not fit. If ``max_model_len`` is not set, the context may
    shrink to the pages instead.
    """
    limits = program.limits
    fixed = program_memory(program, device, has_tiers=config.kv_offloading_size is not None)
    reserve = reserve_bytes(program.model)
    budget = _kv_budget(config, fixed, reserve) - fixed.state_bytes
    most = sum(most_pages(limits))  # every slot at full length
    num_pages = config.num_pages
    if num_pages is None:
        num_pages = bisect_right(
            range(1, most + 1), budget, key=lambda n: fixed.bytes_of(split_pages(limits, n))
        )
    needed, what = _min_pages(config, limits)
    if num_pages < needed:
        needed_bytes = fixed.bytes_of(split_pages(limits, needed))
        raise ConfigError(
            f"{what} {needed} pages of KV cache ({shown(needed_bytes)}, the padding page "
            f"included) and there is room for {num_pages}; raise num_pages or "
            "kv_cache_memory_bytes (on a GPU: gpu_memory_utilization), or lower max_model_len or "
            "max_num_seqs"
        )
    plan = replace(fixed, num_pages=split_pages(limits, num_pages))
    if device is not None and plan.total_bytes + reserve > device.allocator_bytes:
        raise ConfigError(
            f"{sum(plan.num_pages)} pages of KV cache ({shown(plan.kv_bytes)}) and what else is "
            f"needed ({shown(fixed.total_bytes)} and a reserve of {shown(reserve)}) do not fit in "
            f"the {shown(device.allocator_bytes)} that JAX may take of the device; raise "
            "gpu_memory_utilization, or lower num_pages or kv_cache_memory_bytes"
        )
    return plan


def _min_pages(config: EngineConfig, limits: Limits) -> tuple[int, str]:
    """The smallest possible number of pages, and why, for an error message."""
    groups, pages_per_seq = len(limits.groups), limits.pages_needed(limits.max_model_len)
    each = "one page" if groups == 1 else f"{groups} pages"
    needed = [limits.max_num_seqs * count for count in limits.of_pools([1] * groups)]
    what = f"{limits.max_num_seqs} sequences (max_num_seqs) of {each} each need"
    derived = config.max_model_len is None or config.num_pages is not None
    if not derived and any(own > least for own, least in zip(pages_per_seq, needed, strict=True)):
        needed = [max(pair) for pair in zip(pages_per_seq, needed, strict=True)]
        what = f"a context of {limits.max_model_len} tokens needs"
    return fewest_pages(limits, [1 + count for count in needed]), what


def snapshots_for(config: EngineConfig, max_num_seqs: int) -> int:
    """The number of layer state snapshots for an engine: by default two per sequence, and at least
    a few.

    One is of a sequence's prompt, one of its answer (``Limits.saves_answers``). The minimum is for
    prefix reuse between prompts that are served one at a time.
    """
    if config.num_snapshots is not None:
        return config.num_snapshots
    return max(2 * max_num_seqs, MIN_SNAPSHOTS)


def fitting_seqs(
    config: EngineConfig, program: Program, device: DeviceMemory | None, *, chosen: bool
) -> int:
    """The largest number of sequences whose layer state and snapshots fit; 0 if none fits.

    The memory that is not needed otherwise is for state and pages. If the user has ``chosen`` the
    number of sequences, state may take all of it but the smallest possible number of pages; else it
    may take half, as sequences without pages are of little use. The workspace is that of the
    buckets of ``program``; it is smaller with fewer sequences, so the result always fits.
    """
    limits, state = program.limits, program.model.state
    fixed = program_memory(program, device, has_tiers=config.kv_offloading_size is not None)
    budget = _kv_budget(config, fixed, reserve_bytes(program.model))
    needed, _ = _min_pages(config, limits)
    budget = budget - fixed.bytes_of(split_pages(limits, needed)) if chosen else budget // 2

    def state_bytes(count: int) -> int:
        num_snapshots = snapshots_for(config, count) if limits.num_snapshots else 0
        return (count + 1 + num_snapshots) * state.bytes_per_slot

    return bisect_right(range(1, limits.max_num_seqs + 1), budget, key=state_bytes)


def program_memory(
    program: Program, device: DeviceMemory | None, *, has_tiers: bool = False
) -> MemoryPlan:
    """The plan for a program's shapes, with the number of pages in its limits."""
    limits, model, state = program.limits, program.model, program.model.state
    sizes = sizes_by_form(model.param_specs, model.config.dtype)
    # staging buffers; batches of one size share them, and a CPU has none
    batches = {4 * program.layout(b).size for b in limits.buckets} if device is not None else ()
    weights = {form: size.nbytes for form, size in sizes.items()}
    if program.drafter_weights:
        weights["drafter"] = tree_bytes(program.drafter_weights)
    page_bytes = tuple(limits.page_size * each for each in state.bytes_per_entry)
    staging = NUM_BUFFERS * sum(round_up(size, MAPPED_BYTES) for size in batches)
    if has_tiers and device is not None:
        staging += tier_memory(program)
    return MemoryPlan(
        weights=weights,
        page_bytes=page_bytes,
        num_pages=limits.num_pages,
        slot_bytes=tree_bytes((program.slots(), program.own_arrays())),
        state_bytes=limits.num_state_rows * state.bytes_per_slot,
        batch_bytes=staging,
        workspaces=_workspaces(program),
        device=device,
        num_devices=program.placement.num_devices,
        num_hosts=program.placement.num_hosts,
    )


def reserve_bytes(model: Model) -> int:
    """Reserve of a GPU for unplanned allocations, and for rounding each array up to 2 MiB."""
    num_arrays = len(jax.tree.leaves(abstract_params(model))) + len(model.state.arrays)
    return RESERVE_BYTES + MAPPED_BYTES * num_arrays


def _workspaces(program: Program) -> dict[str, int]:
    """The bound of each executable's workspace, by name; that of some calls is negligible."""
    model, limits = program.model, program.limits
    bounds = {bucket.name: step_bound(program, bucket) for bucket in limits.buckets}
    tapped = TAPS_COPIES * model.config.dtype.itemsize * sum(p.width for p in limits.points)
    for bucket in limits.buckets:
        bounds[bucket.name] += tapped * bucket.num_tokens if TAPS in bucket.variants else 0
    if program.platform == "gpu":  # prompts dequantise
        each = DEQUANTISED_COPIES * _largest_quantised(model) * model.config.dtype.itemsize
        bounds = {name: bound + each for name, bound in bounds.items()}
    for call in program.calls:
        if (bound_of := call.workspace) is not None:
            bounds |= {call.executable(n): bound_of(program, n) for n in call.sizes(program)}
    return bounds


def step_bound(program: Program, bucket: Bucket) -> int:
    """A bound on the bytes of a step of this bucket, without weights, KV pages and slots.

    It counts the logits of each row; as activations, inputs and outputs of every matrix of one
    layer for every token, and what a block of it needs in addition; and the hidden states that a
    bucket that scores returns. A program that pools has no logits, but hidden states and vectors in
    float32. Keys and values that XLA's attention gathers on a CPU are not counted, as no plan for a
    CPU depends on them.
    """
    model, config = program.model, program.model.config
    logits = 4 * SAMPLING_COPIES * bucket.num_draws * config.vocab_size
    hidden = config.hidden_size * bucket.num_prefill_tokens if bucket.scores else 0
    activations = _layer_width(model) * bucket.num_tokens + hidden
    blocks = block_bytes(model, bucket, program.platform, program.pins)
    if program.limits.pooling:
        logits = 4 * config.hidden_size * (2 * bucket.num_tokens + 3 * bucket.num_seqs)
    return logits + activations * config.dtype.itemsize + blocks


def block_bytes(model: Model, bucket: Bucket, platform: str, pins: Pins) -> int:
    """A bound on what a mixer or a feed-forward network needs in a step of this bucket in addition
    to the inputs and outputs of its matrices, at most of all layers.
    """
    x = jax.ShapeDtypeStruct((bucket.num_tokens, model.config.hidden_size), model.config.dtype)
    step = StepShape(x, bucket.num_prefills, platform, pins)
    return max(block.workspace(params, step) for block, params in model.blocks)


def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a call of the executable allocates: temporaries, and outputs not aliased."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise EngineError(
            f"the {jax.default_backend()} backend does not say what memory an executable takes, "
            "so none can be planned; use a CPU or CUDA device"
        )
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + new


def check_workspace(plan: MemoryPlan, measured: int) -> None:
    """Raise ``ConfigError`` if executables need more device memory than was planned for them."""
    if plan.device is not None and measured > plan.workspace_bytes + RESERVE_BYTES:
        raise ConfigError(
            f"the compiled steps need {shown(measured)} of workspace and "
            f"{shown(plan.workspace_bytes)} were planned; set num_pages below "
            f"{sum(plan.num_pages)}, or lower max_num_batched_tokens"
        )


def _kv_budget(config: EngineConfig, fixed: MemoryPlan, reserve: int) -> int:
    """Bytes for pages and the layer state of sequences; ``fixed`` is the plan without pages."""
    device = fixed.device
    if device is None:
        return config.kv_cache_memory_bytes or min(max(MIN_KV, fixed.weight_bytes // 2), MAX_KV)
    share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    budget = min(int(device.total_bytes * share), device.allocator_bytes)
    free_bytes = budget - (fixed.total_bytes - fixed.state_bytes) - reserve
    if free_bytes <= 0:
        raise ConfigError(
            f"the model does not fit: weights {shown(fixed.weight_bytes)}, slots "
            f"{shown(fixed.slot_bytes)}, batches {shown(fixed.batch_bytes)}, workspace "
            f"{shown(fixed.workspace_bytes)} and a reserve of {shown(reserve)} leave nothing of "
            f"the {shown(budget)} that may be used of the device's {shown(device.total_bytes)} "
            "for the KV cache; use a larger device or a smaller model, or lower max_num_seqs or "
            "max_num_batched_tokens"
        )
    return free_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes


def _layer_width(model: Model) -> int:
    """Elements per token of the inputs and outputs of all matrices of the widest layer, and of
    further residual streams before and after it; and the inputs of all layers, while they are made.
    """
    groups, config = model.own_params.items(), model.config
    layers = (without_table(layer) for name, layer in groups if layer_of(name) is not None)
    widest = max(sum(m.outputs + m.inputs for m in _matrices(layer)) for layer in layers)
    inputs = config.layer_inputs
    made = 0 if inputs is None else LAYER_INPUTS_COPIES * inputs.elements
    return widest + 2 * (config.stream_width - config.hidden_size) + made


def _largest_quantised(model: Model) -> int:
    """Elements of the largest quantised matrix; 0 without any."""
    sizes = (m.outputs * m.inputs for m in _matrices(model.own_params) if m.quantised)
    return max(sizes, default=0)


class _Matrix(NamedTuple):
    outputs: int
    inputs: int
    quantised: bool


def _matrices(params: Mapping[str, Any]) -> Iterator[_Matrix]:
    """All matrices; of experts, one of which is dequantised at a time, one of a stack."""
    for w in matrices(params):
        if isinstance(w, Quantised):
            yield _Matrix(w.num_outputs, w.num_inputs, quantised=True)
        elif w.ndim in (2, 3):
            yield _Matrix(*w.shape[-2:], quantised=False)


def _in_forms(weights: Mapping[str, int]) -> str:
    """The forms in brackets, the largest first; nothing for a model of floats."""
    if len(weights) < 2:
        return ""
    forms = sorted(weights, key=lambda form: -weights[form])
    return f" ({', '.join(f'{form} {shown(weights[form])}' for form in forms)})"


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays or abstract arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def shown(count: int) -> str:
    """A size as text in MB or GB, for messages."""
    return f"{count / 1000 / MB:.2f} GB" if count >= 1000 * MB else f"{count / MB:.1f} MB"
