"""Checkpoints with the names, shapes and configs of published ones: every tensor is used once."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError
from jaxinfer.core.progress import NoProgress
from jaxinfer.models.base import Model, forward
from jaxinfer.models.params import nested
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.folder_files import checkpoint_files
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import forms_of, plan_params
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.choose import quantised_source
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.quantised.scheme import Rule, Scheme, WeightScheme
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit import published_formats as kit
from kit.checkpoints import tiny_qwen3_config, write_hf_folder
from kit.memory_checkpoint import InMemory, source_of
from kit.model_sources import resolve
from pallas_kernels.harness.registry import select
from pallas_kernels.lib.arrangements import TILES
from pallas_kernels.lib.quantised import dequantised, quantised
from pallas_kernels.quantised_gemm.api import OP, QuantisedGemmArgs
from pallas_kernels.quantised_gemm.fp8 import launch

FORMS = {
    "Qwen3-AWQ": ("int4 g128 zeros", "int4 per row zeros"),
    "Qwen3-GPTQ-Int4": ("int4 g128", "int4 per row"),
    "Qwen3-quantized.w4a16": ("int4 g128", "int4 per row"),
    "Qwen3-FP8-dynamic": ("fp8 per row", "fp8 per row"),
    "Qwen3-FP8": ("fp8 128x128", "fp8 per row"),
}  # of down, with 256 inputs, and of others, with 128
DOWN = "model.layers.1.mlp.down_proj"  # 128 outputs, 256 inputs


@pytest.fixture(params=kit.PUBLISHED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_logical_tensors(name: str, tmp_path: Path) -> None:
    config, tensors, matrices = kit.published(name)
    checkpoint = kit.opened(kit.write_published(tmp_path, config, tensors))
    sources = {s.name: s.shape for spec in kit.model().param_specs for s in spec.sources}
    unneeded = checkpoint.unneeded
    assert {n: i.shape for n, i in checkpoint.tensors.items() if n not in unneeded} == sources
    assert all(info.readable for info in checkpoint.tensors.values())
    assert checkpoint.forms.keys() == matrices.keys()
    for matrix, expected in matrices.items():
        form = FORMS[name][not matrix.endswith("down_proj.weight")]
        assert str(checkpoint.forms[matrix]) == form
        assert checkpoint.read_quantised(matrix).form == checkpoint.forms[matrix]
        np.testing.assert_array_equal(checkpoint.read(matrix), expected)
    for plain in sources.keys() - matrices.keys():
        np.testing.assert_array_equal(checkpoint.read(plain), tensors[plain])


def test_a_load_reads_every_tensor_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxinfer.weights.load.LOAD_THREADS", 1)
    config, tensors, _ = kit.published(name)
    reads: Counter[str] = Counter()
    read = SafetensorsCheckpoint.read

    def counted(self: SafetensorsCheckpoint, one: str, part: int | None = None) -> np.ndarray:
        reads[one] += 1
        return read(self, one, part)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)
    checkpoint = kit.opened(kit.write_published(tmp_path, config, tensors))
    plain = kit.model()
    model = replace(plain, forms=forms_of(plain.family, checkpoint))
    placed = {"placement": default_placement(), "cache_dir": tmp_path / "cache"}
    load_params(model, source_of(checkpoint), **placed, seed=0, progress=NoProgress())
    assert reads == Counter(dict.fromkeys(tensors, 1))
    assert sum(i.nbytes for i in checkpoint.tensors.values()) == sum(
        tensor.nbytes for tensor in tensors.values()
    )


def test_random_weights_have_the_forms_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """But for the dtype of scales, which a config does not say."""
    config, tensors, _ = kit.published(name)
    folder = kit.write_published(tmp_path, config, tensors)
    expected = {one: str(form) for one, form in kit.opened(folder).forms.items()}
    _, random = quantised_source(resolve(folder, load_format="dummy"), kit.model(), None)
    assert {one: str(form) for one, form in random} == expected


def test_random_weights_of_blocks_that_are_wider_than_a_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kit.BLOCK_FP8 | {"weight_block_size": [256, 256]}
    wide = (config, lambda shape: kit.fp8(shape, 256, 256))
    monkeypatch.setitem(kit.PUBLISHED, "Qwen3-FP8", wide)
    test_random_weights_have_the_forms_of_a_checkpoint("Qwen3-FP8", tmp_path)


def test_loads_into_a_model(name: str, tmp_path: Path) -> None:
    """The specs of a family take the matrices; the joined q, k and v have the values expected."""
    config, tensors, matrices = kit.published(name)
    folder = kit.write_published(tmp_path, config, {n: t for n, t in tensors.items() if _used(n)})
    checkpoint = kit.opened(folder)
    plain = kit.model()
    model = replace(plain, forms=forms_of(plain.family, checkpoint))
    plan = {planned.spec.path: planned for planned in plan_params(model, checkpoint)}
    made = plan["layers_1/qkv"].whole(checkpoint)
    tree = {path.rpartition("/")[2]: array for path, array in made.items()}
    expected = [matrices[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    np.testing.assert_array_equal(dequantised(quantised(tree)), np.concatenate(expected))


def test_logits(name: str, tmp_path: Path) -> None:
    """A model that keeps the matrices computes what it computes with dequantised ones."""
    config, tensors, matrices = kit.published(name)
    tensors = {n: t for n, t in tensors.items() if _used(n)}
    checkpoint = kit.opened(kit.write_published(tmp_path, config, tensors))
    dense = InMemory({n: checkpoint.read(n) for n in checkpoint.tensors})
    plain = kit.model()
    kept = replace(plain, forms=forms_of(plain.family, checkpoint))
    token_ids = jnp.arange(5)

    def logits(model: Model, source: Checkpoint) -> jax.Array:
        planned = (param.whole(source) for param in plan_params(model, source))
        leaves = {path: jnp.asarray(array) for param in planned for path, array in param.items()}
        return forward(model, nested(leaves), token_ids)

    expected = logits(plain, dense)
    np.testing.assert_allclose(logits(kept, checkpoint), expected, rtol=0, atol=1e-6)
    assert np.abs(expected).max() > 0.1


def test_parts_in_several_files(name: str, tmp_path: Path) -> None:
    """Shards with an index; the parts of a matrix are in different ones."""
    config, tensors, matrices = kit.published(name)
    contiguous = {n: np.ascontiguousarray(tensor) for n, tensor in tensors.items()}
    folder = write_hf_folder(tmp_path, kit.CONFIG, contiguous, shards=3)
    scheme = quantization_scheme({"quantization_config": config})
    assert scheme is not None
    checkpoint = QuantisedCheckpoint(SafetensorsCheckpoint(checkpoint_files(folder)), scheme)
    for matrix, expected in matrices.items():
        np.testing.assert_array_equal(checkpoint.read(matrix), expected)


def _used(name: str) -> bool:
    return not name.endswith(".bias")


# From a checkpoint to the kernel


def on_hopper(tree: Mapping[str, Any], num_tokens: int, *, swiglu: bool = False) -> str:
    """The implementation that an H100 runs."""
    w = quantised(tree)
    x = jax.ShapeDtypeStruct((num_tokens, w.num_inputs), jnp.bfloat16)
    return select(OP, "gpu", (QuantisedGemmArgs(x=x, w=w, swiglu=swiglu),), {}).name


@pytest.mark.parametrize("kv_outputs", [128, 64], ids=["whole_blocks", "block_edge"])
def test_blocks_are_multiplied_by_the_fp8_kernels(
    kv_outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA multiplies matrices whose last block of outputs is not whole."""
    monkeypatch.setattr(launch, "not_hopper", lambda: None)
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8}
    hf_config = tiny_qwen3_config(**sizes, num_key_value_heads=kv_outputs // 64, head_dim=64)
    plain = build_model(hf_config, "bfloat16")
    config, tensors, matrices = kit.published("Qwen3-FP8", plain)
    checkpoint = kit.opened(kit.write_published(tmp_path, config, tensors))
    scheme = quantization_scheme({"quantization_config": config})
    random = replace(source_of(checkpoint), checkpoint=None, scheme=scheme)
    _, forms = quantised_source(random, plain, None)
    assert dict(forms) == checkpoint.forms
    model = replace(plain, forms=forms, arrangement=TILES.name)
    planned = (one.whole(checkpoint) for one in plan_params(model, checkpoint))
    leaves = {path: array for arrays in planned for path, array in arrays.items()}
    assert {path: array.shape for path, array in leaves.items()} == {
        path: array.shape for path, array in model.arrays.items()
    }
    layer = nested(leaves)["layers_1"]
    edge = kv_outputs % 128 > 0
    qkv = list(layer["qkv"].values()) if edge else [layer["qkv"]]
    expected = [matrices[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    values = [dequantised(quantised(part)) for part in qkv]
    np.testing.assert_array_equal(np.concatenate(values), np.concatenate(expected))
    for num_tokens in (1, 8, 512):
        swiglu = on_hopper(layer["gate_up"], num_tokens, swiglu=True)
        taken = [on_hopper(w, num_tokens) for w in (layer["o"], layer["down"], qkv[0])]
        assert {swiglu, *taken} == {"mosaic_fp8"}
        assert [on_hopper(w, num_tokens) for w in qkv[1:]] == ["xla"] * edge


# Other values of the formats' settings, on one matrix


def one_matrix(
    folder: Path, config: dict[str, Any], packed: kit.Packed, module: str = DOWN
) -> tuple[str, np.ndarray, np.ndarray]:
    """The form of a matrix, its values as they are read, and those that are expected."""
    parts, expected = packed
    tensors = {module + role: part for role, part in parts.items()}
    checkpoint = kit.opened(kit.write_published(folder, config, tensors))
    (logical,) = checkpoint.forms
    assert checkpoint.tensors.keys() - checkpoint.unneeded == {logical}
    return str(checkpoint.forms[logical]), checkpoint.read(logical), expected


GPTQ = kit.PUBLISHED["Qwen3-GPTQ-Int4"][0]
AWQ = kit.PUBLISHED["Qwen3-AWQ"][0]
CASES: dict[str, tuple[str, dict[str, Any], Callable[[], kit.Packed]]] = {
    "gptq_zeros": (
        "int4 g64 zeros",
        GPTQ | {"sym": False, "group_size": 64},
        lambda: kit.gptq((64, 256), group=64, sym=False),
    ),
    "gptq_v2": (
        "int4 g128 zeros",
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        lambda: kit.gptq((64, 256), sym=False, one_less=False),
    ),
    "gptq_8_bits": (
        "int8 g128",
        GPTQ | {"bits": 8},
        lambda: kit.gptq((64, 256), bits=8),
    ),
    "gptq_8_bits_zeros": (
        "int8 g128 offsets",
        GPTQ | {"bits": 8, "sym": False},
        lambda: kit.gptq((64, 256), bits=8, sym=False),
    ),
    "gptq_rows_and_trivial_order": (
        "int4 per row",
        GPTQ | {"group_size": -1, "desc_act": True},
        lambda: kit.gptq((64, 256), group=256),
    ),
    "gptq_exception": (
        "int8 g32",
        GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 32}}},
        lambda: kit.gptq((64, 256), bits=8, group=32),
    ),
    "awq_without_zeros": (
        "int4 g128",
        AWQ | {"zero_point": False},
        lambda: _without_zeros(kit.awq((64, 256))),
    ),
    "awq_old_names": (
        "int4 g64 zeros",
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True},
        lambda: kit.awq((64, 256), group=64),
    ),
    "packed_zeros": (
        "int4 g32 zeros",
        kit.compressed_config({"symmetric": False, "group_size": 32}, "pack-quantized"),
        lambda: kit.packed((52, 96), group=32, sym=False),
    ),
    "packed_8_bits_zeros": (
        "int8 g64 offsets",
        kit.compressed_config(
            {"symmetric": False, "group_size": 64, "num_bits": 8}, "pack-quantized"
        ),
        lambda: kit.packed((50, 128), bits=8, group=64, sym=False),
    ),
    "packed_channel": (
        "int4 per row",
        kit.compressed_config({"strategy": "channel", "group_size": None}, "pack-quantized"),
        lambda: kit.packed((64, 96), group=None),
    ),
    "static_fp8": (
        "fp8 per row",
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda: _with_one_scale(kit.fp8((48, 80))),
    ),
    "fp8_blocks_in_bfloat16": (
        "fp8 128x128",
        kit.BLOCK_FP8,
        lambda: _rounded_scales(kit.fp8((256, 384), 128, 128)),
    ),
    "compressed_fp8_blocks": (
        "fp8 128x128",
        kit.compressed_config(
            {"type": "float", "num_bits": 8, "strategy": "block", "group_size": None}
            | {"block_structure": [128, 128], "actorder": None},
            "float-quantized",
        ),
        lambda: kit.fp8((128, 256), 128, 128),
    ),
    "fp8_block_edge": (
        "fp8 g128",
        kit.BLOCK_FP8,
        lambda: kit.fp8((200, 256), 128, 128),
    ),
    "fp8_block_of_few_inputs": (
        "fp8 per row",
        kit.BLOCK_FP8,
        lambda: kit.fp8((200, 96), 128, 128),
    ),
}


