"""What is compiled: state is updated in place, temporaries stay small; a GPU's plain steps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import msgspec
import pytest

from jaxinfer.core.config import Limits
from jaxinfer.core.step import Bucket
from jaxinfer.exec.program import ADMIT, Program
from jaxinfer.models import build_model
from kit.engines import tiny_limits
from kit.tiny_models import tiny_config, tiny_model
from pallas_kernels.pins import checked_pins

LIMITS = tiny_limits(max_num_seqs=2, num_pages=77, max_model_len=96)
PROGRAM = Program(tiny_model("qwen3")[0], LIMITS, platform="cpu")

PLANNED = {"xla_disable_hlo_passes": "rematerialization"}


@pytest.mark.parametrize("name", PROGRAM.names())
def test_state_is_updated_in_place(name: str) -> None:
    # buffers are assigned before LLVM, whose optimiser takes a third of the time
    compiled = PROGRAM.trace(name).lower().compile({"xla_backend_optimization_level": 0})
    state = [PROGRAM.slots()] if name == ADMIT else [PROGRAM.slots(), PROGRAM.kv_state()]
    leaves = jax.tree.leaves(state)
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == sum(leaf.size * 4 for leaf in leaves)
    pools = {",".join(map(str, leaf.shape)) for leaf in leaves}
    flat = {re.sub(r"^(\d+),(\d+)", lambda m: str(int(m[1]) * int(m[2])), pool) for pool in pools}
    copied = re.findall(r"= [fs]32\[([\d,]+)\]\S* copy\(", compiled.as_text() or "")
    assert not (pools | flat).intersection(copied)


@pytest.mark.parametrize("family, layers", [("qwen3", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_layers_share_one_trace(family: str, layers: str) -> None:
    """What is lowered does not grow with the layers, but for calls."""

    def products(num_layers: int) -> int:
        model = build_model(tiny_config(family) | {layers: num_layers}, "float32")
        lowered = Program(model, LIMITS, platform="cpu").trace(LIMITS.buckets[0].name).lower()
        return lowered.as_text().count("stablehlo.dot_general")

    assert products(3) == products(6)


def test_a_gpu_has_plain_steps_and_fewer_with_extras_a_cpu_one_a_bucket() -> None:
    buckets = [bucket.name for bucket in LIMITS.buckets]
    assert PROGRAM.names() == (ADMIT, *buckets)
    lone = Program(PROGRAM.model, msgspec.structs.replace(LIMITS, max_num_seqs=1), platform="cpu")
    assert lone.names() == tuple(buckets)  # its steps admit the one sequence there may be
    table = tuple(map(Bucket, (1, 2, 4, 8, 16))) + (Bucket(0, 32, 2), Bucket(16, 32, 2))
    gpu = Program(PROGRAM.model, msgspec.structs.replace(LIMITS, buckets=table), platform="gpu")
    extras = {"d2_extras", "d16_extras", "p32x2_extras", "d16p32x2_extras"}
    without_extras = tuple(bucket.name for bucket in table)
    assert set(gpu.names()) == {ADMIT, *without_extras, *extras}
    assert gpu.names_without_extras() == without_extras
    assert gpu.names_of_first_steps() == without_extras[:-1]
    assert gpu.names_at_start() == without_extras[:-1]
    assert set(gpu.names_later()) == {ADMIT, without_extras[-1], *extras}
    assert PROGRAM.names_without_extras() == tuple(buckets)
    mixed = [bucket.name for bucket in LIMITS.buckets if bucket.is_mixed]
    assert PROGRAM.names_later() == tuple(mixed) and ADMIT in PROGRAM.names_at_start()
    for bucket in table:
        assert gpu.bucket_of(bucket, extras=False) == bucket
        larger = gpu.bucket_of(bucket, extras=True)
        assert gpu.step_name(larger, extras=True) in extras
        assert larger.num_tokens <= 16 * bucket.num_tokens
    first = LIMITS.buckets[0]
    assert PROGRAM.bucket_of(first, extras=True) == first
    assert PROGRAM.step_name(first, extras=True) == PROGRAM.step_name(first, extras=False)
    assert gpu.step_name(first, extras=True) == f"{first.name}_extras"
    assert gpu.step_name(first, extras=False) == first.name


BY_CUBLAS = {**PLANNED, "xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}


@pytest.mark.parametrize(
    ("platform", "bucket", "plain", "with_extras"),
    [
        ("gpu", Bucket(1), PLANNED, PLANNED),
        ("gpu", Bucket(32), PLANNED, BY_CUBLAS),
        ("gpu", Bucket(33), BY_CUBLAS, BY_CUBLAS),
        ("gpu", Bucket(0, 64, 4), BY_CUBLAS, BY_CUBLAS),
        ("gpu", Bucket(256, 768, 48), {**BY_CUBLAS, **NO_GRAPH}, {**BY_CUBLAS, **NO_GRAPH}),
        ("gpu", Bucket(0, 1024, 1), {**PLANNED, **NO_GRAPH}, {**PLANNED, **NO_GRAPH}),
        ("cpu", Bucket(512), {}, {}),
    ],
    ids=["one", "few", "decodes", "prompts", "mixed", "one_row", "cpu"],
)
def test_xla_s_options_follow_from_the_rows_and_tokens_of_a_step(
    platform: str, bucket: Bucket, plain: dict[str, Any], with_extras: dict[str, Any]
) -> None:
    limits = Limits(2000, 16, 512, 64, 512, (bucket,))
    program = Program(tiny_model("llama")[0], limits, platform=platform)
    for extras, options in ((False, plain), (True, with_extras)):
        assert program.compiler_options(program.step_name(bucket, extras=extras)) == options
    assert program.compiler_options(ADMIT) == ({} if platform == "cpu" else PLANNED)


@pytest.mark.parametrize(
    ("platform", "bucket", "linked"),
    [
        ("gpu", Bucket(8), True),
        ("gpu", Bucket(0, 64, 4), False),
        ("gpu", Bucket(8, 64, 4), False),
        ("cpu", Bucket(8), False),
    ],
    ids=["decodes", "prompts", "mixed", "cpu"],
)
def test_steps_that_only_decode_have_their_kernels_linked(
    platform: str, bucket: Bucket, linked: bool
) -> None:
    limits = Limits(2000, 16, 512, 64, 512, (bucket,))
    program = Program(tiny_model("llama")[0], limits, platform=platform)
    for extras in (False, True):
        assert program.links_kernels(program.step_name(bucket, extras=extras)) == linked
    assert not program.links_kernels(ADMIT)
    unlinked = replace(program, pins=checked_pins({"links": "none"}, "gpu"))
    assert not any(map(unlinked.links_kernels, unlinked.names()))
