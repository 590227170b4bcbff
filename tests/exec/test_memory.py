"""The memory plan: the share of a device, and the bounds on the workspace of executables."""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.limits import Limits
from jaxinfer.core.step import Bucket
from jaxinfer.exec.calls.extras import EXTRAS, extras_bound
from jaxinfer.exec.calls.score import SCORE, score_bound
from jaxinfer.exec.compile import memory_plan
from jaxinfer.exec.compile.buckets import bucket_table
from jaxinfer.exec.compile.memory_plan import (
    MAPPED_BYTES,
    RESERVE_BYTES,
    DeviceMemory,
    MemoryPlan,
    block_bytes,
    check_workspace,
    fitting_seqs,
    plan_memory,
    program_memory,
    reserve_bytes,
    shown,
    step_bound,
    tree_bytes,
    workspace_bytes,
)
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run import device_memory
from jaxinfer.exec.run.device_memory import claim_memory
from jaxinfer.models.base import Model, abstract_params
from jaxinfer.models.registry import build_model
from jaxinfer.nn.state import Entry, LayerState
from kit.engines import tiny_limits
from kit.mixed_family import RecurrentSpec, mixed_model
from kit.quantised_models import quantised_tensors
from kit.residency import resident_pages
from kit.tiny_models import CONFIGS, tiny_config, tiny_model
from pallas_kernels.experts import launch
from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.harness.pins import NO_PINS, Pins

DEVICE = 4 << 30
SMOLLM2 = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,  # with all 30 a prefill takes 49 MB (2 layers: 30, bound: 74)
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
)
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())
LOOSE = 3  # the bound is at most this many times the measured workspace


@cache
def model_named(name: str) -> Model:
    model = build_model(SMOLLM2, "float32") if name == "smollm2" else tiny_model(name)[0]
    if name != "qwen4_exp":
        return model
    # a choice among tokens allocates 64 MiB in a model of any size
    return replace(model, config=model.config.for_context(8))


def program_with(
    model: Model, bucket: Bucket, num_pages: int = 40, experts: str | None = None
) -> Program:
    """The program of one bucket. ``experts`` pins their implementation.

    Bounds are for any implementation of draws, and XLA's need the most (the native ones nothing).
    """
    state, snapshots = model.state, 8 if model.state.bytes_per_slot else 0
    pages = (num_pages,) * len(state.bytes_per_entry)
    limits = Limits(pages, 16, 16, 256, bucket.num_prefill_tokens or 1, (bucket,))
    limits = msgspec.structs.replace(
        limits, groups=state.groups, align=state.align, num_snapshots=snapshots
    )
    pins = (("sample", "xla"), *([("experts", experts)] if experts else []))
    return Program(model, limits, pins=Pins(pins))


def measured(program: Program) -> int:
    return workspace_of(program.trace(program.limits.buckets[0].name))


def workspace_of(traced: jax.stages.Traced) -> int:
    # buffers are assigned before LLVM runs, and its optimiser takes a third of the time
    return workspace_bytes(traced.lower().compile({"xla_backend_optimization_level": 0}))


@pytest.mark.parametrize(
    ("name", "bucket", "loose"),
    [
        ("smollm2", Bucket(16), 2),
        ("smollm2", Bucket(0, 512, 16), LOOSE),
        ("smollm2", Bucket(16, 512, 16, scores=True), 2),
        ("qwen3", Bucket(8), LOOSE),
        ("qwen3", Bucket(4, 512, 4, scores=True), LOOSE),
        ("gpt2", Bucket(4, 512, 4), LOOSE),
        ("olmo2", Bucket(8), LOOSE),
        ("olmo2", Bucket(0, 512, 4), LOOSE),
        ("qwen3_5", Bucket(0, 512, 4), LOOSE),
        ("kimi_linear", Bucket(0, 512, 4), LOOSE),
        ("lfm2", Bucket(0, 512, 4), LOOSE),
        ("zaya", Bucket(0, 512, 4), LOOSE),
        ("qwen4_exp", Bucket(4, 512, 4), LOOSE),
    ],
    ids=lambda value: value.name if isinstance(value, Bucket) else str(value),
)
def test_bound_of_workspace(name: str, bucket: Bucket, loose: int) -> None:
    program = program_with(model_named(name), bucket)
    needed = measured(program)
    assert needed <= step_bound(program, bucket) <= loose * needed