def _without_zeros(packed: kit.Packed) -> kit.Packed:
    parts, _ = packed
    values, _, scales = kit.random_parts((64, 256), 4, 128, np.float16)
    return {role: parts[role] for role in (".qweight", ".scales")}, kit.product(values, 8, scales)


def _rounded_scales(packed: kit.Packed) -> kit.Packed:
    """Scales of blocks in bfloat16, as Qwen publishes them."""
    parts, _ = packed
    scales = parts[".weight_scale_inv"].astype(ml_dtypes.bfloat16)
    each = scales.astype(np.float32).repeat(128, 0).repeat(128, 1)
    expected = parts[".weight"].astype(np.float32) * each
    return parts | {".weight_scale_inv": scales}, expected


def _with_one_scale(packed: kit.Packed) -> kit.Packed:
    """A scale for the whole matrix, and those of static activations and the KV cache."""
    parts, _ = packed
    scale = np.float32(0.03)
    others = {".weight_scale": scale.reshape(1), ".input_scale": np.ones(1, np.float32)}
    parts |= others | {".k_scale": np.ones((), np.float32)}
    return parts, parts[".weight"].astype(np.float32) * scale


@pytest.mark.parametrize("case", CASES)
def test_settings(case: str, tmp_path: Path) -> None:
    form, config, pack = CASES[case]
    found, values, expected = one_matrix(tmp_path, config, pack())
    assert found == form
    np.testing.assert_array_equal(values, expected)


