"""Tensors of published quantised Qwen3 models, written out here: a plan uses each exactly once.

Names, shapes and dtypes are those of AutoAWQ, GPTQModel, llm-compressor and Qwen's own releases in
FP8, with the sizes of the configs of Qwen3-4B and DeepSeek-R1-0528-Qwen3-8B.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.registry import build_model
from jaxinfer.weights.plan import forms_of, plan_params
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from kit import published_formats as kit
from kit.memory_checkpoint import Typed

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 151936, 32, 8, 128, 36
MODELS = {  # width, width of the feed-forward networks, tensors outside the layers
    "qwen3-4b": (2560, 9728, ("model.embed_tokens",)),
    "deepseek-r1-0528-qwen3-8b": (4096, 12288, ("model.embed_tokens", "lm_head")),
}

type Tensor = tuple[tuple[int, ...], Any]  # shape and dtype


def awq(o: int, i: int) -> dict[str, Tensor]:
    return {
        "qweight": ((i, o // 8), np.int32),
        "qzeros": ((i // 128, o // 8), np.int32),
        "scales": ((i // 128, o), np.float16),
    }


def gptq(o: int, i: int, bits: int = 4) -> dict[str, Tensor]:
    return {
        "qweight": ((i * bits // 32, o), np.int32),
        "qzeros": ((i // 128, o * bits // 32), np.int32),
        "scales": ((i // 128, o), np.float16),
        "g_idx": ((i,), np.int32),
    }


def packed(o: int, i: int) -> dict[str, Tensor]:
    return {
        "weight_packed": ((o, i // 8), np.int32),
        "weight_scale": ((o, i // 128), BF16),
        "weight_shape": ((2,), np.int64),
    }


def packed_with_zeros(o: int, i: int) -> dict[str, Tensor]:
    return packed(o, i) | {"weight_zero_point": ((o // 8, i // 128), np.int32)}


def fp8_of_blocks(o: int, i: int) -> dict[str, Tensor]:
    return {"weight": ((o, i), E4M3), "weight_scale_inv": ((o // 128, i // 128), BF16)}


def fp8_of_channels(o: int, i: int) -> dict[str, Tensor]:
    return {"weight": ((o, i), E4M3), "weight_scale": ((o, 1), BF16)}


def _config(name: str, **changes: Any) -> dict[str, Any]:
    return kit.PUBLISHED[name][0] | changes


# The quantization_config, the tensors of a matrix, their form, and the number of all of Qwen3-4B's.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Tensor]], str, int]] = {
    "awq": (_config("Qwen3-AWQ"), awq, "int4 g128 zeros", 902),
    "gptq": (_config("Qwen3-GPTQ-Int4"), gptq, "int4 g128", 1154),
    "gptq of 8 bits with zero points": (
        _config("Qwen3-GPTQ-Int4", bits=8, sym=False),
        lambda o, i: gptq(o, i, 8),
        "int8 g128 offsets",
        1154,
    ),
    "packed": (_config("Qwen3-quantized.w4a16"), packed, "int4 g128", 902),
    "packed with zero points": (
        kit.compressed_config({"symmetric": False}, "pack-quantized"),
        packed_with_zeros,
        "int4 g128 zeros",
        1154,
    ),
    "fp8 of blocks": (_config("Qwen3-FP8"), fp8_of_blocks, "fp8 128x128", 650),
    "fp8 of channels": (_config("Qwen3-FP8-dynamic"), fp8_of_channels, "fp8 per row", 650),
}


def published(model: str, tensors_of: Callable[[int, int], dict[str, Tensor]]) -> Iterator[Any]:
    """The name of each tensor with its shape and dtype, as in the index and the files' headers."""
    width, inner, outside = MODELS[model]
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    yield "model.norm.weight", ((width,), BF16)
    yield from ((f"{name}.weight", ((VOCAB, width), BF16)) for name in outside)
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        yield from ((f"{layer}.{name}.weight", ((n,), BF16)) for name, n in norms.items())
        for name, size in matrices.items():
            parts = tensors_of(*size).items()
            yield from ((f"{layer}.{name}.{part}", tensor) for part, tensor in parts)


def stored(tensors: Mapping[str, Tensor]) -> Typed:
    """A checkpoint of zeros, which take no memory; order and shape of matrices have values."""
    arrays: dict[str, np.ndarray] = {}
    arrays |= {n: np.broadcast_to(np.zeros((), dtype), s) for n, (s, dtype) in tensors.items()}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part == "g_idx":
            arrays[name] = np.arange(arrays[name].size, dtype=np.int32) // 128
        if part == "weight_shape":
            rows, words = arrays[f"{module}.weight_packed"].shape
            arrays[name] = np.array([rows, 8 * words])
    return Typed(arrays)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_uses_every_published_tensor_once(name: str, model_name: str) -> None:
    config, tensors_of, form, count = FORMATS[name]
    tensors = dict(published(model_name, tensors_of))
    assert len(tensors) == count + (model_name != "qwen3-4b")  # the head
    files = stored(tensors)
    scheme = quantization_scheme({"quantization_config": config})
    assert scheme is not None
    checkpoint = QuantisedCheckpoint(files, scheme)
    plain = build_model(CONFIGS[model_name], "bfloat16")
    model = replace(plain, forms=forms_of(plain.family, checkpoint))
    plan = plan_params(model, checkpoint)
    names = Counter(one for planned in plan for one in planned.names)
    assert names == Counter(dict.fromkeys(checkpoint.tensors, 1))
    # Each is one of the plan's or a part of one; by their sizes none is counted twice or never.
    assert sum(planned.nbytes for planned in plan) == sum(
        info.nbytes for info in files.tensors.values()
    )
    modules = {one.rpartition(".")[0] for one in tensors}
    assert {one.removesuffix(".weight") for one in names} == modules
    assert {one for one, _ in model.forms} == {f"{m}.weight" for m in modules if "_proj" in m}
    assert {str(each) for _, each in model.forms} == {form}
    small = {one for one in tensors if one.endswith((".g_idx", ".weight_shape"))}
    assert files.reads == Counter(dict.fromkeys(small, 1))  # a plan needs headers and these


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param("q_norm.weight", "has no tensor model.layers.7.self_attn.q_norm", id="norm"),
        pytest.param(
            "q_proj.qzeros", "has no tensor model.layers.7.self_attn.q_proj.qz", id="part"
        ),
    ],
)
def test_a_tensor_that_is_missing_is_named(change: str, message: str) -> None:
    config, tensors_of, *_ = FORMATS["awq"]
    tensors = dict(published("qwen3-4b", tensors_of))
    del tensors[f"model.layers.7.self_attn.{change}"]
    scheme = quantization_scheme({"quantization_config": config})
    assert scheme is not None
    plain = build_model(CONFIGS["qwen3-4b"], "bfloat16")
    with pytest.raises(CheckpointError, match=message):
        checkpoint = QuantisedCheckpoint(stored(tensors), scheme)
        plan_params(replace(plain, forms=forms_of(plain.family, checkpoint)), checkpoint)