@pytest.mark.parametrize(
    ("name", "dtype", "experts"),
    [("qwen3_moe", "bfloat16", "xla"), ("deepseek_v3", "float32", "native")],
)
def test_bound_of_workspace_of_experts(name: str, dtype: str, experts: str) -> None:
    """Most of it is theirs: a token chooses 16 of 20."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 96, "intermediate_size": 8}
    config = {**tiny_config(name), **sizes}
    count = {"num_experts": 20} if name == "qwen3_moe" else {"n_routed_experts": 20}
    config |= {**count, "num_experts_per_tok": 16, "num_hidden_layers": 2}
    config |= {"topk_group": 4} if name == "deepseek_v3" else {}
    model, bucket = build_model(config, dtype), Bucket(4, 512, 4)
    program = program_with(model, bucket, experts=experts)
    needed = measured(program)
    assert needed <= step_bound(program, bucket) <= 2 * needed


@pytest.mark.parametrize("tokens", [8, 200, 2000])
def test_bound_of_rows_that_fill_up_tiles(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sorted rows of Hopper's kernels, of which the last of each expert are not in use."""
    monkeypatch.setattr(launch, "not_hopper", lambda: None)
    monkeypatch.setattr(launch, "without_triton", lambda: None)
    width, inner, count, chosen = 64, 128, 200, 2
    config = {**tiny_config("qwen3_moe"), "hidden_size": width, "moe_intermediate_size": inner}
    config |= {"num_experts": count, "num_experts_per_tok": chosen}
    model, of = build_model(config, "bfloat16"), jax.ShapeDtypeStruct
    call: dict[str, Any] = {
        "x": of((tokens, width), jnp.bfloat16),
        "choices": of((tokens, chosen), jnp.int32),
        "weights": of((tokens, chosen), jnp.float32),
        "gate_up": of((count, 2 * inner, width), jnp.bfloat16),
        "down": of((count, width, inner), jnp.bfloat16),
    }
    sizes, _ = launch.sizes_of(ExpertsArgs(**call))
    needed = 2 * sizes.tiles * sizes.width * (width + inner)  # hidden values, and rows or outputs
    bound = block_bytes(model, Bucket(0, tokens, 1), "gpu", NO_PINS)
    assert needed <= bound
    assert bound == block_bytes(model, Bucket(0, tokens, 1), "gpu", Pins((("experts", "hopper"),)))


