"""GGUF files of many families, as llama.cpp writes them: names, layouts, keys and logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from jaxinfer.core.errors import CheckpointError, JaxinferError
from jaxinfer.models import Model, forward
from jaxinfer.models.params import nested
from jaxinfer.models.registry import build_model
from jaxinfer.nn.rope import Llama3Scaling, RopeConfig, inverse_frequencies
from jaxinfer.weights.gguf.checkpoint import GGUFCheckpoint, open_gguf
from jaxinfer.weights.gguf.config import hf_config_from_gguf
from jaxinfer.weights.gguf.header import read_header
from jaxinfer.weights.plan import forms_of, plan_params
from kit.checkpoints import Tensors, built_arrays
from kit.gguf_families import CASES, COMPARED, TOKEN_IDS, config_of, tensors_of, write_family
from weights.test_gguf_experts import EXACT, values_of
from weights.test_gguf_keys import WITHOUT_EFFECT, published_keys

# Of exp and log, and of 1 + w - 1.
ROUNDING = {"atol": 5e-7, "rtol": 0}
# ggml's GELU is a table of float16.
GELU = ("gemma", "phi2", "falcon", "gpt_neox", "bloom", "mpt")


def arrays_equal(model: Model, checkpoint: Any, expected: dict[str, np.ndarray]) -> int:
    """Compare every array that is read with the one that the folder gives; how many are kept
    quantised.
    """
    found, num_quantised = set[str](), 0
    for planned in plan_params(model, checkpoint):
        made, spec = planned.whole(checkpoint), planned.spec
        if not made.keys() <= expected.keys():
            num_quantised += 1
            matrix = values_of({leaf.rpartition("/")[2]: a for leaf, a in made.items()})
            made = {spec.path: matrix.T if spec.matrix == "out_in" else matrix}
        for leaf, array in made.items():
            np.testing.assert_allclose(array, expected[leaf], err_msg=leaf, **ROUNDING)
            found.add(leaf)
    assert found == set(expected)
    return num_quantised


@pytest.mark.parametrize("name", CASES)
def test_round_trip(tmp_path: Path, name: str) -> None:
    """The config, and every array."""
    config = config_of(name)
    plain, tensors = build_model(config, "float32"), tensors_of(config)
    checkpoint = open_gguf(write_family(tmp_path / "m.gguf", name, tensors))
    model = build_model(checkpoint.hf_config, "float32")
    assert model.config == plain.config
    arrays_equal(model, checkpoint, built_arrays(plain, tensors))


def exact(tensors: Tensors, kind: Type) -> Tensors:
    """Tensors whose matrices ``kind`` stores without loss."""
    rng = np.random.default_rng(1)
    return {
        key: (rng.integers(-1, 2, tensor.shape) * EXACT[kind]).astype(np.float32)
        if tensor.ndim > 1 and not key.endswith("A_log")
        else tensor
        for key, tensor in tensors.items()
    }


# rows in another order, rows of two tensors, experts of two tensors, q, k and v of one, gates and
# ups of one
@pytest.mark.parametrize(
    "name", ["falcon", "granite_hybrid_rope", "granite_moe", "phi2_older", "gemma4_experts"]
)
@pytest.mark.parametrize("kind", [Type.Q8_0, pytest.param(Type.MXFP4, marks=pytest.mark.nightly)])
def test_matrices_stay_quantised(tmp_path: Path, name: str, kind: Type) -> None:
    config = config_of(name)
    plain, tensors = build_model(config, "float32"), exact(tensors_of(config), kind)
    checkpoint = open_gguf(write_family(tmp_path / "m.gguf", name, tensors, kind=kind))
    model = build_model(checkpoint.hf_config, "float32")
    kept = replace(model, forms=forms_of(model.family, checkpoint))
    expected = built_arrays(plain, tensors)
    assert arrays_equal(model, checkpoint, expected) == 0
    assert arrays_equal(kept, checkpoint, expected) >= 3


def logits_of(path: Path) -> np.ndarray:
    checkpoint = open_gguf(path)
    model = build_model(checkpoint.hf_config, "float32")
    leaves = {
        leaf: jnp.asarray(array)
        for planned in plan_params(model, checkpoint)
        for leaf, array in planned.whole(checkpoint).items()
    }
    run = jax.jit(forward, static_argnums=0)
    return np.asarray(run(model, nested(leaves), jnp.asarray(TOKEN_IDS)))[-1]


@pytest.mark.parametrize(
    "name",
    [n if n == "gemma3" else pytest.param(n, marks=pytest.mark.nightly) for n in COMPARED],
)
def test_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    golden = load_file(Path(__file__).parents[1] / "golden" / "data" / "gguf_families.safetensors")
    logits = logits_of(write_family(tmp_path / "m.gguf", name))
    largest = np.abs(golden[name]).max()
    tolerance = 2e-3 if name.startswith(GELU) else 2e-5
    np.testing.assert_allclose(logits, golden[name], rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("name", CASES)
def test_no_published_key_is_ignored(tmp_path: Path, name: str) -> None:
    """A nonsense value of each key changes the config, or is refused by name."""
    header = read_header(write_family(tmp_path / "m.gguf", name))
    arch, ignored = CASES[name].arch, set[str]()
    factors = GEMMA4_FACTORS if arch == "gemma4" else {}
    before = hf_config_from_gguf(header, factors)
    for key in published_keys():
        metadata = {**header.metadata, f"{arch}.{key}": 11}
        try:
            if hf_config_from_gguf(replace(header, metadata=metadata), factors) == before:
                ignored.add(key)
        except JaxinferError as error:
            assert key in str(error) or key in CONTRADICTING, (key, error)
    own = WITHOUT_EFFECT_OF.get(name) or WITHOUT_EFFECT_OF.get(arch, set())
    assert ignored <= WITHOUT_EFFECT | own


GEMMA4_FACTORS = {"rope_freqs.weight": np.array([1.0] * 2 + [1e30] * 6, np.float32)}
# Another value of these contradicts other keys, of which the error may name any.
CONTRADICTING = (
    *("block_count", "embedding_length", "attention.head_count", "attention.key_length"),
    *("expert_count", "expert_feed_forward_length", "ssm.inner_size", "ssm.time_step_rank"),
    *("rope.dimension_count", "attention.key_length_swa", "attention.kv_lora_rank"),
    *("attention.sliding_window_pattern", "attention.shared_kv_layers"),
    *("rope.scaling.attn_factor", "rope.scaling.original_context_length"),
)
# By architectures or cases: keys that llama.cpp does not read, or whose meaning tensors or other
# keys have as well; a scaling of the type "none" has no factor.
WITHOUT_EFFECT_OF = {
    **dict.fromkeys(("command-r", "cohere2", "nemotron", "hunyuan-dense"), {"rope.scaling.factor"}),
    "deepseek2": {"rope.scaling.yarn_log_multiplier"},
    **dict.fromkeys(
        ("exaone-moe", "cohere2moe", "hy_v3"),
        {"rope.scaling.factor", "expert_shared_feed_forward_length"},
    ),
    **dict.fromkeys(("qwen3vl", "qwen3vlmoe"), {"n_deepstack_layers"}),
    "step35": {"leading_dense_block_count", "moe_every_n_layers"},
    "minimax-m2": {"feed_forward_length"},
    "hunyuan-moe": {"feed_forward_length"},
    "granite_hybrid_rope": {"expert_used_count"},
    "stablelm": {"use_parallel_residual"},
    "ernie4_5-moe": {"expert_shared_feed_forward_length"},
    "mamba": {"context_length"},
    "mamba2": {"context_length"},
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), {"rope.dimension_count", "rope.freq_base"}),
}


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma2", {"attention.sliding_window_pattern": [True]}, "true or false for each block"),
        ("gemma2", {"attention.sliding_window_pattern": "all"}, "must be an integer from 0, or a"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "softcapping is supported only as 0"),
        ("falcon", {"attention.head_count_kv": 3}, "4 heads with 3 KV heads need a multiple of 10"),
        ("granite_moe", {"rope.scaling.finetuned": False}, "finetuned is supported only as True"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1]}, "must be the same where it is not 0"),
        ("lfm2", {"attention.head_count_kv": [2]}, "must be a list of 3 integers from 0"),
        ("mamba2", {"ssm.time_step_rank": 7}, "must be a multiple of ssm.time_step_rank, 7"),
        ("mamba2", {"attention.head_count": 4}, "head_count is supported only as 0"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0]}, "must be at a period"),
        ("nemotron_h", {"expert_count": 8}, "expert_count is supported only as 0"),
        (
            "gemma4",
            {"attention.head_count_kv": [4, 2, 4, 1]},
            "must be the same in all layers",
        ),
        ("gemma4", {"feed_forward_length": [48, 48, 48, 99]}, "or doubled in those that share"),
        ("gemma4", {"attention.sliding_window_pattern": 0}, "must give the last layer no window"),
        ("gemma4", {"rope.dimension_count": 8}, "dimension_count is supported only as 16"),
        ("gemma4", {"attention.key_length": 32}, "value_length is supported only as 32, got 16"),
        ("qwen3vl", {"rope.dimension_sections": [3, 3, 1, 1]}, "must have three sections of 8"),
        ("qwen3vl", {"rope.dimension_sections": [3, 3, 1, 0]}, "must have three sections of 8"),
        ("qwen3vl", {"rope.dimension_sections": "all"}, "sections must be a list"),
        ("ministral3", {"rope.scaling.type": "linear"}, "is supported only beside YaRN"),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "max_alibi_bias must be a positive"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, "is supported only as 1e-05"),
        ("glm4_moe", {"expert_group_count": 2}, "expert_group_count is supported only as 0 or 1"),
    ],
)
def test_refused(tmp_path: Path, name: str, keys: dict[str, Any], message: str) -> None:
    path = write_family(tmp_path / "m.gguf", name, more=keys)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


@pytest.mark.parametrize("factors", [None, [2.0] * 8, [1.0, 1e30, 1.0, *[1e30] * 5], [1.0] * 4])
def test_factors_of_gemma4(tmp_path: Path, factors: list[float] | None) -> None:
    header = read_header(write_family(tmp_path / "m.gguf", "gemma4"))
    found = {} if factors is None else {"rope_freqs.weight": np.array(factors, np.float32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not hold 8 factors, ones"):
        hf_config_from_gguf(header, found)


def test_factors_of_llama_4_scout(tmp_path: Path) -> None:
    """Frequencies with a wavelength above 8,192 tokens are divided, and none is blended."""
    header = read_header(write_family(tmp_path / "m.gguf", "llama4"))
    wavelengths = 2 * np.pi * 5e5 ** (np.arange(8) / 8)  # of heads of 16
    factors = np.where(wavelengths > 8192, 16, 1).astype(np.float32)
    assert 0 < (factors == 16).sum() < 8
    config = hf_config_from_gguf(header, {"rope_freqs.weight": factors})
    (rope,) = build_model(config, "float32").config.ropes
    plain = inverse_frequencies(RopeConfig(16, 5e5))
    np.testing.assert_allclose(inverse_frequencies(rope), plain / factors, rtol=1e-6)


def test_prediction_layers_are_left_out(tmp_path: Path) -> None:
    """The last block of GLM-4.5, which ``block_count`` includes."""
    header = read_header(write_family(tmp_path / "m.gguf", "glm4_moe"))
    extra = {"blk.3.nextn.enorm.weight": header.tensors["blk.1.attn_norm.weight"]}
    extra |= {"blk.3.attn_q.weight": header.tensors["blk.1.attn_q.weight"]}
    counts = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    longer = replace(
        header, tensors={**header.tensors, **extra}, metadata={**header.metadata, **counts}
    )
    checkpoint = GGUFCheckpoint(longer, hf_config_from_gguf(longer, {}))
    plain = build_model(hf_config_from_gguf(header, {}), "float32")
    found = build_model(checkpoint.hf_config, "float32")
    assert found.config == plain.config and checkpoint.has_predictions
    assert not [name for name in checkpoint.tensors if ".layers.3." in name]


def test_constants_of_xielu_are_those_of_the_file(tmp_path: Path) -> None:
    header = read_header(write_family(tmp_path / "m.gguf", "apertus"))
    metadata = {**header.metadata, "xielu.beta": [0.5, 0.7]}
    changed = replace(header, metadata=metadata)
    checkpoint = GGUFCheckpoint(changed, hf_config_from_gguf(changed, {}))
    found = [checkpoint.read(f"model.layers.{i}.mlp.act_fn.beta") for i in range(2)]
    np.testing.assert_allclose(found, [0.5, 0.7])


def test_step_3_5_scales_the_rope_of_layers_without_a_window(tmp_path: Path) -> None:
    """The file's factors are those of heads that rotate whole."""
    path = write_family(tmp_path / "m.gguf", "step35", more={"rope.freq_base": 5e6})
    scaling = Llama3Scaling(
        factor=2.0,
        low_freq_factor=1.0,
        high_freq_factor=32.0,
        original_max_position_embeddings=131072,
    )
    whole = RopeConfig(16, 5e6)
    factors = inverse_frequencies(whole) / inverse_frequencies(replace(whole, scaling=scaling))
    config = hf_config_from_gguf(read_header(path), {"rope_freqs.weight": factors})
    ropes = [layer.mixer.rope for layer in build_model(config, "float32").config.layers]
    assert ropes[0] == RopeConfig(16, 5e6, scaling, 8)
    assert ropes[1] == RopeConfig(16, 1000.0)
