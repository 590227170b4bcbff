"""Steps of a few prompt tokens, as a prefix hit leaves them, on a GPU that is not present."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import pytest
from msgspec.structs import replace

from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.memory_plan import block_bytes
from jaxinfer.exec.compile.program import Program
from jaxinfer.models.base import Model
from jaxinfer.models.registry import build_model
from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from kit.checkpoints import tiny_llama_config
from kit.engines import tiny_limits
from pallas_kernels.harness import registry
from pallas_kernels.harness.pins import NO_PINS
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.paged_prefill.converted.launch import MOST_BYTES

_array: Any = jax.ShapeDtypeStruct
H200 = Device("gpu", "NVIDIA H200", "9.0")
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "head_dim": 64}
MODEL = build_model(tiny_llama_config(**SIZES, max_position_embeddings=8192), "bfloat16")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementation of each call of paged_prefill that is traced."""
    found: list[str] = []
    select = registry._select

    def recorded(op: Any, platform: str, args: Any, *rest: Any) -> Any:
        chosen = select(op, platform, args, *rest)
        if op.name == "paged_prefill":
            found.append(chosen[0].name)
        return chosen

    monkeypatch.setattr(registry, "_select", recorded)
    return found


def _trace(model: Model, bucket: Bucket) -> None:
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "page_size": 16}
    limits = tiny_limits(**sizes, max_model_len=8192, groups=model.state.groups)
    with compiling_for(H200):
        Program(model, replace(limits, buckets=(bucket,)), platform="gpu").trace(bucket.name)


@pytest.mark.parametrize(
    ("bucket", "kernel"),
    [
        pytest.param(Bucket(0, 128, 8), "split", id="few"),
        pytest.param(Bucket(16, 128, 8), "split", id="beside_decode_rows"),
        pytest.param(Bucket(0, 512, 8), "mosaic", id="many"),
    ],
)
def test_few_tokens_of_long_contexts(bucket: Bucket, kernel: str, chosen: list[str]) -> None:
    _trace(MODEL, bucket)
    assert set(chosen) == {kernel}


def test_the_states_of_splits_are_planned() -> None:
    """16 splits of float32 for each token and head, and two sums."""
    with compiling_for(H200):
        few, many = (
            block_bytes(MODEL, Bucket(0, tokens, 8), "gpu", NO_PINS) for tokens in (128, 2048)
        )
    assert few >= 16 * 128 * 4 * (64 + 2) * 4 > many


@pytest.mark.parametrize(("tokens", "kernel"), [(128, "split"), (512, "converted")])
def test_many_tokens_convert_8_bit_pages(
    tokens: int, kernel: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted pages are planned, up to a bound."""
    call = partial(jax_triton.triton_call, compute_capability=90)
    monkeypatch.setattr(jax_triton, "triton_call", call)
    decoder = MODEL.config.with_pages(BITS)
    assert decoder is not None
    model = dataclasses.replace(MODEL, config=decoder)
    _trace(model, Bucket(16, tokens, 8))
    assert set(chosen) == {kernel}
    with compiling_for(H200):
        planned = block_bytes(model, Bucket(16, tokens, 8), "gpu", NO_PINS)
    assert (planned >= MOST_BYTES) == (kernel == "converted") and planned < 2 * MOST_BYTES


@pytest.mark.parametrize("bits", [16, 8])
def test_the_states_of_splits_of_latents_are_planned(bits: int) -> None:
    """8 splits of 16 heads, with a value and a sum in float32 for each token and head."""
    spec = LatentAttentionConfig(
        num_heads=16,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rank=512,
        query_rank=None,
        scale=0.1,
        rope=None,
        page_dtype=BITS if bits == 8 else None,
    )
    shapes = ((128, 8), (2048, 8), (128, 0))  # tokens and prompts
    with compiling_for(H200):
        planned = [
            spec.workspace(
                {}, StepShape(_array((tokens, 2048), jnp.bfloat16), rows, "gpu", NO_PINS)
            )
            for tokens, rows in shapes
        ]
    assert planned == [8 * 128 * 16 * (128 + 1) * 4, 0, 0]
