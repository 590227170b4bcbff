"""The kernels of decode steps with fp8 weights on a Hopper GPU, by tracing them without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.program import Program
from jaxinfer.models import build_model
from kit.checkpoints import tiny_qwen2_config
from kit.engines import tiny_limits
from pallas_kernels.harness import registry
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.quantised import Form

H200 = Device("gpu", "NVIDIA H200", "9.0")
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
# The first norm adds nothing, and so is a kernel of its own.
QKV = {("norm_gemm", False): {"mosaic_fp8", "unfused"}}
FEW = QKV | {("norm_gemm", True): {"mosaic_fp8"}, ("quantised_mlp", None): {"unfused"}}
MANY = QKV | {("quantised_mlp", None): {"mosaic_fp8"}}


@pytest.mark.parametrize(("rows", "expected"), [(1, FEW), (64, FEW), (128, MANY)])
def test_norms_and_hidden_values_are_quantised_where_they_are_made(
    rows: int, expected: dict[Any, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[Any, set[str]] = {}
    select = registry._select

    def recorded(op: Any, platform: str, args: Any, *rest: Any) -> Any:
        chosen = select(op, platform, args, *rest)
        found.setdefault((op.name, getattr(args[0], "swiglu", None)), set()).add(chosen[0].name)
        return chosen

    monkeypatch.setattr(registry, "_select", recorded)
    plain = build_model(tiny_qwen2_config(**SIZES), "bfloat16")
    names = (f"model.layers.{i}.{name}.weight" for i in range(2) for name in MATRICES)
    form = Form("fp8", None, "float32")
    model = dataclasses.replace(plain, forms=tuple((name, form) for name in names))
    sizes: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 512, "page_size": 16}
    limits = tiny_limits(**sizes, groups=model.state.groups)
    bucket = Bucket(rows)
    with compiling_for(H200):
        Program(model, replace(limits, buckets=(bucket,)), platform="gpu").trace(bucket.name)
    fused = {key: names for key, names in found.items() if key[0] in ("norm_gemm", "quantised_mlp")}
    assert fused == expected
