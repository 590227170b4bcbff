"""Makes ../data/quantised: small matrices in published formats, and their published values.

Run by hand in an environment of its own (CPU): torch 2.13, transformers 5.23, compressed-tensors
0.20, and the sources of autoawq 0.2.9 and auto-gptq 0.7.1, unpacked into two folders:

    python make_quantised.py AUTOAWQ_FOLDER AUTO_GPTQ_FOLDER ../data/quantised

Each file has the tensors of one linear layer as the format's own program writes them, "expected",
the float32 matrix that the same program computes from them, and the quantization_config as
metadata. Scales are converted to float32 before the program multiplies, so nothing is rounded.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MODULE = "model.layers.0.mlp.down_proj"
OUTPUTS, INPUTS = 12, 128  # the last word of zero points is not full


def weights(outputs: int = OUTPUTS, inputs: int = INPUTS) -> torch.Tensor:
    """A random matrix whose rows differ in size and whose mean is not 0."""
    torch.manual_seed(outputs * inputs)
    size = torch.linspace(0.5, 2.0, outputs)[:, None]
    return (torch.randn(outputs, inputs) + 0.3) * 0.05 * size


def module_from(path: Path, name: str, **stubs: Any) -> types.ModuleType:
    """A module of another package, loaded from its file without importing the package."""
    sys.modules |= stubs
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(folder: Path, name: str, config: dict, tensors: dict, expected: torch.Tensor) -> None:
    stored = {f"{MODULE}{role}": tensor.contiguous() for role, tensor in tensors.items()}
    stored["expected"] = expected.float().contiguous()
    metadata = {"quantization_config": json.dumps(config)}
    save_file(stored, folder / f"{name}.safetensors", metadata=metadata)


def compressed(folder: Path) -> None:
    """compressed-tensors: its compressors and decompressors."""
    cases = {
        "packed4_g32": ("pack-quantized", 4, "int", True, "group", 32, None),
        "packed4_g64_zeros": ("pack-quantized", 4, "int", False, "group", 64, None),
        "packed4_channel": ("pack-quantized", 4, "int", True, "channel", None, None),
        "packed8_g128": ("pack-quantized", 8, "int", True, "group", 128, None),
        "packed8_channel_zeros": ("pack-quantized", 8, "int", False, "channel", None, None),
        "int8_channel": ("int-quantized", 8, "int", True, "channel", None, None),
        "int8_channel_zeros": ("naive-quantized", 8, "int", False, "channel", None, None),
        "fp8_tensor": ("float-quantized", 8, "float", True, "tensor", None, None),
        "fp8_channel": ("float-quantized", 8, "float", True, "channel", None, None),
        "fp8_blocks": ("float-quantized", 8, "float", True, "block", None, [12, 64]),
    }
    for name, (own, bits, kind, symmetric, strategy, group, block) in cases.items():
        arguments = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
        arguments |= {"group_size": group, "block_structure": block, "dynamic": False}
        groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
        config = QuantizationConfig(
            config_groups=groups, format=own, ignore=["lm_head"], quantization_status="compressed"
        )
        scheme = config.config_groups["group_0"]
        weight = weights()
        low, high = extrema(weight, strategy, group, block)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        scale = scale.to(torch.bfloat16 if "packed" in name or not symmetric else torch.float32)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(own)
        stored = compressor.compress(state, scheme)
        exact = stored | {"weight_scale": stored["weight_scale"].float()}
        expected = compressor.decompress(exact, scheme)["weight"]
        tensors = {f".{role}": tensor for role, tensor in stored.items()}
        save(folder, name, config.to_dict(), tensors, expected)


def extrema(
    weight: torch.Tensor, strategy: str, group: int | None, block: list[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest values of what shares a scale."""
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        assert block is not None
        columns = [part.split(block[1], 1) for part in weight.split(block[0], 0)]
        low = torch.stack([torch.stack([one.min() for one in row]) for row in columns])
        high = torch.stack([torch.stack([one.max() for one in row]) for row in columns])
        return low, high
    grouped = weight.reshape(len(weight), -1, group or weight.shape[1])
    return grouped.amin(2), grouped.amax(2)


