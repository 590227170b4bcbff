"""How many pages fit: the memory plan, made before anything is loaded or compiled.

Owns: ``MemoryPlan``, the arithmetic, and the bound on a step's workspace.

The number of pages is part of every compiled shape, so it must be known before any executable is,
and the workspace before the number of pages. Compiling the largest step twice to learn it would
nearly double a start from nothing; a number learnt at one start and used at the next would change
the shapes between the two. So the plan takes a bound computed from the shapes. What executables
really take is in a bundle's manifest, and is checked against the plan once they are loaded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax

from jaxinfer.core.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig, Limits
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.program import COPY, Program, extras_name, score_name
from jaxinfer.exec.step.batch import BatchLayout
from jaxinfer.exec.step.extras import BLOCK
from jaxinfer.exec.step.sampling import LOGPROBS_WIDTH
from jaxinfer.models.base import Model, abstract_params

MB = 1_000_000
# float32[rows, V] that are alive at once when tokens are drawn, and float32[block, V] when prompts
# are scored; measured on a CPU: 6, with extras 7, and 2
SAMPLING_COPIES = 8
SCORE_COPIES = 4
HISTORY_COPIES = 12  # int32[block, max_model_len], for penalties; measured on a CPU: 10
# Of a GPU: executables' code and constants, what steps in flight return (hidden states of 1,024
# tokens among it), and what calls beside steps are handed
RESERVE_BYTES = 256 << 20
MAPPED_BYTES = 2 << 20  # XLA's allocator over virtual memory gives an array whole pages of CUDA's


LEAST_SNAPSHOTS = 4  # of an engine with fewer sequences
NUM_BUFFERS = 3  # staging buffers of a size: two steps are in flight, and an array is ready up to
# 1 ms after its step


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory in bytes, and how much of it JAX's allocator may take."""

    total_bytes: int
    allocator_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine takes of its device, in bytes; ``num_pages`` includes the padding page.

    ``workspaces`` bound what each executable, by name, takes beside weights and state.
    ``device`` is None where it reports no memory (a CPU).
    """

    weight_bytes: int
    page_bytes: int
    num_pages: int
    slot_bytes: int
    state_bytes: int  # layer state of each sequence: of slots, and of snapshots
    batch_bytes: int  # staging buffers, which batches are copied into
    workspaces: dict[str, int]
    device: DeviceMemory | None

    @property
    def kv_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_pages * self.page_bytes

    @property
    def workspace_bytes(self) -> int:
        """Of the executable that takes most: only one runs at a time."""
        return max(self.workspaces.values())

    @property
    def total_bytes(self) -> int:
        """All of it."""
        state = self.kv_bytes + self.slot_bytes + self.state_bytes
        return self.weight_bytes + state + self.batch_bytes + self.workspace_bytes

    def described(self) -> str:
        """Two lines, before anything is taken: all of it, and each executable's workspace."""
        batches = share = state = ""
        by_name = ", ".join(f"{name} {shown(most)}" for name, most in self.workspaces.items())
        if self.device is not None:
            batches = f"batches {shown(self.batch_bytes)}, "
            part = self.total_bytes / self.device.total_bytes
            share = (
                f", {part:.1%} of the device's {shown(self.device.total_bytes)}, of which JAX may "
                f"take {shown(self.device.allocator_bytes)}"
            )
        if self.state_bytes:
            state = f"state of sequences and snapshots {shown(self.state_bytes)}, "
        return (
            f"memory: weights {shown(self.weight_bytes)}, KV cache {shown(self.kv_bytes)} "
            f"({self.num_pages} pages), slots {shown(self.slot_bytes)}, {state}{batches}"
            f"workspace up to {shown(self.workspace_bytes)}: {shown(self.total_bytes)}{share}\n"
            f"workspace up to, by executable: {by_name}"
        )

    def measured(self, workspace_bytes: int) -> str:
        """One line: the workspace that the executables really need."""
        return f"workspace: {shown(workspace_bytes)} of {shown(self.workspace_bytes)} planned"


