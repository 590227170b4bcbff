"""The kernels that a step of Gemma 4 26B-A4B runs on a Hopper GPU, by tracing it without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.program import Program
from jaxinfer.models import build_model
from kit.engines import tiny_limits
from pallas_kernels.harness import registry
from pallas_kernels.lib.device import Device, compiling_for

CONFIG = Path(__file__).parents[2] / "bench/shapes/gemma4-26b-a4b/config.json"
H100 = Device("gpu", "NVIDIA H100 80GB HBM3", "9.0")
LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
# By op and the components of a head, where these decide.
COMMON = {
    ("route", None): "triton",
    ("sandwich_norm", None): "triton",
    ("experts", None): "hopper",
}
DECODE = COMMON | {
    ("append_decode", 256): "mosaic",
    ("append_decode", 512): "triton",
    ("skinny_gemm", None): "mosaic",
    ("swiglu_gemm", None): "skinny_gemm",
}
PROMPT = COMMON | {
    ("qk_rope_append", 256): "triton",
    ("qk_rope_append", 512): "triton",
    ("paged_prefill", 256): "triton",
    ("paged_prefill", 512): "triton",
    ("swiglu_gemm", None): "mosaic",
}


def _head_dim(args: Any) -> int | None:
    heads = getattr(args, "qkv", getattr(args, "q", None))
    return None if heads is None else heads.shape[2]


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [(Bucket(1), DECODE), (Bucket(64), DECODE), (Bucket(0, 512, 64), PROMPT)],
    ids=["one row", "64 rows", "prompts"],
)
def test_chosen_for_hopper(
    bucket: Bucket, expected: dict[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[Any, set[str]] = {}
    select = registry._select

    def recorded(op: Any, platform: str, args: Any, *rest: Any) -> Any:
        chosen = select(op, platform, args, *rest)
        found.setdefault((op.name, _head_dim(args[0])), set()).add(chosen[0].name)
        return chosen

    monkeypatch.setattr(registry, "_select", recorded)
    model = build_model(json.loads(CONFIG.read_text("utf-8")) | LAYERS, "bfloat16")
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_pages": 99, "page_size": 16}
    limits = tiny_limits(**sizes, groups=model.state.groups)
    with compiling_for(H100):
        Program(model, replace(limits, buckets=(bucket,)), platform="gpu").trace(bucket.name)
    if bucket.num_decodes == 0:  # the last layer computes only the last tokens
        found[("swiglu_gemm", None)].discard("skinny_gemm")
    assert {key: found.get(key) for key in expected} == {key: {expected[key]} for key in expected}
