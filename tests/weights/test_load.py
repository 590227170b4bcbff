"""Every kind of source gives the same parameters: the arrays that the specs build."""

import threading
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from jaxinfer.core.errors import CheckpointError
from jaxinfer.core.progress import NoProgress
from jaxinfer.engine.loop.late_compiles import COMPILE_EVENT
from jaxinfer.models.base import abstract_params
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.load import load_params
from jaxinfer.weights.sources import ModelSource, resolve_source
from kit.checkpoints import (
    DENSE_CONFIGS,
    built_arrays,
    random_hf_tensors,
    tiny_llama_config,
    tiny_qwen3_moe_config,
    write_gguf,
    write_hf_folder,
)
from kit.gguf_hybrid import tiny_qwen3_5_config, tiny_qwen3_5_moe_config
from kit.tiny_models import tiny_config
from pallas_kernels.lib.quantised import kind_and_form

CONFIGS = {
    **DENSE_CONFIGS,
    "llama-untied-biased": tiny_llama_config(tie_word_embeddings=False, attention_bias=True),
    "qwen3moe": tiny_qwen3_moe_config(),
}
ALL = CONFIGS | {"qwen35": tiny_qwen3_5_config(), "qwen35moe": tiny_qwen3_5_moe_config()}


def resolve(reference: Path | str, cache: Path, **options: Any) -> ModelSource:
    return resolve_source(str(reference), cache_dir=cache, progress=NoProgress(), **options)


def load(source: ModelSource, cache: Path, dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    model = build_model(source.hf_config, dtype)
    params = load_params(
        model,
        source,
        placement=default_placement(),
        cache_dir=cache,
        seed=seed,
        progress=NoProgress(),
    )
    return by_path(params)


def assert_same(params: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert params.keys() == expected.keys()
    for path, leaf in params.items():
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == expected[path].dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), expected[path], err_msg=path)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_folder(tmp_path: Path, name: str, shards: int, index: bool) -> None:
    model = build_model(ALL[name], "float32")
    tensors = random_hf_tensors(model)
    folder = write_hf_folder(tmp_path / "m", ALL[name], tensors, shards=shards, index=index)
    source = resolve(folder, tmp_path / "cache")
    assert not source.quantised
    assert_same(load(source, tmp_path / "cache"), built_arrays(model, tensors))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path: Path, stored: Any, dtype: str) -> None:
    config = CONFIGS["llama"]
    model = build_model(config, dtype)
    tensors = {k: v.astype(stored) for k, v in random_hf_tensors(model).items()}
    folder = write_hf_folder(tmp_path / "m", config, tensors)
    assert_same(load(resolve(folder, tmp_path), tmp_path, dtype), built_arrays(model, tensors))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_gguf(tmp_path: Path, name: str, kind: str) -> None:
    config, quant = ALL[name], GGMLQuantizationType[kind]
    model = build_model(config, "float32")
    tensors = random_hf_tensors(model)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, kind=quant)
    source = resolve(path, tmp_path / "cache")
    assert source.quantised == kind.startswith("Q")
    in_out = name == "gpt2"
    stored = {key: _quantised(value, key, quant, in_out) for key, value in tensors.items()}
    expected = built_arrays(model, stored)
    assert_same(load(source, tmp_path / "cache"), expected)
    assert_same(load(source, tmp_path / "cache"), expected)  # from the cache, if quantised
    assert (tmp_path / "cache").exists() == source.quantised