def test_int8_offsets_of_float32_scales_are_rounded(tmp_path: Path) -> None:
    """One of two roundings per weight; see ``stored.form_of``."""
    config = kit.compressed_config(
        {"symmetric": False, "strategy": "channel", "group_size": None, "num_bits": 8},
        "int-quantized",
    )
    rng = np.random.default_rng(0)
    values, zeros = (rng.integers(-128, 128, (8, width)).astype(np.int8) for width in (64, 1))
    scales = rng.uniform(0.01, 0.02, (8, 1)).astype(np.float32)
    parts = {".weight": values, ".weight_scale": scales, ".weight_zero_point": zeros}
    form, found, expected = one_matrix(
        tmp_path, config, (parts, kit.product(values, zeros, scales))
    )
    assert form == "int8 per row offsets"
    np.testing.assert_allclose(found, expected, rtol=0, atol=256 * 0.02 * 2**-23)


def test_biases_that_a_model_needs_are_read(tmp_path: Path) -> None:
    """AutoGPTQ's biases of zeros are presented and named; others are plain tensors."""
    config, tensors, _ = kit.published("Qwen3-GPTQ-Int4")
    tensors[f"{DOWN}.bias"] = np.arange(128, dtype=np.float16)
    checkpoint = kit.opened(kit.write_published(tmp_path, config, tensors))
    biases = {name for name in tensors if name.endswith(".bias")}
    assert checkpoint.unneeded == biases - {f"{DOWN}.bias"}
    assert biases <= checkpoint.tensors.keys()


