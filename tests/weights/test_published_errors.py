"""Quantised checkpoints that are refused: one sentence each, before weights are read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError, ConfigError
from jaxinfer.models.registry import build_model
from jaxinfer.weights.quantised import scheme
from jaxinfer.weights.quantised.choose import quantised_source
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit import published_formats as kit
from kit.checkpoints import tiny_qwen3_config
from kit.model_sources import resolve
from kit.published_formats import compressed_config

AWQ, GPTQ, W4A16, FP8 = "Qwen3-AWQ", "Qwen3-GPTQ-Int4", "Qwen3-quantized.w4a16", "Qwen3-FP8"
DOWN = "model.layers.1.mlp.down_proj"  # 128 outputs, 256 inputs

type Change = Callable[[np.ndarray], np.ndarray | None]


def refused(
    folder: Path, name: str, role: str, change: Change, **config: Any
) -> pytest.ExceptionInfo[CheckpointError]:
    """The error for a checkpoint in which one tensor of ``DOWN`` is changed, or removed by None."""
    own, tensors, _ = kit.published(name, **config)
    tensor = change(tensors.pop(DOWN + role))
    if tensor is not None:
        tensors[DOWN + role] = tensor
    with pytest.raises(CheckpointError) as caught:
        kit.opened(kit.write_published(folder, own, tensors))
    assert "\n" not in str(caught.value)
    assert caught.value.args[0].count("; ") >= 1  # what is wrong; the remedy
    return caught


def gone(tensor: np.ndarray) -> None:
    del tensor


@pytest.mark.parametrize(
    ("name", "role", "change", "message"),
    [
        (AWQ, ".scales", gone, rf"no tensor {DOWN}\.scales, which the quantised weight of {DOWN} "),
        (AWQ, ".qzeros", gone, rf"no tensor {DOWN}\.qzeros"),
        (AWQ, ".qzeros", lambda t: t[:, :3], r"qzeros has shape \(2, 3\) instead of \(2, 16\)"),
        (AWQ, ".scales", lambda t: t.astype(np.int32), "scales is stored as I32 instead of F16 or"),
        (AWQ, ".qweight", gone, rf"tensor {DOWN}\.(qzeros|scales) belongs to no quantised weight"),
        (
            AWQ,
            ".qweight",
            lambda t: t[None],
            r"qweight has shape \(1, 256, 16\) instead of that of",
        ),
        (GPTQ, ".scales", gone, rf"no tensor {DOWN}\.scales"),
        (GPTQ, ".qzeros", lambda t: t.T, r"qzeros has shape \(16, 2\) instead of \(2, 16\)"),
        (GPTQ, ".g_idx", lambda t: t[::-1].copy(), rf"{DOWN}\.g_idx has inputs in the order of "),
        (GPTQ, ".g_idx", lambda t: t[1:], r"g_idx has shape \(255,\) instead of \(256,\)"),
        (W4A16, ".weight_scale", gone, rf"no tensor {DOWN}\.weight_scale"),
        (W4A16, ".weight_scale", lambda t: t[:, :1], r"has shape \(128, 1\) instead of \(128, 2\)"),
        (W4A16, ".weight_shape", lambda t: t - 1, r"of shape \(128, 256\) instead of \(127, 255\)"),
        (W4A16, ".weight_packed", gone, r"belongs to no quantised weight"),
        (FP8, ".weight_scale_inv", gone, rf"no tensor {DOWN}\.weight_scale"),
        (FP8, ".weight_scale_inv", lambda t: t.T, r"has shape \(2, 1\) instead of \(1, 2\)"),
        (FP8, ".weight", lambda t: t.view(np.int8), r"weight is stored as I8 instead of F8_E4M3"),
        (FP8, ".weight", lambda t: t.astype(np.float32), r"weight_scale_inv belongs to no quant"),
    ],
)
def test_tensors(tmp_path: Path, name: str, role: str, change: Change, message: str) -> None:
    assert refused(tmp_path, name, role, change).match(message)


def same(tensor: np.ndarray) -> np.ndarray:
    return tensor


@pytest.mark.parametrize(
    ("name", "role", "config", "message"),
    [
        (AWQ, ".qweight", {"group_size": 96}, "has 256 inputs, which groups of 96 do not divide"),
        (GPTQ, ".qweight", {"group_size": 64}, r"scales has shape \(2, 128\) instead of \(4, "),
        (FP8, ".weight", {"weight_block_size": [128, 80]}, "has 256 inputs, which groups of 80 do"),
        (
            W4A16,
            ".weight_packed",
            {"ignore": ["re:.*mlp"]},
            r"down_proj\.weight_packed is quantised, but quantization_config says that .*is not",
        ),
        (
            W4A16,
            ".weight_packed",
            {"format": "int-quantized"},
            r"weight_packed is stored as I32, which does not fit the format",
        ),
    ],
)
def test_configs_that_do_not_fit(
    tmp_path: Path, name: str, role: str, config: dict[str, Any], message: str
) -> None:
    assert refused(tmp_path, name, role, same, **config).match(message)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (AWQ, {"group_size": 512}),
        (AWQ, {"group_size": 96}),
        (GPTQ, {"group_size": 96}),
        (FP8, {"weight_block_size": [128, 96]}),
        (W4A16, compressed_config({"group_size": 96}, "pack-quantized")),
    ],
)
def test_random_weights_are_refused_as_a_checkpoint_is(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    own, tensors, _ = kit.published(name, **config)
    folder = kit.write_published(tmp_path, own, tensors)
    with pytest.raises(CheckpointError) as stored:
        kit.opened(folder)
    with pytest.raises(CheckpointError) as random:
        quantised_source(resolve(folder, load_format="dummy"), kit.model(), None)
    # the first matrix that is checked is not the same one
    sentences = {re.sub(r"^tensor \S+ has \d+ ", "", str(one.value)) for one in (stored, random)}
    assert len(sentences) == 1 and "do not divide" in sentences.pop()


def test_random_weights_of_a_width_that_cannot_be_packed(tmp_path: Path) -> None:
    hf_config = tiny_qwen3_config(hidden_size=48)
    own = kit.PUBLISHED[AWQ][0] | {"group_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"quantization_config": own}))
    source = resolve(tmp_path / "config.json", load_format="dummy")
    with pytest.raises(CheckpointError, match="_proj.weight cannot be kept as int4 per row zeros"):
        quantised_source(source, build_model(hf_config, "float32"), None)


def test_activation_order_of_compressed_tensors(tmp_path: Path) -> None:
    own, tensors, matrices = kit.published(W4A16)
    order = f"{DOWN}.weight_g_idx"
    tensors[order] = np.full(256, -1, np.int32)  # unset
    kit.opened(kit.write_published(tmp_path / "unset", own, tensors))
    tensors[order] = (np.arange(256) // 128).astype(np.int32)
    checkpoint = kit.opened(kit.write_published(tmp_path / "trivial", own, tensors))
    np.testing.assert_array_equal(checkpoint.read(f"{DOWN}.weight"), matrices[f"{DOWN}.weight"])
    tensors[order] = (np.arange(256) % 2).astype(np.int32)
    with pytest.raises(CheckpointError, match=r"weight_g_idx has inputs in the order .*actorder"):
        kit.opened(kit.write_published(tmp_path / "order", own, tensors))


def test_both_quantised_and_not(tmp_path: Path) -> None:
    own, tensors, matrices = kit.published(AWQ)
    tensors[f"{DOWN}.weight"] = matrices[f"{DOWN}.weight"]
    with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.weight both quantised and not"):
        kit.opened(kit.write_published(tmp_path, own, tensors))


def test_width_that_cannot_be_packed(tmp_path: Path) -> None:
    config = compressed_config({"strategy": "channel", "group_size": None}, "pack-quantized")
    parts, _ = kit.packed((64, 48), group=None)
    tensors = {DOWN + role: part for role, part in parts.items()}
    with pytest.raises(CheckpointError, match="weight_packed cannot be kept as int4 per row: 48 "):
        kit.opened(kit.write_published(tmp_path, config, tensors))


def test_misshaped_mxfp4(tmp_path: Path) -> None:
    tensors = {f"{DOWN}_blocks": np.zeros((8, 2, 15), np.uint8)}
    tensors[f"{DOWN}_scales"] = np.zeros((8, 2), np.uint8)
    with pytest.raises(CheckpointError, match=r"_blocks has shape .*, or of that for each expert"):
        kit.opened(kit.write_published(tmp_path, {"quant_method": "mxfp4"}, tensors))


@pytest.mark.parametrize("one_less", [False, True])
def test_symmetric_zeros_are_checked_when_they_are_read(tmp_path: Path, one_less: bool) -> None:
    """The config says what format the zero points have, so the other format is noticed."""
    own, tensors, _ = kit.published(GPTQ, checkpoint_format="gptq_v2" if one_less else "gptq")
    if not one_less:
        tensors[f"{DOWN}.qzeros"] = tensors[f"{DOWN}.qzeros"] + 1
    checkpoint = kit.opened(kit.write_published(tmp_path, own, tensors))
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.qzeros has zero points other than 8 "):
        checkpoint.read_quantised(f"{DOWN}.weight")


def test_truncated_file(tmp_path: Path) -> None:
    own, tensors, _ = kit.published(AWQ)
    file = kit.write_published(tmp_path, own, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor "):
        SafetensorsCheckpoint([file])


# Configs

ALL = "compressed-tensors, fp8, awq, gptq, mxfp4"
W4 = kit.PUBLISHED[W4A16][0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, f"'bitsandbytes', .*{ALL}"),
        ({"quant_method": "hqq"}, f"'hqq', .*{ALL}"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, f"'modelopt', .*{ALL}"),
        ({"bits": 4}, f"quant_method' is None, .*{ALL}"),
        ("int4", "'quantization_config' must be an object, got 'int4'"),
        ({"quant_method": "awq", "version": "gemv"}, r"config\.version' is 'gemv', .*'gemm'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "'llm-awq', whose arrangement is not supp"),
        ({"quant_method": "awq", "bits": 3}, r"config\.bits' is 3, .*supported: 4"),
        ({"quant_method": "awq", "zero_point": "yes"}, r"zero_point' is 'yes', .*True, False"),
        ({"quant_method": "awq", "clip": 3}, r"config\.clip' is 3, which is not known"),
        ({"quant_method": "gptq", "bits": 3}, r"config\.bits' is 3, .*supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'gptq', 'gptq_v2'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size' must be a positive"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}},
            "'\\(', which is not a regular",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"rotation": "x"}}},
            r"dynamic\.a\.rotation' is 'x', which is not known",
        ),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 8}}, r"config\.adapter' is \{"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt' is 'e5m2', .*'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"must be two sizes, got \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"must be two sizes, got \[0, 1\]"),
        ({"quant_method": "fp8", "expert_dtype": "fp6"}, "expert_dtype' is 'fp6'"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "must be a list of names"),
        (W4 | {"format": "nvfp4-pack-quantized"}, "format' is 'nvfp4-pack-quantized', .*'pack-qua"),
        (W4 | {"format": "marlin-24"}, "format' is 'marlin-24'"),
        (W4 | {"quantization_status": "calibration"}, "quantization_status' is 'calibration'"),
        (W4 | {"transform_config": {"config_groups": {"u": 1}}}, "transform_config' is {'config_g"),
        (W4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format' is"),
        (W4 | {"ignore": ["re:*"]}, r"ignore' has the pattern '\*', which is not a regular"),
        (compressed_config({"num_bits": 3}, "pack-quantized"), r"weights\.num_bits' is 3, .*4, 8"),
        (compressed_config({"type": "float"}, "pack-quantized"), r"type' is 'float', .*'int'"),
        (compressed_config({"dynamic": True}, "pack-quantized"), r"dynamic' is True, .*False"),
        (compressed_config({"strategy": "block"}, "pack-quantized"), r"strategy' is 'block'"),
        (compressed_config({"rotation": 1}, "pack-quantized"), r"weights\.rotation' is 1, which"),
        *(
            (
                compressed_config(
                    {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": block},
                    "float-quantized",
                ),
                message,
            )
            for block, message in (
                (128, "block_structure' must be two sizes, got 128"),
                ("128x", "block_structure' must be two sizes, got '128x'"),
                ([128, "x", 128], "block_structure' must be two sizes, got .128, 'x', 128."),
                (None, "strategy' is 'block', but 'block_structure' has no sizes"),
            )
        ),
        (
            compressed_config(
                {"type": "float", "num_bits": 8, "symmetric": False}, "float-quantized"
            ),
            r"weights\.symmetric' is False",
        ),
    ],
)
def test_configs(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        quantization_scheme({"quantization_config": config})
    assert "\n" not in str(caught.value)


def test_two_groups_for_one_target() -> None:
    groups = dict(W4["config_groups"])
    groups["group_1"] = compressed_config({"group_size": 64}, "")["config_groups"]["group_0"]
    with pytest.raises(ConfigError, match=r"group_1\.targets' has 'Linear', which another group"):
        quantization_scheme({"quantization_config": W4 | {"config_groups": groups}})


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "gguf"}}])
def test_not_quantised(config: dict[str, Any]) -> None:
    assert quantization_scheme(config) is None


@pytest.mark.parametrize("pattern", ["(.|.)*[xyz][xyz]$", "((.|.)(.|.))*[!x]{2}"])
def test_a_pattern_that_backtracks_without_end(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheme, "_SECONDS", 0.05)
    config, tensors, _ = kit.published(W4A16, ignore=[f"re:{pattern}"])
    folder = kit.write_published(tmp_path, config, tensors)
    message = r"the pattern .* takes more than 0\.05 s for the name"
    with pytest.raises(CheckpointError, match=message):
        kit.opened(folder)
