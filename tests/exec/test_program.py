"""The compiled program: state is updated in place; names and compiler options of executables."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.step import Bucket, Pages, ScheduledSeq, StepPlan
from jaxinfer.exec.calls.admit import ADMIT
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.step.batch import pack
from jaxinfer.exec.step.forward import flat_params, part_of
from jaxinfer.models import build_model
from kit.engines import tiny_limits
from kit.tiny_models import tiny_config, tiny_model
from pallas_kernels.harness.pins import checked_pins

LIMITS = tiny_limits(max_num_seqs=2, num_pages=77, max_model_len=96)
PROGRAM = Program(tiny_model("qwen3")[0], LIMITS, platform="cpu")

PLANNED = {"xla_disable_hlo_passes": "rematerialization"}


@pytest.mark.parametrize("name", [name for name in PROGRAM.names() if "score" not in name])
def test_state_is_updated_in_place(name: str) -> None:
    # buffers are assigned before LLVM runs, and its optimiser takes a third of the time
    compiled = PROGRAM.trace(name).lower().compile({"xla_backend_optimization_level": 0})
    is_step = any(bucket.name == name for bucket in LIMITS.buckets)
    state = [PROGRAM.slots(), PROGRAM.state()] if is_step else [PROGRAM.slots()]
    leaves = jax.tree.leaves(state)
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == sum(leaf.size * 4 for leaf in leaves)
    pools = {",".join(map(str, leaf.shape)) for leaf in leaves}
    flat = {re.sub(r"^(\d+),(\d+)", lambda m: str(int(m[1]) * int(m[2])), pool) for pool in pools}
    copied = re.findall(r"= [fs]32\[([\d,]+)\]\S* copy\(", compiled.as_text() or "")
    assert not (pools | flat).intersection(copied)


@pytest.mark.parametrize("family, layers", [("qwen3", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_layers_share_one_trace(family: str, layers: str) -> None:
    """The lowered module grows with the layers only by calls."""

    def matmuls(num_layers: int) -> int:
        model = build_model(tiny_config(family) | {layers: num_layers}, "float32")
        lowered = Program(model, LIMITS, platform="cpu").trace(LIMITS.buckets[0].name).lower()
        return lowered.as_text().count("stablehlo.dot_general")

    assert matmuls(3) == matmuls(6)


def test_a_bucket_has_one_step_and_extras_are_the_same_few_for_all() -> None:
    table = (Bucket(1), Bucket(80), Bucket(0, 256, 2), Bucket(80, 32, 2, scores=True))
    limits = msgspec.structs.replace(LIMITS, max_num_seqs=80, buckets=table)
    names = {ADMIT.name, "d1", "d80", "p256x2", "d80p32x2", "score32"}
    model = build_model(tiny_config("qwen3") | {"num_hidden_layers": 4}, "float32")
    of_cpu, of_gpu = (Program(model, limits, platform=platform) for platform in ("cpu", "gpu"))
    assert set(of_cpu.names()) == {*names, "extras1", "extras8"}
    # steps with only prompts are split; those that score are not
    assert set(of_gpu.names()) == {*names, "p256x2_first", "extras8", "extras64", "extras128"}
    lone = replace(of_gpu, limits=msgspec.structs.replace(limits, max_num_seqs=1))
    assert {name for name in lone.names() if "extras" in name} == {"extras1"}


ONLY_CUBLAS = {**PLANNED, "xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}


@pytest.mark.parametrize(
    ("platform", "bucket", "expected"),
    [
        ("gpu", Bucket(1), PLANNED),
        ("gpu", Bucket(32), PLANNED),
        ("gpu", Bucket(33), ONLY_CUBLAS),
        ("gpu", Bucket(0, 64, 4), {**ONLY_CUBLAS, **NO_GRAPH}),
        ("gpu", Bucket(0, 256, 4), ONLY_CUBLAS),
        ("gpu", Bucket(8, 64, 4, scores=True), ONLY_CUBLAS),
        ("gpu", Bucket(256, 768, 48, scores=True), {**ONLY_CUBLAS, **NO_GRAPH}),
        ("gpu", Bucket(0, 1024, 1), {**PLANNED, **NO_GRAPH}),
        ("cpu", Bucket(512), {}),
    ],
    ids=[
        "one",
        "few",
        "decodes",
        "short_prompts",
        "prompts",
        "few_mixed",
        "mixed",
        "one_row",
        "cpu",
    ],
)
def test_xla_s_options_follow_from_the_rows_and_tokens_of_a_step(
    platform: str, bucket: Bucket, expected: dict[str, Any]
) -> None:
    limits = Limits((2000,), 16, 512, 64, 512, (bucket,))
    program = Program(tiny_model("llama")[0], limits, platform=platform)
    assert program.compiler_options(bucket.name) == expected


OPTIONS = {
    ADMIT.name: PLANNED,
    "extras8": PLANNED,
    "extras64": ONLY_CUBLAS,
    "score64": ONLY_CUBLAS,
}


def test_xla_s_options_of_calls() -> None:
    limits = Limits((2000,), 16, 512, 64, 512, (Bucket(512, 64, 4, scores=True),))
    program = Program(tiny_model("llama")[0], limits, platform="gpu")
    for name, options in OPTIONS.items():
        assert program.compiler_options(name) == {**options, **NO_GRAPH}
        assert not replace(program, platform="cpu").compiler_options(name)


@pytest.mark.parametrize(
    ("platform", "bucket", "linked"),
    [
        ("gpu", Bucket(8), True),
        ("gpu", Bucket(0, 64, 4), True),
        ("gpu", Bucket(0, 256, 4), False),
        ("gpu", Bucket(8, 64, 4), False),
        ("cpu", Bucket(8), False),
    ],
    ids=["decodes", "short_prompts", "prompts", "mixed", "cpu"],
)
def test_decode_steps_and_short_prompts_have_their_kernels_linked(
    platform: str, bucket: Bucket, linked: bool
) -> None:
    limits = Limits((2000,), 16, 512, 64, 512, (bucket,))
    program = Program(tiny_model("llama")[0], limits, platform=platform)
    assert program.links_kernels(bucket.name) == linked
    assert not any(map(program.links_kernels, (ADMIT.name, "extras8", "score64")))
    unlinked = replace(program, pins=checked_pins({"links": "none"}, "gpu"))
    assert not any(map(unlinked.links_kernels, unlinked.names()))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_padding_stays_zeros(family: str) -> None:
    """GEMMs for CPUs leave such tokens out, so a step takes the time of its tokens."""
    model, params = tiny_model(family)
    bucket = next(b for b in LIMITS.buckets if b.scores)  # returns all hidden states of prompts
    program = Program(model, msgspec.structs.replace(LIMITS, groups=model.state.groups), "cpu")
    layout, pages = program.layout(bucket), (Pages(IntLog([3])),) * len(model.state.groups)
    prompt = ScheduledSeq("r", 0, 1, 0, 5, pages, np.arange(7, 12, dtype=np.int32))
    flat = pack(StepPlan(0, bucket, (), (), (prompt,)), layout)
    whole = part_of(model, range(len(model.config.layers)))
    step = jax.jit(program._function(bucket, whole).last_part)
    state, slots = init_state(program)
    *_, output = step(flat_params(model, params), state, slots, jnp.asarray(flat))
    assert output.hidden is not None and len(output.hidden) == bucket.num_prefill_tokens > 5
    assert bool(output.hidden[:5].any(axis=1).all()) and not output.hidden[5:].any()