# Targets of compressed-tensors


def test_names_come_before_patterns_and_patterns_before_classes() -> None:
    schemes = [WeightScheme("packed", "int4", group) for group in (32, 64, 128)]
    targets = ("Linear", r"re:.*\.mlp\.", "model.layers.0.mlp.up_proj")
    rules = tuple(Rule(*one) for one in zip(targets, schemes, strict=True))
    scheme = Scheme("", rules, ("lm_head", r"re:.*layers\.1\..*down"))
    groups = {
        "model.layers.0.mlp.up_proj": 128,
        "model.layers.1.mlp.up_proj": 64,
        "model.layers.1.self_attn.q_proj": 32,
        "model.layers.1.mlp.down_proj": None,
        "model.embed_tokens": None,
        "lm_head": None,
    }
    for module, group in groups.items():
        found = scheme.weights_of(module)
        assert (found and found.group) == group, module


def test_groups_of_several_formats(tmp_path: Path) -> None:
    """A mixed checkpoint: int4 in the feed-forward networks, fp8 elsewhere, one layer as it is."""
    int4 = kit.compressed_config({}, "pack-quantized")["config_groups"]["group_0"]
    fp8 = kit.PUBLISHED["Qwen3-FP8-dynamic"][0]["config_groups"]["group_0"]
    groups = {
        "group_0": int4 | {"targets": [r"re:.*mlp\..*_proj"], "format": "pack-quantized"},
        "group_1": fp8 | {"format": "float-quantized"},
        "cache": {"targets": [r"re:.*self_attn$"], "input_activations": {"num_bits": 8}},
    }
    ignore = ["lm_head", "re:.*o_proj"]
    config = kit.compressed_config(
        {}, "mixed-precision", config_groups=groups, ignore=ignore, kv_cache_scheme={"num_bits": 8}
    )
    q, o = (f"model.layers.1.self_attn.{part}_proj" for part in "qo")
    parts = {DOWN: kit.packed((128, 256))[0], q: kit.fp8((64, 128))[0]}
    tensors = {m + role: part for m, of in parts.items() for role, part in of.items()}
    tensors[f"{o}.weight"] = np.ones((64, 64), ml_dtypes.bfloat16)
    checkpoint = kit.opened(kit.write_published(tmp_path, config, tensors))
    forms = {name: str(form) for name, form in checkpoint.forms.items()}
    assert forms == {f"{DOWN}.weight": "int4 g128", f"{q}.weight": "fp8 per row"}
    assert checkpoint.tensors.keys() == {*forms, f"{o}.weight"}