def fp8(folder: Path) -> None:
    """transformers' fine-grained fp8 with a scale for 8 x 64 values, in float32 and e8m0."""
    blocks = weights(16).reshape(2, 8, 2, 64)
    for name, dtype in (("fp8_fine", torch.float32), ("fp8_fine_e8m0", torch.float8_e8m0fnu)):
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        if dtype != torch.float32:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        values = (blocks / scale).reshape(16, INPUTS).to(torch.float8_e4m3fn)
        stored = scale.reshape(2, 2).to(dtype)
        dequantise = Fp8Dequantize(None)._dequantize_one
        expected = dequantise(values, stored.float())
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        config |= {"weight_block_size": [8, 64], "modules_to_not_convert": ["lm_head"]}
        save(folder, name, config, {".weight": values, ".weight_scale_inv": stored}, expected)


def mxfp4(folder: Path) -> None:
    """transformers' dequantisation of gpt-oss's experts, for one expert; random bytes."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (OUTPUTS, INPUTS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 126, (OUTPUTS, INPUTS // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    save(folder, "mxfp4", config, {"_blocks": blocks, "_scales": scales}, expected)


def quantised(
    bits: int, inputs: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales float16[O, G] and zero points [O, G] above 0, with which a matrix can be packed."""
    grouped = weights(32, inputs).reshape(32, -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = grouped.abs().amax(2) * 2 / top
        return scales.half(), torch.full_like(scales, (top + 1) // 2)
    low, high = grouped.amin(2), grouped.amax(2)
    scales = (high - low) / top
    return scales.half(), (-low / scales).round().clamp(1, top)


def linear(scales: torch.Tensor, zeros: torch.Tensor, bits: int, group: int) -> torch.nn.Linear:
    """A linear layer whose weights are multiples of the scales."""
    inputs = scales.shape[1] * group
    layer = torch.nn.Linear(inputs, 32, bias=False)
    wide = scales.float().repeat_interleave(group, 1), zeros.repeat_interleave(group, 1)
    values = (weights(32, inputs) / wide[0] + wide[1]).round().clamp(0, 2**bits - 1)
    layer.weight.data = (values - wide[1]) * wide[0]
    return layer


def awq(folder: Path, package: Path) -> None:
    """AutoAWQ: packed by WQLinear_GEMM, dequantised by ``dequantize_gemm``."""
    packing = module_from(package / "awq/utils/packing_utils.py", "awq.utils.packing_utils")
    names = ("awq", "awq.utils", "awq.utils.module", "awq.utils.utils", "awq.modules")
    stubs = {name: types.ModuleType(name) for name in names}
    stubs["awq.utils.module"].try_import = lambda name: (None, "")
    stubs["awq.utils.utils"].get_best_device = lambda: "cpu"
    stubs["awq.utils.packing_utils"] = packing
    gemm = module_from(package / "awq/modules/linear/gemm.py", "awq_gemm", **stubs)
    scales, zeros = quantised(4, INPUTS, 32, symmetric=False)
    zeros[0] = 0
    layer = linear(scales, zeros, 4, 32)
    made = gemm.WQLinear_GEMM.from_linear(layer, 4, 32, scales=scales.t().float(), zeros=zeros.t())
    stored = {f".{role}": getattr(made, role) for role in ("qweight", "qzeros", "scales")}
    exact = stored[".scales"].float()
    expected = packing.dequantize_gemm(made.qweight, made.qzeros, exact, 4, 32).T
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": None}
    save(folder, "awq", config, stored, expected)


def gptq(folder: Path, package: Path) -> None:
    """AutoGPTQ: packed and, with an identity matrix as the input, dequantised by QuantLinear."""
    file = package / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py"
    qlinear = module_from(file, "qlinear_cuda_old")
    cases = ((4, 128, 64, True), (4, 64, 32, False), (8, 64, 64, True), (8, 64, 32, False))
    for bits, inputs, group, symmetric in cases:
        scales, zeros = quantised(bits, inputs, group, symmetric)
        layer = linear(scales, zeros, bits, group).half()
        made = qlinear.QuantLinear(bits, group, inputs, 32, False)
        made.pack(layer, scales.clone(), zeros.clone(), None)
        roles = ("qweight", "qzeros", "scales", "g_idx")
        stored = {f".{role}": copy.deepcopy(getattr(made, role)) for role in roles}
        made.scales = made.scales.float()
        expected = made(torch.eye(inputs)).T
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
        config |= {"sym": symmetric, "checkpoint_format": "gptq", "damp_percent": 0.01}
        save(folder, f"gptq{bits}" + "_zeros" * (not symmetric), config, stored, expected)


def main() -> None:
    autoawq, auto_gptq, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    compressed(folder)
    fp8(folder)
    mxfp4(folder)
    awq(folder, autoawq)
    gptq(folder, auto_gptq)


if __name__ == "__main__":
    main()
