"""GGUF files of decoders with the gated delta rule, as llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from safetensors.numpy import load_file

from jaxinfer.core.errors import CheckpointError
from jaxinfer.core.progress import NoProgress
from jaxinfer.models import Model, forward
from jaxinfer.models.params import nested
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.gguf.checkpoint import GGUFCheckpoint, open_gguf
from jaxinfer.weights.gguf.config import hf_config_from_gguf
from jaxinfer.weights.gguf.header import read_header
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import forms_of, plan_params
from kit.checkpoints import Tensors, built_arrays, random_hf_tensors, write_gguf, write_hf_folder
from kit.gguf_blocks import random_rows
from kit.gguf_hybrid import CASES, CONFIGS, TOKEN_IDS, tiny_qwen3_5_config, write_case
from kit.memory_checkpoint import InMemory
from kit.model_sources import resolve
from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.lib.quantised import dequantised, quantised
from pallas_kernels.native.library import library
from weights.test_gguf_experts import EXACT, values_of

# Values of exp and log are not exact: the file has -exp(A_log).
DECAY = {"atol": 2e-7, "rtol": 0}
OUT, QKV = "model.layers.0.linear_attn.out_proj.weight", "blk.0.attn_qkv.weight"
# Rows of 256 and 512, of which K forms have blocks.
WIDE = tiny_qwen3_5_config(
    hidden_size=256, intermediate_size=256, linear_num_value_heads=8, head_dim=64
) | {"rope_scaling": None}


def tensors_of(name: str, kind: Type) -> Tensors:
    """A checkpoint that ``kind`` stores without loss."""
    tensors = random_hf_tensors(build_model(CONFIGS[name], "float32"))
    rng = np.random.default_rng(1)
    return {
        key: (rng.integers(-1, 2, tensor.shape) * EXACT[kind]).astype(np.float32)
        if tensor.ndim > 1
        else tensor
        for key, tensor in tensors.items()
    }


def arrays_of(model: Model, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {
        path: array
        for planned in plan_params(model, checkpoint)
        for path, array in planned.whole(checkpoint).items()
    }


def logits_of(model: Model, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    params = nested({path: jnp.asarray(array) for path, array in arrays.items()})
    return np.asarray(jax.jit(forward, static_argnums=0)(model, params, jnp.asarray(TOKEN_IDS)))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path: Path, name: str, kind: Type, older: bool) -> None:
    """Every array, dequantised and as it stays quantised in memory."""
    plain, tensors = build_model(CONFIGS[name], "float32"), tensors_of(name, kind)
    path = write_gguf(tmp_path / "m.gguf", CONFIGS[name], tensors, kind=kind, older=older)
    checkpoint = open_gguf(path)
    found = build_model(checkpoint.hf_config, "float32")
    assert found.config == plain.config
    expected = built_arrays(plain, tensors)
    kept = replace(found, forms=forms_of(found.family, checkpoint))
    assert bool(kept.forms) == (kind != Type.BF16)
    for model in (found, kept):
        for planned in plan_params(model, checkpoint):
            made, spec = planned.whole(checkpoint), planned.spec
            if not made.keys() <= expected.keys():
                matrix = values_of({leaf.rpartition("/")[2]: a for leaf, a in made.items()})
                made = {spec.path: matrix.T if spec.matrix == "out_in" else matrix}
            for leaf, array in made.items():
                tolerance = DECAY if leaf.endswith("decay") else {"atol": 0, "rtol": 0}
                np.testing.assert_allclose(array, expected[leaf], err_msg=leaf, **tolerance)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K"])
def test_inputs_of_value_heads_are_moved_in_blocks(tmp_path: Path, kind: str) -> None:
    """A head of 64 is a part of a block of 256, which has the same factor for all of its heads."""
    floats, of = random_hf_tensors(build_model(WIDE, "float32")), Type[kind]
    rows = random_rows(of, *floats[OUT].shape)
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", WIDE, floats, blocks={OUT: (rows, of)}))
    tiled = dequantize(rows, of).reshape(256, 4, 2, 64)  # the first head of both key heads, ...
    expected = tiled.swapaxes(1, 2).reshape(256, 512)
    np.testing.assert_array_equal(checkpoint.read(OUT), expected)
    matrix = checkpoint.read_quantised(OUT)
    assert matrix.form == checkpoint.forms[OUT]
    np.testing.assert_array_equal(dequantised(quantised(matrix.tree())), expected)


@pytest.mark.parametrize(("kind", "is_kept"), [("Q8_0", True), ("Q4_0", False), ("Q6_K", True)])
def test_heads_that_are_no_whole_blocks_are_read_as_floats(
    tmp_path: Path, kind: str, is_kept: bool
) -> None:
    """Two heads of 32 share the bytes of nibbles."""
    config = WIDE | {"linear_value_head_dim": 32}
    floats, of = random_hf_tensors(build_model(config, "float32")), Type[kind]
    rows = random_rows(of, *floats[OUT].shape)
    path = write_gguf(tmp_path / "m.gguf", config, floats, blocks={OUT: (rows, of)})
    checkpoint = open_gguf(path)
    assert (OUT in checkpoint.forms) == is_kept
    tiled = dequantize(rows, of).reshape(256, 4, 2, 32)
    expected = tiled.swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_array_equal(checkpoint.read(OUT), expected)


def test_heads_that_are_in_order_stay_as_they_are(tmp_path: Path) -> None:
    """With one value head for each key head the form is the file's."""
    config = WIDE | {"linear_num_key_heads": 8}
    floats = random_hf_tensors(build_model(config, "float32"))
    blocks = {OUT: (random_rows(Type.Q4_K, *floats[OUT].shape), Type.Q4_K)}
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", config, floats, blocks=blocks))
    assert checkpoint.forms[OUT].super_group == 256
    np.testing.assert_array_equal(checkpoint.read(OUT), dequantize(*blocks[OUT]))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    tensors = random_hf_tensors(build_model(config, "float32"))
    folder = write_hf_folder(tmp_path / "m", config, tensors)
    found = []
    for path in (folder, write_gguf(tmp_path / "m.gguf", config, tensors)):
        source = resolve(path)
        assert source.checkpoint is not None
        model = build_model(source.hf_config, "float32")
        found.append(logits_of(model, arrays_of(model, source.checkpoint)))
    np.testing.assert_allclose(*found, atol=1e-5, rtol=0)


