"""GGUF files of mixtures of experts and of latent attention, as llama.cpp writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models import forward
from jaxinfer.models.params import nested
from jaxinfer.models.registry import build_model
from jaxinfer.weights.gguf import checkpoint as gguf_checkpoint
from jaxinfer.weights.gguf.checkpoint import GGUFCheckpoint, open_gguf
from jaxinfer.weights.gguf.config import hf_config_from_gguf
from jaxinfer.weights.gguf.header import read_header
from jaxinfer.weights.plan import forms_of, plan_params
from kit.checkpoints import (
    Tensors,
    built_arrays,
    random_hf_tensors,
    write_gguf,
)
from kit.gguf_experts import CASES, CONFIGS, TOKEN_IDS, write_case
from pallas_kernels.lib.quantised import dequantised, quantised

# Matrices hold only 0 and these numbers with both signs, which the type stores without loss.
EXACT = {Type.BF16: 0.125, Type.Q8_0: 127 / 1024, Type.MXFP4: 6 / 64}


def tensors_of(name: str, kind: Type) -> Tensors:
    """A checkpoint that ``kind`` stores without loss."""
    tensors = random_hf_tensors(build_model(CONFIGS[name], "float32"))
    rng = np.random.default_rng(1)
    return {
        key: tensor
        if tensor.ndim == 1 or key.endswith("_bias")
        else (rng.integers(-1, 2, tensor.shape) * EXACT[kind]).astype(np.float32)
        for key, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Type.BF16) for name in CONFIGS),
        ("mixtral", Type.Q8_0),
        ("gpt_oss", Type.MXFP4),
        ("deepseek_v2", Type.Q8_0),
        ("deepseek_v3", Type.MXFP4),
    ],
)
def test_round_trip(tmp_path: Path, name: str, kind: Type) -> None:
    """Every array, dequantised and as it stays quantised in memory."""
    plain, tensors = build_model(CONFIGS[name], "float32"), tensors_of(name, kind)
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", CONFIGS[name], tensors, kind=kind))
    found = build_model(checkpoint.hf_config, "float32")
    assert found.config == plain.config
    expected = built_arrays(plain, tensors)
    kept = replace(found, forms=forms_of(found.family, checkpoint))
    num_quantised = 0
    for model in (found, kept):
        for planned in plan_params(model, checkpoint):
            made, spec = planned.whole(checkpoint), planned.spec
            if not made.keys() <= expected.keys():
                num_quantised += 1
                matrix = values_of({leaf.rpartition("/")[2]: a for leaf, a in made.items()})
                made = {spec.path: matrix.T if spec.matrix == "out_in" else matrix}
            for leaf, array in made.items():
                np.testing.assert_array_equal(array, expected[leaf], err_msg=leaf)
    assert bool(num_quantised) == (kind != Type.BF16)


def values_of(tree: dict[str, Any]) -> np.ndarray:
    """The values of a quantised matrix [O, I], or of a stack of them [E, O, I]."""
    if next(iter(tree.values())).ndim == 2:
        return np.asarray(dequantised(quantised(tree)))
    count = len(next(iter(tree.values())))
    return np.stack([values_of({k: v[i] for k, v in tree.items()}) for i in range(count)])


def test_deepseek_as_it_was_written_at_first(tmp_path: Path) -> None:
    """With kv_b in one tensor, as many kv heads as heads, and no keys of groups or of scores."""
    config, tensors = CONFIGS["deepseek_v2"], tensors_of("deepseek_v2", Type.BF16)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, older=True)
    checkpoint = open_gguf(path)
    assert (
        build_model(checkpoint.hf_config, "float32").config == build_model(config, "float32").config
    )
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(name), tensors[name])


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gpt_oss", {"gpt-oss.attention.sliding_window_pattern": 3}, "is supported only as 2"),
        ("gpt_oss", {"gpt-oss.rope.freq_base_swa": 7.0}, "freq_base_swa is supported only as"),
        ("deepseek_v3", {"deepseek2.expert_gating_func": 4}, "is supported only as 0 or 1 or 2"),
        ("deepseek_v3", {"deepseek2.attention.key_length": 96}, "is supported only as 64"),
        ("deepseek_v3", {"deepseek2.attention.key_length_mla": 32}, "must exceed rope.dimension_"),
        ("deepseek_v3", {"deepseek2.expert_weights_norm": 1}, "must be true or false"),
        ("deepseek_v3", {"deepseek2.attention.head_count_kv": 4}, "is supported only as 1"),
        ("deepseek_v3", {"deepseek2.attention.indexer.top_k": 7}, "indexer.top_k is not supported"),
        ("mixtral", {"llama.expert_gating_func": 2}, "is supported only as 0 or 1"),
    ],
)
def test_refused(tmp_path: Path, name: str, keys: dict[str, Any], message: str) -> None:
    tensors = tensors_of(name, Type.BF16)
    path = write_gguf(tmp_path / "m.gguf", CONFIGS[name], tensors, metadata=keys)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "message"),
    [
        ("deepseek_v3", "blk.0.attn_v_b.weight", None, "attn_k_b.weight but not blk.0.attn_v_b"),
        ("gpt_oss", "blk.1.ffn_gate_exps.bias", None, "ffn_up_exps.bias but not blk.1.ffn_gate_"),
        ("gpt_oss", "blk.0.ffn_up_exps.weight", (5, 32, 64), "which do not fit together"),
        ("deepseek_v3", "blk.0.attn_k_b.weight", (32, 64), "instead of one of 3 dimensions"),
        ("qwen3_moe", "blk.0.ffn_up_exps.weight", (64, 64), "instead of one of 3 dimensions"),
    ],
)
def test_tensors_that_do_not_belong_together(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...] | None, message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIGS[name], tensors_of(name, Type.BF16))
    header = read_header(path)
    tensors = dict(header.tensors)
    if shape is None:
        del tensors[tensor]
    else:
        tensors[tensor] = replace(tensors[tensor], shape=shape)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(replace(header, tensors=tensors), hf_config_from_gguf(header, {}))


def test_matrices_of_experts_are_limited_in_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one stack, and in all: 2 layers have a gate, an up and a down of each of 5 experts."""
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["qwen3_moe"], tensors_of("qwen3_moe", Type.BF16))
    header, name = read_header(path), "blk.0.ffn_up_exps.weight"
    huge = replace(header.tensors[name], shape=(1_000_000, 64, 64))
    tensors = {**header.tensors, name: huge}
    with pytest.raises(CheckpointError, match="has at least 10000.. matrices of experts, and at"):
        GGUFCheckpoint(replace(header, tensors=tensors), hf_config_from_gguf(header, {}))
    monkeypatch.setattr(gguf_checkpoint, "MAX_ALL_EXPERTS", 10)
    assert open_gguf(path).tensors
    monkeypatch.setattr(gguf_checkpoint, "MAX_ALL_EXPERTS", 9)
    with pytest.raises(
        CheckpointError, match="has at least 30 .* at most 27 are supported; use an"
    ):
        open_gguf(path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    golden = load_file(Path(__file__).parents[1] / "golden" / "data" / "gguf_experts.safetensors")
    checkpoint = open_gguf(write_case(tmp_path, name))
    model = build_model(checkpoint.hf_config, "float32")
    leaves = {
        path: jnp.asarray(array)
        for planned in plan_params(model, checkpoint)
        for path, array in planned.whole(checkpoint).items()
    }
    logits = np.asarray(forward(model, nested(leaves), TOKEN_IDS))[-1]
    np.testing.assert_allclose(logits, golden[name], atol=1e-4)  # they are up to 8