def _quantised(
    tensor: np.ndarray, name: str, kind: GGMLQuantizationType, in_out: bool
) -> np.ndarray:
    """A tensor quantised and dequantised by rows; GGUF stores some of GPT-2's transposed, which are
    [in, out].
    """
    if name.endswith(".A_log"):
        return np.log(np.exp(tensor))
    if tensor.ndim == 1 or name.endswith(("conv1d.weight", "shared_expert_gate.weight")):
        return tensor
    transposed = in_out and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    rows = np.ascontiguousarray(tensor.T) if transposed else tensor
    values = dequantize(quantize(rows, kind), kind)
    return values.T if transposed else values


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_optional_prefix(tmp_path: Path, prefix: str) -> None:
    config = CONFIGS["gpt2"]
    model = build_model(config, "float32")
    tensors = random_hf_tensors(model)
    stored = {prefix + name.removeprefix("transformer."): t for name, t in tensors.items()}
    stored[f"{prefix}h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.uint8)  # an ignored buffer
    folder = write_hf_folder(tmp_path / "m", config, stored)
    assert_same(load(resolve(folder, tmp_path), tmp_path), built_arrays(model, tensors))


def test_a_head_next_to_the_embedding_with_which_it_is_tied(tmp_path: Path) -> None:
    """A copy changes nothing; another head is not left out in silence."""
    config = tiny_llama_config(tie_word_embeddings=True)
    tensors = random_hf_tensors(build_model(config, "float32"))
    embed = tensors["model.embed_tokens.weight"]
    plain = load(resolve(write_hf_folder(tmp_path / "plain", config, tensors), tmp_path), tmp_path)
    for name, head in (("copy", embed), ("other", 2 * embed), ("shorter", embed[:-1])):
        folder = write_hf_folder(tmp_path / name, config, {**tensors, "lm_head.weight": head})
        source = resolve(folder, tmp_path)
        if name == "copy":
            jax.tree.map(np.testing.assert_array_equal, load(source, tmp_path), plain)
            continue
        with pytest.raises(CheckpointError, match="lm_head.weight .* differs from .*; set that to"):
            load(source, tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_dummy(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "m", CONFIGS[name])
    source = resolve(folder, tmp_path, load_format="dummy")
    alone = resolve(folder / "config.json", tmp_path, load_format="dummy")
    first, again, other = (
        load(source, tmp_path, "bfloat16", seed=3),
        load(alone, tmp_path, "bfloat16", seed=3),
        load(source, tmp_path, "bfloat16", seed=4),
    )
    abstract = by_path(abstract_params(build_model(CONFIGS[name], "bfloat16")))
    assert first.keys() == abstract.keys()
    for path, leaf in first.items():
        assert (leaf.shape, leaf.dtype) == (abstract[path].shape, jnp.bfloat16)
        np.testing.assert_array_equal(leaf, again[path])
    assert not np.array_equal(first["embed"], other["embed"])
    assert 0.01 < np.std(np.asarray(first["layers_0/qkv"], np.float32)) < 0.03
    assert not np.array_equal(first["layers_0/qkv"], first["layers_1/qkv"])
    assert (np.asarray(first["layers_0/norms"]) == 1).all()


def test_dummy_values_of_a_seed_do_not_change() -> None:
    """Benchmark figures are compared between versions, so the values must not change."""
    model = build_model(CONFIGS["gpt2"], "bfloat16")
    leaves = by_path(
        dummy_params(model, placement=default_placement(), seed=3, progress=NoProgress())
    )
    sums = {path: zlib.crc32(np.asarray(leaf).tobytes()) for path, leaf in leaves.items()}
    assert (sums["embed"], sums["layers_1/qkv"]) == (1779008865, 2587529930)
    assert not np.asarray(leaves["layers_0/up_bias"]).any()
    assert (np.asarray(leaves["final_norm"]) == 1).all()


def test_dummy_compiles_each_random_shape_once_in_other_threads() -> None:
    """Compiled by one thread, it took almost a second of a start on a GPU."""
    model = build_model(tiny_llama_config(vocab_size=97, intermediate_size=132), "bfloat16")
    compiled: list[int] = []

    def record(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT:
            compiled.append(threading.get_ident())

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        leaves = by_path(
            dummy_params(model, placement=default_placement(), seed=0, progress=NoProgress())
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    shapes = {leaf.shape for path, leaf in leaves.items() if "norm" not in path}
    assert 1 < len(compiled) <= len(shapes)
    assert threading.get_ident() not in compiled


def test_dummy_of_a_gguf_reads_no_weights(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    tensors = random_hf_tensors(build_model(config, "float32"))
    kind = GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind)
    source = resolve(path, tmp_path / "cache", load_format="dummy")
    assert source.checkpoint is None
    load(source, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_names_of_floats_are_not_those_of_records() -> None:
    """A name like "kv_a_norm" has as many parts as that of a recorded matrix."""
    model = build_model(tiny_config("deepseek_v3"), "float32")
    names = [path.rpartition("/")[2] for path in model.arrays]
    assert any(one.count("_") > 1 for one in names)
    assert all(kind_and_form(one) == (one, None) for one in names)
