"""Tiny Qwen3 checkpoints with the tensors and configs of published quantised ones, random values.

Values are packed one by one as the formats are defined, not by jaxinfer's code, so that reading the
files is an independent check. Golden matrices of the formats' own programs: tests/data/quantised.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.models.base import Model
from jaxinfer.models.registry import build_model
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit.checkpoints import Tensors, tiny_qwen3_config

CONFIG = tiny_qwen3_config(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble, from the lowest

type Packed = tuple[Tensors, np.ndarray]  # tensors by role, and the matrix float32[O, K]


def model() -> Model:
    """The unquantised model."""
    return build_model(CONFIG, "float32")


def words(values: np.ndarray, bits: int) -> np.ndarray:  # int[..., n] -> int32[..., n * bits / 32]
    """Consecutive values in words, the first in the lowest bits; the last word is filled with 0."""
    per_word = 32 // bits
    padding = -values.shape[-1] % per_word
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    parts = padded.reshape(*values.shape[:-1], -1, per_word).astype(np.uint64)
    shifted = parts << np.arange(0, 32, bits, dtype=np.uint64)
    return shifted.sum(-1).astype(np.uint32).view(np.int32)


def random_parts(
    shape: tuple[int, int], bits: int, group: int | None, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and zero points, unsigned, and scales [O, G]; a few zero points are 0."""
    rng = np.random.default_rng(shape[0] * 1000 + shape[1])
    groups = shape[1] // (group or shape[1])
    scales = rng.uniform(0.005, 0.02, (shape[0], groups)).astype(dtype)
    zeros = rng.integers(0, 2**bits, (shape[0], groups))
    return rng.integers(0, 2**bits, shape), zeros, scales


def product(values: np.ndarray, zeros: np.ndarray | float, scales: np.ndarray) -> np.ndarray:
    """(value - zero) * scale in float32."""
    grouped = values.astype(np.float32).reshape(*scales.shape, -1)
    zeros = np.broadcast_to(zeros, scales.shape)[..., None].astype(np.float32)
    return ((grouped - zeros) * scales.astype(np.float32)[..., None]).reshape(values.shape)


def awq(shape: tuple[int, int], group: int = 128) -> Packed:
    """qweight, qzeros, scales."""
    values, zeros, scales = random_parts(shape, 4, group, np.float16)

    def ordered(rows: np.ndarray) -> np.ndarray:  # [R, O] -> int32[R, O / 8]
        return words(rows.reshape(len(rows), -1, 8)[..., AWQ_ORDER].reshape(rows.shape), 4)

    tensors = {".qweight": ordered(values.T), ".qzeros": ordered(zeros.T), ".scales": scales.T}
    return tensors, product(values, zeros, scales)