def test_layers_that_gptq_excludes(tmp_path: Path) -> None:
    """The first pattern of ``dynamic`` that matches decides."""
    config, tensors, matrices = kit.published("Qwen3-GPTQ-Int4")
    kept = {n: t for n, t in tensors.items() if "down_proj" not in n}
    kept |= {n: t.astype(np.float16) for n, t in matrices.items() if "down_proj" in n}
    dynamic = {r"-:.*\.down_proj": {}, r".*\.mlp\..*": {"desc_act": False}}
    folder = kit.write_published(tmp_path / "kept", config | {"dynamic": dynamic}, kept)
    expected = {name for name in matrices if "down_proj" not in name}
    assert kit.opened(folder).forms.keys() == expected
    folder = kit.write_published(tmp_path / "not", config | {"dynamic": dynamic}, tensors)
    with pytest.raises(
        CheckpointError, match=r"down_proj\.qweight is quantised, but quantization_"
    ):
        kit.opened(folder)


def test_mxfp4_names(tmp_path: Path) -> None:
    for module in (f"{DOWN}", f"{DOWN}.weight"):
        parts = {"_blocks": np.full((8, 2, 16), 0x21, np.uint8)}
        parts |= {"_scales": np.array([[0, 128]] * 8, np.uint8)}
        config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        folder = tmp_path / str(len(module))
        tensors = {module + role: part for role, part in parts.items()}
        checkpoint = kit.opened(kit.write_published(folder, config, tensors))
        values = checkpoint.read(f"{DOWN}.weight")
        row = [0.5 * 2**-127, 2**-127] * 16 + [1.0, 2.0] * 16
        np.testing.assert_array_equal(values, np.array([row] * 8, np.float32))


def test_data_that_is_missing(tmp_path: Path) -> None:
    """A file that is cut off after its header was checked."""
    config, tensors, _ = kit.published("Qwen3-AWQ")
    folder = kit.write_published(tmp_path, config, tensors)
    checkpoint = kit.opened(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: \d+ bytes"):
        checkpoint.read_quantised(f"{DOWN}.weight")


def test_config_of_the_first_releases(tmp_path: Path) -> None:
    """The key was compression_config."""
    config, tensors, matrices = kit.published("Qwen3-quantized.w4a16")
    folder = kit.write_published(tmp_path, config, tensors)
    stored = json.loads((folder / "config.json").read_text())
    stored["compression_config"] = stored.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(stored))
    assert kit.opened(folder).forms.keys() == matrices.keys()