def test_a_mixer_may_need_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run one after another, so the largest workspace of all layers counts."""
    model, _ = mixed_model("recurrent", "full", "recurrent")
    bucket = Bucket(0, 8, 2)
    assert block_bytes(model, bucket, "gpu", NO_PINS) == 0
    limits = tiny_limits(groups=model.state.groups, enable_prefix_caching=False)
    program = Program(model, msgspec.structs.replace(limits, buckets=(bucket,)))
    without = step_bound(program, bucket)
    monkeypatch.setattr(
        RecurrentSpec, "workspace", lambda _, params, step: params["into"].size * step.x.shape[0]
    )
    assert block_bytes(model, bucket, "gpu", NO_PINS) == model.config.hidden_size**2 * 8
    assert step_bound(program, bucket) == without + model.config.hidden_size**2 * 8


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_bound_of_extras_and_scores(name: str) -> None:
    model, bucket = model_named(name), Bucket(16, 512, 16, scores=True)
    program = program_with(model, bucket)
    for rows in (1, 8, 16):
        needed = workspace_of(EXTRAS.trace(program, rows))
        assert needed <= extras_bound(model, rows, 256) <= LOOSE * needed
    needed = workspace_of(SCORE.trace(program, 512))
    assert needed <= score_bound(model, 512) <= LOOSE * needed


def test_workspace_does_not_depend_on_pages() -> None:
    model, bucket = model_named("qwen3"), Bucket(2, 32, 2)
    few, many = (measured(program_with(model, bucket, pages)) for pages in (20, 500))
    assert few == many


def plan(
    device_bytes: int | None = DEVICE,
    *,
    of: Model | None = None,
    allocator_share: float = 1.0,
    **settings: Any,
) -> MemoryPlan:
    config, device = EngineConfig(**settings), None
    if device_bytes is not None:
        device = DeviceMemory(device_bytes, int(device_bytes * allocator_share))
    max_num_seqs, max_model_len = config.max_num_seqs or 256, config.max_model_len or 8192
    buckets = bucket_table(
        max_num_seqs, 2048, decode_start=2, prefill_start=64, prefill_factor=8, mixed_start=16
    )
    limits = Limits((0,), 16, max_num_seqs, max_model_len, 2048, buckets)
    return plan_memory(config, Program(of or model_named("smollm2"), limits), device)


@pytest.mark.parametrize("share", [0.5, 0.92, 1.0])
def test_the_plan_takes_the_share_of_a_device(share: float) -> None:
    made = plan(gpu_memory_utilization=share)
    taken = (made.total_bytes + reserve_bytes(model_named("smollm2"))) / DEVICE
    assert share - 0.02 < taken <= share
    assert f"{made.total_bytes / (DEVICE):.1%} of the device's 4.29 GB" in made.described()


def test_the_lines_about_workspaces() -> None:
    """They name each workspace; the sum has the largest, as one executable runs at a time."""
    made = plan()
    first, second = made.described().splitlines()
    largest = max(made.workspaces, key=lambda name: made.workspaces[name])
    assert made.workspace_bytes == made.workspaces[largest]
    assert f"workspace up to {made.workspace_bytes / 1e6:.1f} MB: " in first
    shown = dict(one.rsplit(" ", 2)[:2] for one in second.partition(": ")[2].split(", "))
    assert shown == {name: f"{most / 1e6:.1f}" for name, most in made.workspaces.items()}


def test_staging_buffers_are_planned_only_on_a_gpu() -> None:
    """There are three for each size of a batch, rounded up to CUDA's pages."""
    assert plan(None, kv_cache_memory_bytes=1 << 26).batch_bytes == 0
    small, large = plan(), plan(max_num_seqs=512, max_model_len=32768)
    sizes = len(
        bucket_table(256, 2048, decode_start=2, prefill_start=64, prefill_factor=8, mixed_start=16)
    )
    assert small.batch_bytes == 3 * sizes * MAPPED_BYTES
    tables = 3 * 4 * 512 * 32768 // 16  # bytes of the page tables of the largest decode bucket
    assert large.batch_bytes > small.batch_bytes + tables
    assert f"batches {large.batch_bytes / 1e6:.1f} MB" in large.described()


def test_an_allocator_that_may_take_less_than_the_share() -> None:
    """Other code has started JAX's backend, with an allocator that takes 75 % of the device."""
    made = plan(allocator_share=0.75)
    taken = (made.total_bytes + reserve_bytes(model_named("smollm2"))) / DEVICE
    assert 0.73 < taken <= 0.75
    assert "4.29 GB, of which JAX may take 3.22 GB" in made.described()


def test_without_a_device_memory_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(None, kv_cache_memory_bytes=1 << 26)
    monkeypatch.setattr(jax.numpy, "zeros", lambda *_: pytest.fail("claimed"))
    claim_memory(made, FakeDevice(None))


class FakeDevice:
    """A GPU of which only the memory statistics exist."""

    def __init__(self, pool_bytes: int | None) -> None:
        self.pool_bytes = pool_bytes

    def memory_stats(self) -> dict[str, int]:
        return {} if self.pool_bytes is None else {"pool_bytes": self.pool_bytes}