def plan_memory(config: EngineConfig, program: Program, device: DeviceMemory | None) -> MemoryPlan:
    """Pages for a program whose limits have none yet: as many as requested, else what fits; at most
    what all slots fill.

    ``device`` is None where it reports no memory (a CPU), which leaves the budget to
    ``kv_cache_memory_bytes``. Raises ``ConfigError`` when the weights, a page for
    each sequence, or a context of ``config.max_model_len`` do not fit; a derived context may
    shrink to the pages instead.
    """
    limits, fixed = program.limits, program_memory(program, device)
    reserve = reserve_bytes(program.model)
    fitting = (_kv_budget(config, fixed, reserve) - fixed.state_bytes) // fixed.page_bytes
    if config.num_pages is not None:
        fitting = config.num_pages
    pages_per_seq = limits.pages_needed(limits.max_model_len)
    num_pages = min(1 + limits.max_num_seqs * pages_per_seq, fitting)  # all slots, full contexts
    needed, what = _least_pages(config, limits)
    if num_pages < needed:
        raise ConfigError(
            f"{what} need {needed} pages of KV cache ({shown(needed * fixed.page_bytes)}, the "
            f"padding page included) and there is room for {max(0, num_pages)}; raise num_pages or "
            "kv_cache_memory_bytes (on a GPU: gpu_memory_utilization), or lower max_model_len or "
            "max_num_seqs"
        )
    plan = replace(fixed, num_pages=num_pages)
    if device is not None and plan.total_bytes + reserve > device.allocator_bytes:
        raise ConfigError(
            f"{num_pages} pages of KV cache ({shown(plan.kv_bytes)}) and what else is needed "
            f"({shown(fixed.total_bytes)} and a reserve of {shown(reserve)}) do not fit in "
            f"the {shown(device.allocator_bytes)} that JAX may take of the device; raise "
            "gpu_memory_utilization, or lower num_pages or kv_cache_memory_bytes"
        )
    return plan


def _least_pages(config: EngineConfig, limits: Limits) -> tuple[int, str]:
    """The smallest pool that can serve, and what needs it."""
    groups, pages_per_seq = len(limits.windows), limits.pages_needed(limits.max_model_len)
    each = "one page" if groups == 1 else f"{groups} pages"
    needed = 1 + groups * limits.max_num_seqs
    derived = config.max_model_len is None or config.num_pages is not None
    if not derived and pages_per_seq >= needed:
        return 1 + pages_per_seq, f"a context of {limits.max_model_len} tokens"
    return needed, f"{limits.max_num_seqs} sequences (max_num_seqs) of {each} each"


def snapshots_for(max_num_seqs: int) -> int:
    """Snapshots of layer state in an engine of so many sequences: one for each, and a few where
    prompts come one after the other.
    """
    return max(max_num_seqs, LEAST_SNAPSHOTS)


def fitting_seqs(
    config: EngineConfig, program: Program, device: DeviceMemory | None, *, chosen: bool
) -> int:
    """How many of the program's sequences fit with their layer state and snapshots of it; 0 if
    none does.

    What is not needed otherwise is for state and pages. If the number was ``chosen`` by the user,
    state may take all but the pages that the engine cannot do without, else half: sequences are of
    little use without pages. The answer is for the buckets of ``program``; with fewer sequences
    these take less, so it always fits.
    """
    limits, state = program.limits, program.model.state
    fixed = program_memory(program, device)
    budget = _kv_budget(config, fixed, reserve_bytes(program.model))
    needed, _ = _least_pages(config, limits)
    budget = budget - needed * fixed.page_bytes if chosen else budget // 2

    def state_bytes(count: int) -> int:
        num_snapshots = snapshots_for(count) if limits.num_snapshots else 0
        return (count + 1 + num_snapshots) * state.bytes_per_slot

    return bisect_right(range(1, limits.max_num_seqs + 1), budget, key=state_bytes)


def program_memory(program: Program, device: DeviceMemory | None) -> MemoryPlan:
    """The plan that a program's shapes amount to."""
    limits, state = program.limits, program.model.state
    layouts = map(program.layout, limits.buckets)
    return MemoryPlan(
        weight_bytes=tree_bytes(program.params()),
        page_bytes=limits.page_size * state.bytes_per_token,
        num_pages=limits.num_pages,
        slot_bytes=tree_bytes(program.slots()),
        state_bytes=limits.num_state_rows * state.bytes_per_slot,
        batch_bytes=_batch_bytes(layouts, device),
        workspaces=_workspaces(program),
        device=device,
    )


def staging_sizes(batch_sizes: Iterable[int]) -> list[int]:
    """Bytes of each staging buffer, for batches of these numbers of int32 values."""
    return [4 * size for size in sorted(set(batch_sizes)) for _ in range(NUM_BUFFERS)]


def _batch_bytes(layouts: Iterable[BatchLayout], device: DeviceMemory | None) -> int:
    """Of the staging buffers, in whole pages of CUDA's; a CPU has none."""
    if device is None:
        return 0
    sizes = staging_sizes(layout.abstract().size for layout in layouts)
    return sum(MAPPED_BYTES * cdiv(size, MAPPED_BYTES) for size in sizes)