def gptq(
    shape: tuple[int, int], bits: int = 4, group: int = 128, sym: bool = True, one_less: bool = True
) -> Packed:
    """qweight, qzeros, scales, g_idx, and a bias of zeros as AutoGPTQ writes it."""
    values, zeros, scales = random_parts(shape, bits, group, np.float16)
    if sym:
        zeros[:] = 2 ** (bits - 1)
    # As in GPTQModel: 1 is subtracted from each value of a word, with borrows from the next.
    stored = words(zeros.T, bits).view(np.uint32)
    ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
    tensors = {
        ".qweight": words(values, bits).T,
        ".qzeros": (stored - ones * np.uint32(one_less)).view(np.int32),
        ".scales": scales.T,
        ".g_idx": (np.arange(shape[1]) // group).astype(np.int32),
        ".bias": np.zeros(shape[0], np.float16),
    }
    return tensors, product(values, zeros, scales)


def packed(
    shape: tuple[int, int], bits: int = 4, group: int | None = 128, sym: bool = True
) -> Packed:
    """weight_packed, weight_scale, weight_shape, and weight_zero_point."""
    values, zeros, scales = random_parts(shape, bits, group, ml_dtypes.bfloat16)
    tensors = {
        ".weight_packed": words(values, bits),
        ".weight_scale": scales,
        ".weight_shape": np.array(shape, np.int64),
    }
    if sym:
        return tensors, product(values, 2 ** (bits - 1), scales)
    tensors[".weight_zero_point"] = words(zeros.T, bits).T
    return tensors, product(values, zeros, scales)


def fp8(shape: tuple[int, int], rows: int = 1, columns: int | None = None) -> Packed:
    """weight, and weight_scale for each output or weight_scale_inv for each block."""
    rng = np.random.default_rng(shape[0] * 1000 + shape[1])
    values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    columns = columns or shape[1]
    scales = rng.uniform(0.01, 0.05, (-(-shape[0] // rows), -(-shape[1] // columns)))
    scales = scales.astype(np.float32)
    each = scales.repeat(rows, 0)[: shape[0]].repeat(columns, 1)[:, : shape[1]]
    role = ".weight_scale" if rows == 1 else ".weight_scale_inv"
    return {".weight": values, role: scales}, values.astype(np.float32) * each


_FROM_AUTOAWQ = {
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "group_size": 128,
    "modules_to_fuse": None,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
_FROM_GPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "meta": {"quantizer": ["gptqmodel:1.4.1"]},
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}
_WEIGHTS = {
    "actorder": "weight",
    "block_structure": None,
    "dynamic": False,
    "group_size": 128,
    "num_bits": 4,
    "observer": "mse",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_PER_TOKEN = _WEIGHTS | {
    "actorder": None,
    "dynamic": True,
    "group_size": None,
    "num_bits": 8,
    "observer": None,
    "strategy": "token",
    "type": "float",
}


def compressed_config(weights: dict[str, Any], own: str, **changes: Any) -> dict[str, Any]:
    """A config of llm-compressor with one group; ``weights`` are changes of its arguments."""
    group = {"targets": ["Linear"], "weights": _WEIGHTS | weights}
    group |= {"input_activations": None, "output_activations": None}
    config: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "format": own,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.10.2",
    }
    return config | changes


def _dynamic_fp8() -> dict[str, Any]:
    weights = {"actorder": None, "group_size": None, "num_bits": 8, "strategy": "channel"}
    config = compressed_config(weights | {"type": "float"}, "float-quantized")
    config["config_groups"]["group_0"]["input_activations"] = _PER_TOKEN
    return config


def _block_fp8(shape: tuple[int, int]) -> Packed:
    return fp8(shape, 128, 128)


BLOCK_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
# Published checkpoints by a short name: the config, and the tensors of each linear layer.
PUBLISHED: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int]], Packed]]] = {
    "Qwen3-AWQ": (_FROM_AUTOAWQ, awq),
    "Qwen3-GPTQ-Int4": (_FROM_GPTQ, gptq),
    "Qwen3-quantized.w4a16": (compressed_config({}, "pack-quantized"), packed),
    "Qwen3-FP8-dynamic": (_dynamic_fp8(), fp8),
    "Qwen3-FP8": (BLOCK_FP8, _block_fp8),
}


def published(
    name: str, of: Model | None = None, **changes: Any
) -> tuple[dict[str, Any], Tensors, Tensors]:
    """The config, the tensors and the logical matrices of a model, by default ``model()``.

    ``changes`` are of the config.
    """
    config, pack = PUBLISHED[name]
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    matrices: Tensors = {}
    for source in (source for spec in (of or model()).param_specs for source in spec.sources):
        module = source.name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[source.name] = rng.normal(0.0, 0.1, source.shape).astype(ml_dtypes.bfloat16)
            continue
        parts, matrices[source.name] = pack(source.shape)
        tensors |= {module + role: part for role, part in parts.items()}
    return config | changes, tensors, matrices


def write_published(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A folder of config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")
    return folder


def opened(folder: Path) -> QuantisedCheckpoint:
    """The folder as a quantised checkpoint."""
    scheme = quantization_scheme(json.loads((folder / "config.json").read_text()))
    assert scheme is not None
    return QuantisedCheckpoint(SafetensorsCheckpoint([folder / "model.safetensors"]), scheme)