def test_types_that_differ_by_tensor_are_kept(tmp_path: Path) -> None:
    """As in a file of Q4_K_M, of which some matrices that are one parameter have other types."""
    types = {
        "0.linear_attn.in_proj_qkv": Type.Q5_K,
        "0.linear_attn.in_proj_z": Type.Q4_K,
        "0.linear_attn.in_proj_a": Type.Q8_0,
        "0.linear_attn.out_proj": Type.Q4_K,
        "1.self_attn.q_proj": Type.Q4_K,
        "1.self_attn.k_proj": Type.Q4_K,
        "1.self_attn.v_proj": Type.Q6_K,
    }
    floats, blocks = random_hf_tensors(build_model(WIDE, "float32")), {}
    for stem, kind in types.items():
        name = f"model.layers.{stem}.weight"
        blocks[name] = (random_rows(kind, *floats[name].shape), kind)
    source = resolve(write_gguf(tmp_path / "m.gguf", WIDE, floats, blocks=blocks))
    assert source.checkpoint is not None
    plain = build_model(source.hf_config, "float32")
    kept = replace(
        plain,
        forms=forms_of(plain.family, source.checkpoint),
        arrangement=None if library() is None else LANES.name,
    )
    assert len(kept.forms) == len(types)
    options = {"placement": default_placement(), "cache_dir": tmp_path, "seed": 0}
    params = load_params(kept, source, progress=NoProgress(), **options)
    dense = {name: source.checkpoint.read(name) for name in source.checkpoint.tensors}
    expected = logits_of(plain, arrays_of(plain, InMemory(dense)))
    found = jax.jit(forward, static_argnums=0)(kept, params, jnp.asarray(TOKEN_IDS))
    # The native kernel rounds activations to 16 bits.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    golden = load_file(Path(__file__).parents[1] / "golden" / "data" / "gguf_hybrid.safetensors")
    checkpoint = open_gguf(write_case(tmp_path, name))
    model = build_model(checkpoint.hf_config, "float32")
    logits = logits_of(model, arrays_of(model, checkpoint))[-1]
    np.testing.assert_allclose(logits, golden[name], atol=1e-4, rtol=0)  # they are up to 7


def test_layers_with_a_state_by_a_list(tmp_path: Path) -> None:
    """It has an entry for each block, and takes precedence over the interval."""
    config = CONFIGS["qwen35moe"]
    kinds, tensors = config["layer_types"], random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    assert open_gguf(path).hf_config["layer_types"] == kinds
    key = "qwen35moe.attention.recurrent_layers"
    for value, message in (
        ([False, True], "must hold true or false for each block"),
        ([0, 1, 1], "must be a list of true or false"),
        (7, "must be a list of true or false"),
    ):
        header = read_header(path)
        metadata = {**header.metadata, key: value}
        with pytest.raises(CheckpointError, match=rf"recurrent_layers {message}"):
            hf_config_from_gguf(replace(header, metadata=metadata), {})


