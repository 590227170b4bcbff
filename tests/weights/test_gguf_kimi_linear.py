"""GGUF files of Kimi Linear, with the keys and tensors of llama.cpp's converter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.registry import build_model
from jaxinfer.weights.gguf.checkpoint import open_gguf
from jaxinfer.weights.plan import forms_of, plan_params
from kit.checkpoints import Tensors, built_arrays, random_hf_tensors
from kit.tiny_models import tiny_config
from weights.test_gguf_experts import EXACT, values_of

ARCH = gguf.MODEL_ARCH.KIMI_LINEAR
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
DECAY = {"atol": 2e-7, "rtol": 0}  # the file has -exp(A_log)


def config() -> dict[str, Any]:
    """Inputs of 32 and 64, of which Q8_0 and MXFP4 have blocks."""
    wide = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
    wide |= {"kv_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 24, "num_experts": 3}
    wide |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_token": 2}
    return {**tiny_config("kimi_linear"), **wide}


def write(
    path: Path,
    tensors: Tensors,
    kind: Type = Type.F32,
    *,
    short_dims: bool = False,
    without: tuple[str, ...] = (),
    **keys: Any,
) -> Path:
    """The file of a checkpoint; ``short_dims``: without outer dimensions of 1, as quantised files
    are. ``keys`` replace others, with two underscores for a dot.
    """
    c, writer = config(), gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCH])
    section, rope = c["linear_attn_config"], c["qk_rope_head_dim"]
    is_full = [i + 1 in section["full_attn_layers"] for i in range(c["num_hidden_layers"])]
    facts: dict[str, Any] = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["model_max_length"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": [int(one) for one in is_full],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length": c["kv_lora_rank"] + rope,
        "attention.value_length": 72,  # head_dim of the published config
        "attention.key_length_mla": c["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": rope,
        "rope.freq_base": 10000.0,
        "ssm.conv_kernel": section["short_conv_kernel_size"],
        "kda.head_dim": section["head_dim"],
        "expert_count": c["num_experts"],
        "expert_used_count": c["num_experts_per_token"],
        "expert_shared_count": c["num_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": c["first_k_dense_replace"],
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    for key, value in facts.items():
        add.get(type(value), writer.add_array)(f"kimi-linear.{key}", value)
    names = gguf.get_tensor_name_map(ARCH, c["num_hidden_layers"])
    for name, tensor in converted(tensors).items():
        own = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert own is not None, name
        if own in without:
            continue
        shape = tensor.shape
        if short_dims and len(shape) == 4:
            tensor = tensor.reshape(shape[2:] if own.endswith("ssm_a") else shape[1:])
        never = len(shape) == 4 or tensor.ndim == 1 or "ffn_gate_inp" in own or ".ssm_" in own
        stored = Type.F32 if never or tensor.shape[-1] % 32 else kind
        if stored == Type.F32:
            writer.add_tensor(own, tensor)
        else:
            writer.add_tensor(own, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(tensors: Tensors) -> Tensors:
    """The tensors of the file, with names that ``gguf`` knows, or of the file."""
    c, made = config(), dict[str, np.ndarray]()
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        layer, _, stem = name.partition("block_sparse_moe.experts.")
        if stem:
            number = layer.removeprefix("model.layers.").removesuffix(".")
            stack = f"blk.{number}.{EXPERTS[stem.split('.')[1]]}.weight"
            stacks.setdefault(stack, []).append(tensor)
        elif name.endswith("_conv1d.weight"):
            made[name] = tensor.reshape(1, len(tensor), 1, -1)
        elif name.endswith("A_log"):
            made[name] = -np.exp(tensor)
        elif name.endswith("dt_bias"):
            made[name.replace("dt_bias", "dt_proj.bias")] = tensor
        elif name.endswith("e_score_correction_bias"):
            made[name.replace("_bias", ".bias")] = tensor
        elif name.endswith("kv_b_proj.weight"):
            heads = tensor.reshape(c["num_attention_heads"], -1, tensor.shape[-1])
            keys, values = np.split(heads, [c["qk_nope_head_dim"]], axis=1)
            made[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            made[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(values)
        else:
            made[name] = tensor
    return made | {name: np.stack(each) for name, each in stacks.items()}


def tensors_of(kind: Type) -> Tensors:
    """A checkpoint that ``kind`` stores without loss."""
    rng = np.random.default_rng(1)
    return {
        key: (rng.integers(-1, 2, tensor.shape) * EXACT[kind]).astype(np.float32)
        if tensor.ndim == 2
        else tensor
        for key, tensor in random_hf_tensors(build_model(config(), "float32")).items()
    }


@pytest.mark.parametrize(("kind", "short_dims"), [(Type.Q8_0, True), (Type.MXFP4, False)])
def test_round_trip(tmp_path: Path, kind: Type, short_dims: bool) -> None:
    """Every array, dequantised and as it stays quantised in memory."""
    plain, tensors = build_model(config(), "float32"), tensors_of(kind)
    checkpoint = open_gguf(write(tmp_path / "m.gguf", tensors, kind, short_dims=short_dims))
    found = build_model(checkpoint.hf_config, "float32")
    assert found.config == plain.config
    expected = built_arrays(plain, tensors)
    kept, num_quantised = replace(found, forms=forms_of(found.family, checkpoint)), 0
    for model in (found, kept):
        for planned in plan_params(model, checkpoint):
            made, spec = planned.whole(checkpoint), planned.spec
            if not made.keys() <= expected.keys():
                num_quantised += 1
                matrix = values_of({leaf.rpartition("/")[2]: a for leaf, a in made.items()})
                made = {spec.path: matrix.T if spec.matrix == "out_in" else matrix}
            for leaf, array in made.items():
                tolerance = DECAY if leaf.endswith("decay") else {"atol": 0, "rtol": 0}
                np.testing.assert_allclose(array, expected[leaf], err_msg=leaf, **tolerance)
    assert num_quantised >= 9  # qkv and o, q_kv_a and o, gate_up and down, also of experts


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention__head_count_kv": [0, 1]}, "must be a list of 3 integers from 0"),
        ({"attention__head_count_kv": [0, -1, 0]}, "must be a list of 3 integers from 0"),
        ({"attention__key_length_mla": 8}, "must exceed rope.dimension_count, which is 8"),
        ({"expert_gating_func": 1}, "expert_gating_func is supported only as 2"),
        ({"moe_latent_size": 7}, "moe_latent_size is not supported in a model of kimi-linear"),
        ({"kda__head_dim": 8}, "ssm_conv1d_q.weight of .* its heads need 16 rows"),
    ],
)
def test_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    tensors = random_hf_tensors(build_model(config(), "float32"))
    with pytest.raises(CheckpointError, match=message):
        open_gguf(write(tmp_path / "m.gguf", tensors, **keys))


def test_rates_are_negative(tmp_path: Path) -> None:
    tensors = random_hf_tensors(build_model(config(), "float32"))
    name = "model.layers.0.self_attn.A_log"
    tensors[name] = np.full_like(tensors[name], -np.inf)
    checkpoint = open_gguf(write(tmp_path / "m.gguf", tensors))
    with pytest.raises(CheckpointError, match="ssm_a of .* holds numbers that are not negative"):
        checkpoint.read(name)