@pytest.mark.parametrize(
    ("stats", "card", "expected"),
    [
        (None, DEVICE, DeviceMemory(DEVICE, DEVICE // 4)),
        ({"bytes_limit": 0}, DEVICE, DeviceMemory(DEVICE, DEVICE // 4)),
        ({"bytes_limit": DEVICE // 2}, DEVICE, DeviceMemory(DEVICE, DEVICE // 2)),
        ({"bytes_limit": DEVICE // 2}, None, DeviceMemory(DEVICE // 2, DEVICE // 2)),
        (None, None, None),
    ],
    ids=["vmm", "cuda_async", "bfc", "no_driver", "unknown"],
)
def test_memory_of_a_device(
    stats: dict[str, int] | None,
    card: int | None,
    expected: DeviceMemory | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(local_hardware_id=0, platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(device_memory, "card_bytes", lambda ordinal: card)
    monkeypatch.setattr(device_memory, "allocator_share", lambda: 0.25)
    assert device_memory.device_memory(device) == expected  # type: ignore[arg-type]


def test_a_cpu_reports_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "card_bytes", lambda ordinal: DEVICE)  # of an unused GPU
    assert device_memory.device_memory(jax.devices("cpu")[0]) is None


@pytest.mark.parametrize(
    ("weight_bytes", "budget"),
    [(100 << 20, 368 << 20), (1000 << 20, 500 << 20), (8 << 30, 1 << 30)],
)
def test_pages_of_a_cpu_are_in_proportion_to_the_weights(
    weight_bytes: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program_memory = memory_plan.program_memory
    monkeypatch.setattr(
        memory_plan,
        "program_memory",
        lambda *a, **k: replace(program_memory(*a, **k), weights={"float32": weight_bytes}),
    )
    made = plan(None)
    assert made.num_pages == (budget // made.page_bytes[0],)


@pytest.mark.skipif(sys.platform != "linux", reason="pages come back zeroed on Linux")
def test_pages_of_a_cpu_are_not_resident_before_they_are_used() -> None:
    model, _ = tiny_model("llama")
    program = Program(model, tiny_limits(num_pages=2000))
    state, _ = device_memory.init_state(program)
    largest = max(state, key=lambda array: array.nbytes)
    assert largest.nbytes > 100 * mmap.PAGESIZE
    address = largest.unsafe_buffer_pointer()
    # the ends may share an OS page with other arrays
    assert resident_pages(address, largest.nbytes) <= 2
    assert not np.asarray(largest).any()


@pytest.mark.parametrize(
    ("pool_bytes", "settings", "claimed"),
    [
        (0, {"num_pages": 2000}, [lambda made: made.total_bytes]),
        (DEVICE // 2, {}, [lambda _: DEVICE // 2]),
        (DEVICE, {}, []),
        (None, {}, []),
    ],
    ids=["empty", "half", "full", "vmm"],
)
def test_a_plan_is_claimed_as_one_array(
    pool_bytes: int | None,
    settings: dict[str, int],
    claimed: list[Callable[[MemoryPlan], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
        sizes.append(math.prod(shape))
        return jax.device_put(np.zeros(1, dtype))

    made = plan(**settings)
    monkeypatch.setattr(jax.numpy, "zeros", zeros)
    claim_memory(made, FakeDevice(pool_bytes))
    assert sizes == [size(made) // 1_000_000 * 1_000_000 for size in claimed]


def test_a_device_without_enough_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    made = plan()
    monkeypatch.setattr(jax.numpy, "zeros", zeros)
    with pytest.raises(EngineError, match=r"3.65 GB are planned and the device has not so much"):
        claim_memory(made, FakeDevice(0))


@pytest.mark.parametrize(("stats", "runs"), [(None, 1), ({"bytes_limit": DEVICE}, 0)])
def test_freed_blocks_are_released_by_an_array_as_large_as_the_card(
    monkeypatch: pytest.MonkeyPatch, stats: dict[str, int] | None, runs: int
) -> None:
    sizes: list[int] = []
    device = SimpleNamespace(platform="gpu", local_hardware_id=0, memory_stats=lambda: stats)

    def full(shape: tuple[int, ...], value: jax.Array, dtype: Any) -> jax.Array:
        sizes.append(math.prod(shape))
        return jnp.zeros((1, 1), dtype) + value

    def fail(message: str) -> Callable[..., None]:
        def call(*_: Any) -> None:
            raise jax.errors.JaxRuntimeError(message)

        return call

    monkeypatch.setattr(device_memory, "card_bytes", lambda _: 10**9 + 1)
    monkeypatch.setattr(jnp, "full", full)
    monkeypatch.setattr(jax, "device_put", lambda x, _: jnp.asarray(x))
    monkeypatch.setattr(jax.stages.Compiled, "__call__", fail("RESOURCE_EXHAUSTED: no memory"))
    device_memory.release_freed_blocks(device)
    assert len(sizes) == runs
    assert all(10**9 < size < 10**9 + 2 * memory_plan.MB for size in sizes)
    if runs:  # another error is not hidden
        monkeypatch.setattr(jax.stages.Compiled, "__call__", fail("INTERNAL: illegal address"))
        with pytest.raises(jax.errors.JaxRuntimeError, match="illegal address"):
            device_memory.release_freed_blocks(device)


def test_fewer_sequences_need_fewer_pages() -> None:
    made = plan(max_num_seqs=1, max_model_len=64)
    assert made.num_pages == (1 + 64 // 16,)


@pytest.mark.parametrize(
    ("device_bytes", "settings", "message"),
    [
        (
            DEVICE // 8,
            {},
            "the model does not fit: weights .* leave nothing of the 493.9 MB that",
        ),
        (DEVICE, {"num_pages": 100}, r"256 sequences \(max_num_seqs\) of one page each need 257"),
        (
            DEVICE,
            {"num_pages": 100_000},
            "100000 pages of KV .* do not fit in the 4.29 GB that JAX",
        ),
        (
            DEVICE,
            {"max_model_len": 8192, "kv_cache_memory_bytes": 1 << 21},
            "a context of 8192 tokens needs 513 pages",
        ),
    ],
    ids=["small_device", "few_pages", "many_pages", "long_context"],
)
def test_refused(device_bytes: int | None, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(device_bytes, **settings)


def test_experts_that_a_device_cannot_hold() -> None:
    """A plan has shapes only: nothing has been read."""
    model = build_model(PUBLISHED["qwen3-30b-a3b"], "bfloat16")
    sentence = r"the model does not fit: weights 61\.06 GB, .* 48\.00 GB .*; use a larger device"
    with pytest.raises(ConfigError, match=sentence):
        plan(48 * 10**9, of=model)
    assert plan(80 * 10**9, of=model).weight_bytes == 61_064_245_248


def test_steps_that_need_more_than_planned() -> None:
    made = plan()
    check_workspace(made, made.workspace_bytes + RESERVE_BYTES)
    with pytest.raises(ConfigError, match="compiled steps need .* were planned; set num_pages bel"):
        check_workspace(made, made.workspace_bytes + RESERVE_BYTES + 1)


STATE_BYTES = 40_000_000  # layer state of one sequence


@pytest.fixture
def large_state(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model with 40 MB of layer state for each sequence."""
    entry = Entry("sum", (STATE_BYTES // 4,), np.dtype(np.float32))
    monkeypatch.setattr(RecurrentSpec, "state", lambda *_: LayerState(per_slot=(entry,)))
    return mixed_model("recurrent", "full")[0]


def program_of(
    model: Model, max_num_seqs: int, num_snapshots: int, platform: str = "gpu"
) -> Program:
    buckets = (Bucket(max_num_seqs), Bucket(max_num_seqs, 64, 4, scores=True))
    limits = Limits(
        (0,) * len(model.state.bytes_per_entry),
        16,
        max_num_seqs,
        512,
        64,
        buckets,
        enable_prefix_caching=num_snapshots > 0,
        groups=model.state.groups,
        num_snapshots=num_snapshots,
    )
    return Program(model, limits, platform=platform)


def test_layer_state_of_sequences_is_planned(large_state: Model) -> None:
    """State of 9 slots (one for padding) and 8 snapshots; pages get the remaining memory."""
    page_bytes = 16 * large_state.state.bytes_per_token
    config = EngineConfig(kv_cache_memory_bytes=17 * STATE_BYTES + 100 * page_bytes)
    made = plan_memory(config, program_of(large_state, 8, 8, "cpu"), None)
    assert made.state_bytes == 17 * STATE_BYTES
    assert made.num_pages == (100,)
    assert made.total_bytes > made.state_bytes + made.kv_bytes
    assert "state of sequences and snapshots 680.0 MB, workspace" in made.described()
    none = plan_memory(config, program_of(mixed_model("full")[0], 8, 0, "cpu"), None)
    assert none.state_bytes == 0
    assert "state of" not in none.described()


@pytest.mark.parametrize("chosen", [False, True], ids=["default", "chosen"])
@pytest.mark.parametrize("snapshots", [False, True], ids=["no snapshots", "snapshots"])
def test_sequences_whose_state_fits(large_state: Model, snapshots: bool, chosen: bool) -> None:
    """State of 40 MB for each of 512 sequences does not fit in 16 GB.

    The reduced number can be planned. If the user has chosen the number, it is the largest that
    fits; else state takes about half of the budget.
    """
    device, config = DeviceMemory(16 << 30, 16 << 30), EngineConfig()

    def program(count: int) -> Program:
        return program_of(large_state, count, 2 * count if snapshots else 0)

    fitting = fitting_seqs(config, program(512), device, chosen=chosen)
    rows = fitting * (3 if snapshots else 1)
    budget = 0.92 * (16 << 30)
    if chosen:
        assert 0.93 < rows * STATE_BYTES / budget < 1
    else:
        assert 0.46 < rows * STATE_BYTES / budget < 0.5
    plan_memory(config, program(fitting), device)
    assert fitting_seqs(config, program(fitting), device, chosen=chosen) == fitting
    with pytest.raises(ConfigError, match="need .* pages|do not fit|does not fit"):
        plan_memory(config, program(fitting * (2 if chosen else 3)), device)


def test_no_sequence_fits(large_state: Model) -> None:
    config = EngineConfig(kv_cache_memory_bytes=STATE_BYTES)
    assert fitting_seqs(config, program_of(large_state, 8, 8, "cpu"), None, chosen=False) == 0
    assert fitting_seqs(config, program_of(large_state, 8, 0, "cpu"), None, chosen=True) == 0


def test_a_step_saves_snapshots_in_place() -> None:
    """It has no second array of the rows of slots and snapshots, of which it writes a few."""
    model, _ = mixed_model("recurrent", "full", "recurrent")
    planned = program_of(model, 8, 100_000, "cpu")
    program = replace(planned, limits=msgspec.structs.replace(planned.limits, num_pages=(64,)))
    compiled = program.trace(program.limits.buckets[1].name).lower().compile()
    all_rows = 100_009 * model.state.bytes_per_slot
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes >= all_rows
    assert workspace_bytes(compiled) < all_rows // 10


def test_weights_are_counted_by_form() -> None:
    """The plan's first line has the bytes of each form, which add up to all arrays."""
    model, _ = quantised_tensors()
    limits = Limits((8,), 16, 2, 64, 32, (Bucket(2),))
    memory = program_memory(Program(model, limits), None)
    assert memory.weight_bytes == tree_bytes(abstract_params(model))
    line = memory.described().splitlines()[0]
    assert {"int4 g64", "int8 g16 supers", "float32"} <= {*memory.weights}
    assert all(form in line for form in memory.weights)
    plain = program_memory(Program(tiny_model("qwen3")[0], limits), None)
    assert plain.described().startswith(f"memory: weights {shown(plain.weight_bytes)}, KV cache")


def test_blocks_of_every_family_have_a_bound() -> None:
    """An engine of a family whose spec takes another call would not start."""
    for name in CONFIGS:
        model = build_model(CONFIGS[name], "float32")
        for bucket in (Bucket(2), Bucket(0, 64, 1)):
            assert block_bytes(model, bucket, "cpu", NO_PINS) >= 0, name