def test_prediction_layers_are_left_out(tmp_path: Path) -> None:
    """A block behind the others, which attends and has further tensors."""
    config = CONFIGS["qwen35moe"]
    tensors = random_hf_tensors(build_model(config, "float32"))
    extra = {
        f"blk.3.{name}.weight": np.ones((64, 64), np.float32)
        for name in ("attn_q", "attn_norm", "nextn.eh_proj", "nextn.hnorm")
    }
    metadata = {
        "qwen35moe.block_count": 4,
        "qwen35moe.nextn_predict_layers": 1,
        "qwen35moe.attention.recurrent_layers": [False, True, True, False],
    }
    path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata, extra=extra)
    checkpoint = open_gguf(path)
    assert checkpoint.has_predictions
    model = build_model(checkpoint.hf_config, "float32")
    assert model.config == build_model(config, "float32").config
    assert plan_params(model, checkpoint)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen35", {"ssm.time_step_rank": 5}, "must be a multiple of ssm.group_count, which is 2"),
        ("qwen35", {"ssm.inner_size": 385}, "must be a multiple of ssm.time_step_rank, which is 6"),
        ("qwen35", {"ssm.conv_kernel": 0}, "must be a positive integer, got 0"),
        ("qwen35", {"ssm.dt_b_c_rms": True}, "is not supported in a model of qwen35"),
        ("qwen35", {"rope.dimension_sections": [3, 2, 1, 0]}, r"only as \[2, 2, 2, 0\], got"),
        ("qwen35", {"full_attention_interval": -1}, "must be a positive integer"),
        ("qwen35moe", {"expert_gating_func": 2}, "is supported only as 0 or 1"),
        ("qwen35moe", {"expert_shared_feed_forward_length": 0}, "must be a positive integer"),
        ("qwen3next", {"rope.dimension_sections": [2, 2, 2, 0]}, "is not supported in a model of"),
    ],
)
def test_refused_keys(tmp_path: Path, name: str, keys: dict[str, Any], message: str) -> None:
    tensors = random_hf_tensors(build_model(CONFIGS[name], "float32"))
    header = read_header(write_gguf(tmp_path / "m.gguf", CONFIGS[name], tensors))
    metadata = {**header.metadata, **{f"{name}.{key}": value for key, value in keys.items()}}
    with pytest.raises(CheckpointError, match=message) as raised:
        hf_config_from_gguf(replace(header, metadata=metadata), {})
    assert f"metadata key {name}.{min(keys)} " in str(raised.value)


@pytest.mark.parametrize("key", ["ssm.group_count", "ssm.state_size", "ssm.inner_size"])
def test_missing_keys(tmp_path: Path, key: str) -> None:
    tensors = random_hf_tensors(build_model(CONFIGS["qwen35"], "float32"))
    header = read_header(write_gguf(tmp_path / "m.gguf", CONFIGS["qwen35"], tensors))
    metadata = {name: one for name, one in header.metadata.items() if name != f"qwen35.{key}"}
    with pytest.raises(CheckpointError, match=rf"lacks the metadata key qwen35\.{key}"):
        hf_config_from_gguf(replace(header, metadata=metadata), {})


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "message"),
    [
        ("qwen35", QKV, (639, 64), "its heads need 640 rows; convert"),
        ("qwen35", QKV, (64,), "its heads need 640 rows; convert"),
        ("qwen35", "blk.0.ssm_a", (5,), "its heads need 6 rows; convert"),
        ("qwen35", "blk.0.ssm_out.weight", (64, 385), "its heads need 384 inputs; convert"),
        ("qwen35", "blk.0.ssm_out.weight", (384,), "its heads need 384 inputs; convert"),
        ("qwen35", "blk.0.ssm_conv1d.weight", (128, 4), "its heads need 640 rows; convert"),
        ("qwen3next", "blk.0.ssm_ba.weight", (6, 64), "its heads need 12 rows; convert"),
    ],
)
def test_tensors_that_do_not_fit_the_heads(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...], message: str
) -> None:
    tensors = random_hf_tensors(build_model(CONFIGS[name], "float32"))
    header = read_header(write_gguf(tmp_path / "m.gguf", CONFIGS[name], tensors))
    other = {**header.tensors, tensor: replace(header.tensors[tensor], shape=shape)}
    with pytest.raises(CheckpointError, match=message) as raised:
        GGUFCheckpoint(replace(header, tensors=other), hf_config_from_gguf(header, {}))
    assert f"tensor {tensor} of {header.path} has shape {shape}" in str(raised.value)


def test_rates_that_are_not_negative(tmp_path: Path) -> None:
    """Files of other programs may have the logarithm itself."""
    config = CONFIGS["qwen35"]
    tensors = random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    checkpoint = open_gguf(path)
    raw = bytearray(path.read_bytes())
    raw[checkpoint.header.tensors["blk.0.ssm_a"].offset + 3] ^= 0x80  # the sign of the first
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ssm_a of .* not negative; convert"):
        checkpoint.read("model.layers.0.linear_attn.A_log")