def reserve_bytes(model: Model) -> int:
    """Reserve of a GPU for unplanned allocations, and for rounding each array up to 2 MiB."""
    num_arrays = len(jax.tree.leaves(abstract_params(model))) + len(model.state.arrays)
    return RESERVE_BYTES + MAPPED_BYTES * num_arrays


def _workspaces(program: Program) -> dict[str, int]:
    """By name of the executable; those that admit take nothing worth counting."""
    model, limits = program.model, program.limits
    bounds = {bucket.name: step_bound(model, bucket) for bucket in limits.buckets}
    for rows in program.extras_rows:
        bounds[extras_name(rows)] = extras_bound(model, rows, limits.max_model_len)
    for tokens in sorted({b.num_prefill_tokens for b in limits.buckets if b.scores}):
        bounds[score_name(tokens)] = score_bound(model, tokens)
    if limits.num_snapshots:
        bounds[COPY] = program.copied_at_once * model.state.bytes_per_slot
    return bounds


def step_bound(model: Model, bucket: Bucket) -> int:
    """Bytes that a step of this bucket takes at most beside weights, KV pages and slots.

    Logits of each row, to be sampled. Activations: what goes into and comes out of every matrix of
    one layer, for every token, and the hidden states that a bucket that scores returns. The keys
    and values that XLA's attention gathers on a CPU are left out: no plan depends on them there.
    """
    config = model.config
    logits = 4 * SAMPLING_COPIES * bucket.num_draws * config.vocab_size
    hidden = config.hidden_size * bucket.num_prefill_tokens if bucket.scores else 0
    activations = _layer_width(model) * bucket.num_tokens + hidden
    return logits + activations * config.dtype.itemsize


def extras_bound(model: Model, rows: int, max_model_len: int) -> int:
    """Bytes that drawing so many rows with extras takes at most."""
    logits = SAMPLING_COPIES * rows * model.config.vocab_size
    return 4 * (logits + HISTORY_COPIES * min(rows, BLOCK) * max_model_len)


def score_bound(model: Model, num_tokens: int) -> int:
    """Bytes that scoring so many prompt tokens takes at most: logits of a block, and results."""
    logits = SCORE_COPIES * min(num_tokens, BLOCK) * model.config.vocab_size
    results = 2 * LOGPROBS_WIDTH * num_tokens
    return 4 * (logits + results) + model.config.hidden_size * num_tokens * 4


def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a call of the executable takes: temporaries, and outputs that are new arrays."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise EngineError(
            f"the {jax.default_backend()} backend does not say what memory an executable takes, "
            "so none can be planned; use a CPU or CUDA device"
        )
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + new


def check_workspace(plan: MemoryPlan, measured: int) -> None:
    """Raise ``ConfigError`` when executables need more of a device than was planned for them."""
    if plan.device is not None and measured > plan.workspace_bytes + RESERVE_BYTES:
        raise ConfigError(
            f"the compiled steps need {shown(measured)} of workspace and "
            f"{shown(plan.workspace_bytes)} were planned; set num_pages below {plan.num_pages}, "
            "or lower max_num_batched_tokens"
        )


def _kv_budget(config: EngineConfig, fixed: MemoryPlan, reserve: int) -> int:
    """Bytes for pages and the layer state of sequences; ``fixed`` is the plan without pages."""
    device = fixed.device
    if device is None:
        if config.kv_cache_memory_bytes is None and config.num_pages is None:
            raise ConfigError("this device reports no memory size; set kv_cache_memory_bytes")
        return config.kv_cache_memory_bytes or 0
    share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    budget = min(int(device.total_bytes * share), device.allocator_bytes)
    room = budget - (fixed.total_bytes - fixed.state_bytes) - reserve
    if room <= 0:
        raise ConfigError(
            f"the model does not fit: weights {shown(fixed.weight_bytes)}, slots "
            f"{shown(fixed.slot_bytes)}, batches {shown(fixed.batch_bytes)}, workspace "
            f"{shown(fixed.workspace_bytes)} and a reserve of {shown(reserve)} leave nothing of "
            f"the {shown(budget)} that may be used of the device's {shown(device.total_bytes)} "
            "for the KV cache; use a larger device or a smaller model, or lower max_num_seqs or "
            "max_num_batched_tokens"
        )
    return room if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes


def _layer_width(model: Model) -> int:
    """Elements of one token that enter and leave the matrices of the widest layer."""
    widths = [
        sum(sum(leaf.shape) for leaf in jax.tree.leaves(layer) if leaf.ndim == 2)
        for layer in abstract_params(model).values()
        if isinstance(layer, dict)
    ]
    return max(widths)


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def shown(count: int) -> str:
    """For a message."""
    return f"{count / 1000 / MB:.2f} GB" if count >= 1000 * MB else f"{count / MB:.1f} MB"
