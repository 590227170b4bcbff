"""DeepSeek-V4's published files: their names, fp8 blocks, experts in MXFP4, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer.core.errors import CheckpointError, ConfigError
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors
from kit.tiny_models import tiny_config

# rows of which blocks of 128 are whole, or one block has all
WIDE = {"hidden_size": 256, "moe_intermediate_size": 64, "q_lora_rank": 128, "head_dim": 64}
WIDE |= {"o_lora_rank": 64, "index_head_dim": 64, "num_hidden_layers": 3}
CONFIG = tiny_config("deepseek_v4") | WIDE
# as published
QUANTISED: dict[str, Any] = {
    "expert_dtype": "fp4",
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
SECTIONS = {"main": {}, "compress": {"partial_rotary_factor": 0.5}}
FP8 = re.compile(r"attn\.(w|indexer\.wq_b)|shared_experts")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def powers(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:  # e8m0
    return (2.0 ** rng.integers(-6, -3, shape)).astype(ml_dtypes.float8_e8m0fnu)


def in_fp4(shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """The tensors of a matrix, and its values."""
    outputs, inputs = shape
    codes, scales = rng.integers(16, size=shape), powers((outputs, inputs // 32), rng)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    values = np.where(codes & 8, np.float32(-1), np.float32(1)) * E2M1[codes & 7]
    return pairs, scales, values * np.repeat(scales.astype(np.float32), 32, axis=1)


def in_fp8(shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """The tensors of a matrix, and its values."""
    values = rng.normal(0, 1, shape).astype(ml_dtypes.float8_e4m3fn)
    scales = powers(tuple(-(-size // 128) for size in shape), rng)
    each = np.repeat(np.repeat(scales.astype(np.float32), 128, axis=0), 128, axis=1)
    return values, scales, values.astype(np.float32) * each[: shape[0], : shape[1]]


def written(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(one) for name, one in tensors.items()},
        folder / "model.safetensors",
    )
    return str(folder)


def load(folder: str, cpu_weights: str = "float32") -> jaxinfer.LanguageModel:
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    return jaxinfer.load(folder, cpu_weights=cpu_weights, **settings)


def both(tmp_path: Path) -> tuple[str, str]:
    """A folder as published, without a prefix of names, and one of the same values as floats."""
    rng, floats = np.random.default_rng(3), random_hf_tensors(build_model(CONFIG, "float32"))
    stored: dict[str, np.ndarray] = {"mtp.0.enorm.weight": np.ones(4, np.float32)}
    for name, tensor in floats.items():
        own = name.removeprefix("model.")
        make = in_fp4 if ".experts." in name else in_fp8 if FP8.search(name) else None
        if make is None or tensor.ndim != 2:
            stored[own] = tensor
            continue
        stored[own], stored[own.replace(".weight", ".scale")], floats[name] = make(
            tensor.shape, rng
        )
    return written(tmp_path / "published", CONFIG | QUANTISED, stored), written(
        tmp_path / "floats", CONFIG, floats
    )


def test_published_files_have_the_values_of_floats(tmp_path: Path) -> None:
    published, floats = both(tmp_path)
    found, expected = by_path(load(published).params), by_path(load(floats).params)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@pytest.mark.nightly
def test_matrices_stay_quantised(tmp_path: Path) -> None:
    published, floats = both(tmp_path)
    kept, tokens = load(published, "auto"), np.arange(20)
    kinds = {path.rpartition("/")[2] for path in by_path(kept.params["layers_0"])}
    assert any("fp4" in kind for kind in kinds) and any("fp8" in kind for kind in kinds), kinds
    expected = load(floats).forward(tokens)
    np.testing.assert_allclose(kept.forward(tokens), expected, atol=2e-4, rtol=2e-4)


def test_names_that_transformers_saves(tmp_path: Path) -> None:
    """It reverses its reading of published names, but for some."""
    tensors = random_hf_tensors(build_model(CONFIG, "float32"))
    saved = {
        re.sub(r"^embed\.", "model.embed_tokens.", re.sub(r"^hc_head_", "model.hc_head.hc_", name))
        .replace(".attn.kv_norm.", ".attn.norm.")
        .replace("\n", ""): tensor
        for name, tensor in tensors.items()
    }
    assert len({*saved} - {*tensors}) == 1 + 3 + CONFIG["num_hidden_layers"]
    found = by_path(load(written(tmp_path / "saved", CONFIG, saved)).params)
    expected = by_path(load(written(tmp_path / "own", CONFIG, tensors)).params)
    assert all(np.array_equal(found[path], array) for path, array in expected.items())


def test_a_table_of_floats_is_refused(tmp_path: Path) -> None:
    tensors = random_hf_tensors(build_model(CONFIG, "float32"))
    table = "model.layers.0.ffn.gate.tid2eid"
    folder = written(tmp_path / "m", CONFIG, tensors | {table: tensors[table].astype(np.float32)})
    with pytest.raises(CheckpointError, match="is stored as F32, .* the model to I32 or I64"):
        load(folder)


def test_the_published_sizes() -> None:
    """Two windows alone, then entries of 4 and of 128 tokens; files list a layer for prediction."""
    own: dict[str, Any] = {"num_hidden_layers": 43, "compress_rate_hca": None}
    own |= {"compress_ratios": [0, 0, *([4, 128] * 20), 4, 0], "num_hash_layers": 3}
    spec = build_model(tiny_config("deepseek_v4") | own, "bfloat16").config
    ratios = [layer.mixer.compressor and layer.mixer.compressor.ratio for layer in spec.layers]  # type: ignore[attr-defined]
    assert ratios == [None, None, *([4, 128] * 20), 4]
    assert [layer.ffn.by_id for layer in spec.layers] == [True] * 3 + [False] * 40  # type: ignore[attr-defined]
    assert [rope.scaling is None for rope in spec.ropes] == [True, False]
    assert spec.ropes[1].attention_scale == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 4, 128, 8]}, "must hold 0, 4 or 128 for each of the 4 layers"),
        ({"compress_ratios": [0, 4]}, "must hold 0, 4 or 128 for each of the 4 layers"),
        ({"layer_types": ["full_attention"] * 4}, "'layer_types' must hold 'sliding_attention' or"),
        ({"mlp_layer_types": ["dense"] * 4}, "must hold 'hash_moe' or 'moe' for each of the 4"),
        ({"o_groups": 3}, "'num_attention_heads' 4 is not a multiple of 'o_groups' 3"),
        ({"scoring_func": "softmax"}, "supports only 'sqrtsoftplus' or 'sigmoid'"),
        ({"norm_topk_prob": False}, "is False, and this family supports only True"),
        ({"n_shared_experts": 2}, "is 2, and this family supports only 1"),
        ({"attention_bias": True}, "is True, and this family supports only False"),
        ({"qk_rope_head_dim": 7}, "gives 7 of the 16 components .* an even number"),
        ({"qk_rope_head_dim": 14}, "'index_head_dim' is 12, less than the 14 components"),
        ({"compress_rates": [4]}, "'compress_rates' must be an object"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, .* among the 8"),
        ({"rope_theta": 5.0, "rope_scaling": {"rope_theta": 6.0}}, "is 6.0 and config key .* 5.0"),
        ({"rope_parameters": {"type": "yarn"}}, "and 'rope_parameters' must be equal objects"),
        ({"rope_scaling": {"type": "twisted"}}, "rope type 'twisted' is unknown"),
        ({"rope_parameters": SECTIONS}, "gives 8 and 16 of the 16 components"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused(change: dict[str, Any], message: str) -> None:
    config = tiny_config("deepseek_v4")
    if change.get("rope_parameters") is SECTIONS:
        del config["rope_scaling"]
    with pytest.raises(ConfigError, match=message):
        build_model(config | change, "float32")
