"""Saving is the inverse of loading: folders that give the same parameters back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxinfer
from jaxinfer.core.errors import ArgumentError, CacheError, ConfigError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.models.params import ParamSpec, by_path, stack, tensors_of
from jaxinfer.models.registry import build_model
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.weights.quantised.write import write_tensors
from jaxinfer.weights.save import ParamsCheckpoint
from jaxinfer.weights.tokenizer_files import spec_from_path
from kit.checkpoints import (
    random_hf_tensors,
    tiny_llama_config,
    unstacked,
    write_gguf,
    write_hf_folder,
)
from kit.mixed_family import mixed_model
from kit.tiny_models import NAMES, tiny_config
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def load(folder: Path, **settings: Any) -> jaxinfer.LanguageModel:
    return jaxinfer.load(str(folder), skip_tokenizer_init=True, **settings)


def check_equal(one: Any, other: Any) -> None:
    """The two trees are equal bit for bit, NaN and negative zero included."""
    first, second = by_path(one), by_path(other)
    assert first.keys() == second.keys()
    for path, array in first.items():
        assert array.dtype == second[path].dtype, path
        raw = (np.asarray(a).view(np.uint8) for a in (array, second[path]))
        np.testing.assert_array_equal(*raw, err_msg=path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_loaded_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    config = json.loads(json.dumps(tiny_config(name), default=dict))
    tensors = random_hf_tensors(build_model(config, "float32"))
    write_hf_folder(tmp_path / "first", config, tensors)
    m = load(tmp_path / "first", dtype=dtype)
    m.save(tmp_path / "second")
    check_equal(load(tmp_path / "second", dtype=dtype).params, m.params)
    saved = load_file(tmp_path / "second" / "model.safetensors")
    if m.model.family.stacked_experts:  # published files have them so
        assert not any(re.search(r"experts\.\d+\.", key) for key in saved)
        saved = unstacked(saved)
    if name == "mllama":  # rows and biases of images are not read
        tensors["model.embed_tokens.weight"][-8:] = 0.0
    if name == "ernie4_5_vl":
        tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"][1] = 0.0
    assert saved.keys() == tensors.keys()
    for key, tensor in tensors.items():
        if dtype == "float32" and "norm" not in key:
            np.testing.assert_array_equal(saved[key], tensor, err_msg=key)
    written = json.loads((tmp_path / "second" / "config.json").read_text())
    assert written == config | {"dtype": dtype, "torch_dtype": dtype}


def test_changed_parameters_are_saved_with_the_model_alone(tmp_path: Path) -> None:
    config = tiny_llama_config(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    write_hf_folder(tmp_path / "first", config, random_hf_tensors(build_model(config, "float32")))
    model, params, _ = load(tmp_path / "first")
    changed = jax.tree.map(lambda array: array * 1.5 + 0.25, params)
    jaxinfer.save(model, changed, tmp_path / "new" / "second")
    check_equal(load(tmp_path / "new" / "second").params, changed)
    names = {path.name for path in (tmp_path / "new" / "second").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "second"]


@pytest.mark.parametrize("cpu_weights", ["float32", "quantised"])
def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(cpu_weights: str, tmp_path: Path) -> None:
    config = tiny_llama_config(num_key_value_heads=4)
    tensors = random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        tensors,
        kind=gguf.GGMLQuantizationType.Q4_0,
        metadata={"tokenizer.chat_template": TEMPLATE, "general.sampling.temp": 0.5},
    )
    cache = str(tmp_path / "cache")
    floats = jaxinfer.load(str(path), cache_dir=cache)
    m = jaxinfer.load(str(path), cache_dir=cache, cpu_weights=cpu_weights)
    m.save(tmp_path / "folder")
    again = jaxinfer.load(str(tmp_path / "folder"))
    if cpu_weights == "float32":
        check_equal(again.params, floats.params)
    else:
        assert any(isinstance(part, dict) for part in m.params["layers_0"].values())
        for name, array in by_path(floats.params).items():
            np.testing.assert_allclose(by_path(again.params)[name], array, atol=1e-6)
    assert again.generation_config == floats.generation_config
    assert again.generation_config["temperature"] == 0.5
    assert again.tokenizer is not None and floats.tokenizer is not None
    assert again.tokenizer.get_vocab() == floats.tokenizer.get_vocab()
    assert again.tokenizer.chat_template == TEMPLATE
    assert again.tokenizer.special_tokens_map == floats.tokenizer.special_tokens_map


def test_several_files_with_an_index(tmp_path: Path) -> None:
    config = tiny_llama_config()
    folder = write_hf_folder(
        tmp_path / "first", config, random_hf_tensors(build_model(config, "float32"))
    )
    m = load(folder)
    new = tmp_path / "second"
    new.mkdir()
    write_tensors(new, ParamsCheckpoint(m.model, m.params), NO_PROGRESS, shard_bytes=50_000)
    assert len(list(new.glob("model-*.safetensors"))) > 2
    (new / "config.json").write_text(json.dumps(config))
    check_equal(load(new).params, m.params)


def test_an_existing_folder_stays_as_it_is(tmp_path: Path) -> None:
    config = tiny_llama_config()
    write_hf_folder(tmp_path / "first", config, random_hf_tensors(build_model(config, "float32")))
    m = load(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    for name in ("first", "empty", "file"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CacheError, match=f"{name} exists already; name a new folder"):
            m.save(tmp_path / name)
        assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_left_of_a_model_that_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_llama_config()
    write_hf_folder(tmp_path / "first", config, random_hf_tensors(build_model(config, "float32")))
    m = load(tmp_path / "first")
    before = sorted(tmp_path.rglob("*"))
    wrong = {**m.params, "embed": jnp.zeros((3, 4))}
    with pytest.raises(ArgumentError, match=r"embed has shape \(3, 4\) instead of \(96, 64\)"):
        jaxinfer.save(m, wrong, tmp_path / "second")
    model, params = mixed_model()
    with pytest.raises(ArgumentError, match="not read from a config.json"):
        jaxinfer.save(model, params, tmp_path / "second")

    def full(self: ParamsCheckpoint, name: str) -> np.ndarray:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ParamsCheckpoint, "read", full)
    with pytest.raises(CacheError, match="No space left on device"):
        m.save(tmp_path / "second")
    assert sorted(tmp_path.rglob("*")) == before


def test_stacks_are_split_and_an_unknown_build_is_named() -> None:
    sources = tuple(Source(f"t{i}", (3,)) for i in range(4))
    tensors = [np.arange(3.0) + 10 * i for i in range(4)]
    array = ArraySpec((2, 2, 3), (None, None, None))
    spec = ParamSpec("norms", array, sources, stack, pieces=2)
    built = np.stack([stack(*tensors[:2]), stack(*tensors[2:])])
    np.testing.assert_array_equal(np.stack(tensors_of(spec, built)), np.stack(tensors))

    def own(*given: np.ndarray) -> np.ndarray:
        return given[0]

    with pytest.raises(ConfigError, match="parameter norms cannot be saved, as nothing is"):
        tensors_of(ParamSpec("norms", array, sources, own), built)


def test_the_tokenizer_of_a_folder_is_kept(tmp_path: Path) -> None:
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE)
    folder = write_hf_folder(
        tmp_path / "first", config, random_hf_tensors(build_model(config, "float32"))
    )
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    own = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|bos|>", "model_max_length": 77}
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "t"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(own | {"chat_template": templates}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    jaxinfer.load(str(folder)).save(tmp_path / "second")
    saved = json.loads((tmp_path / "second" / "tokenizer_config.json").read_text())
    assert saved == own | {"eos_token": "<|eos|>", "clean_up_tokenization_spaces": False}
    one, other = (load_tokenizer(spec_from_path(tmp_path / n)) for n in ("first", "second"))
    assert one.get_vocab() == other.get_vocab() and other.model_max_length == 77
    assert other.chat_template == {"default": TEMPLATE, "tool_use": "t"}
    assert other.special_tokens_map == one.special_tokens_map
