"""Layers for multi-token prediction, which published checkpoints hold, are left out and named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError, ConfigError
from jaxinfer.core.progress import NoProgress
from jaxinfer.models.registry import build_model
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.quantised.convert import convert_folder
from jaxinfer.weights.sources import ModelSource
from kit.checkpoints import (
    Tensors,
    random_hf_tensors,
    tiny_llama_config,
    write_gguf,
    write_hf_folder,
)
from kit.gguf_experts import CONFIGS as GGUF_CONFIGS
from kit.model_sources import resolve
from kit.tiny_models import tiny_config
from weights.test_latent import FP8

CONFIG = tiny_config("deepseek_v3")
LAST = CONFIG["num_hidden_layers"]
ONE = "the checkpoint's prediction layer (multi-token prediction) is not used"


class Notes(NoProgress):
    """Keeps the lines that a user would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """See ``Progress``."""
        self.lines.append(text)


def tensors_of(config: Mapping[str, Any]) -> Tensors:
    return random_hf_tensors(build_model(config, "float32"))


def prediction_layer(tensors: Tensors, layer: int, name: str = "model.layers.{}.") -> Tensors:
    """The tensors of one more layer, as DeepSeek-V3's number 61: those of the last, and its own."""
    start, last = name.format(layer), f"model.layers.{LAST - 1}."
    like = {key.replace(last, start): one for key, one in tensors.items() if key.startswith(last)}
    width = CONFIG["hidden_size"]
    own = {f"{start}{one}.weight": np.ones(width, np.float32) for one in ("enorm", "hnorm")}
    own |= {f"{start}eh_proj.weight": np.ones((width, 2 * width), np.float32)}
    own |= {f"{start}embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1}
    own |= {f"{start}shared_head.head.weight": tensors["lm_head.weight"] + 1}
    return like | own | {f"{start}shared_head.norm.weight": np.ones(width, np.float32)}


def planned(source: ModelSource) -> set[str]:
    """The tensors that the model is made of."""
    assert source.checkpoint is not None
    model = build_model(source.hf_config, "float32")
    return {name for one in plan_params(model, source.checkpoint) for name in one.names}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("num_nextn_predict_layers", "model.layers.{}."),  # DeepSeek-V3 and R1, GLM-4.5
        ("num_nextn_predict_layers", "model.language_model.layers.{}."),  # GLM-5.3-Flash
        ("num_nextn_predict_layers", "model.mtp_layers.{}."),  # MiMo
        ("mtp_num_hidden_layers", "mtp.layers.{}."),  # Qwen3.5
        ("", "mtp.layers.{}."),  # Qwen3-Next: config.json does not say that there is one
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_they_are_left_out_with_one_line(tmp_path: Path, key: str, name: str, shards: int) -> None:
    tensors, notes = tensors_of(CONFIG), Notes()
    first = LAST if name in ("model.layers.{}.", "model.language_model.layers.{}.") else 0
    config = {**CONFIG, "num_nextn_predict_layers": 0, **({key: 1} if key else {})}
    extra = prediction_layer(tensors, first, name)
    folder = write_hf_folder(tmp_path, config, tensors | extra, shards=shards)
    source = resolve(folder, progress=notes)
    assert planned(source) == tensors.keys()
    assert notes.lines == [ONE]
    assert source.checkpoint is not None and source.checkpoint.tensors.keys() == tensors.keys()
    assert source.hf_config.get(key, 0) == 0  # what is saved of this model has none


def test_as_many_as_the_config_says(tmp_path: Path) -> None:
    tensors, notes = tensors_of(CONFIG), Notes()
    extra = prediction_layer(tensors, LAST) | prediction_layer(tensors, LAST + 1)
    config = {**CONFIG, "num_nextn_predict_layers": 2}
    resolve(write_hf_folder(tmp_path / "two", config, tensors | extra), progress=notes)
    assert notes.lines == [
        "the checkpoint's 2 prediction layers (multi-token prediction) are not used"
    ]
    resolve(write_hf_folder(tmp_path / "none", config, tensors), progress=notes)
    assert len(notes.lines) == 1  # as Kimi-K2's, or a copy without them
    for count, unused in ((0, LAST), (1, LAST + 1)):
        config = {**CONFIG, "num_nextn_predict_layers": count}
        source = resolve(write_hf_folder(tmp_path / str(count), config, tensors | extra))
        with pytest.raises(CheckpointError, match=rf"model\.layers\.{unused}\..* does not use"):
            planned(source)


def test_a_damaged_shard_of_one_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    folder = write_hf_folder(tmp_path, {**CONFIG, "num_nextn_predict_layers": 1}, tensors)
    extra = write_hf_folder(tmp_path / "x", CONFIG, prediction_layer(tensors, LAST))
    shards = {"model.safetensors": tensors, "mtp.safetensors": prediction_layer(tensors, LAST)}
    index = {name: file for file, members in shards.items() for name in members}
    (folder / "all.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {**CONFIG, "num_nextn_predict_layers": 1}
    config["transformers_weights"] = "all.safetensors.index.json"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mtp\.safetensors is missing although all"):
        resolve(folder)
    content = (extra / "model.safetensors").read_bytes()
    (folder / "mtp.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"mtp\.safetensors is truncated"):
        resolve(folder)
    (folder / "mtp.safetensors").write_bytes(content)
    assert planned(resolve(folder)) == tensors.keys()


def test_they_need_not_be_quantised_like_the_others(tmp_path: Path) -> None:
    """The one of DeepSeek-V3 has matrices of floats and of fp8, with scales of their own."""
    tensors = tensors_of(CONFIG)
    extra = prediction_layer(tensors, LAST)
    extra[f"model.layers.{LAST}.eh_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    config = {**CONFIG, "num_nextn_predict_layers": 1, "quantization_config": FP8}
    folder = write_hf_folder(tmp_path, config, tensors | extra)
    assert planned(resolve(folder)) == tensors.keys()


def test_a_converted_folder_has_none(tmp_path: Path) -> None:
    config = tiny_llama_config(num_hidden_layers=2)
    config |= {"num_nextn_predict_layers": 1}
    tensors = tensors_of(config)
    extra = {f"model.layers.2.{one}.weight": np.ones((64, 64), np.float32) for one in "ab"}
    folder, notes = write_hf_folder(tmp_path / "m", config, tensors | extra), Notes()
    convert_folder(str(folder), tmp_path / "q", "int8", progress=notes)
    assert notes.lines == [ONE]
    assert json.loads((tmp_path / "q" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    planned(resolve(tmp_path / "q", progress=notes))
    assert len(notes.lines) == 1


@pytest.mark.parametrize("stored", [True, False])
def test_they_are_the_last_blocks_of_a_gguf(tmp_path: Path, stored: bool) -> None:
    """The key block_count includes them, as llama.cpp's converter of GLM-4.5 writes it."""
    config, notes = {**GGUF_CONFIGS["deepseek_v3"], "rms_norm_eps": 1e-6}, Notes()
    tensors, layers = tensors_of(config), config["num_hidden_layers"]
    names = ("attn_norm", "nextn.eh_proj", "nextn.shared_head_head", "nextn.enorm")
    extra = {f"blk.{layers}.{name}.weight": np.ones((32, 32), np.float32) for name in names}
    counts = {"deepseek2.block_count": layers + 1, "deepseek2.nextn_predict_layers": 1}
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, metadata=counts, extra=extra if stored else {}
    )
    source = resolve(path, progress=notes)
    assert planned(source) == tensors.keys()
    assert notes.lines == ([ONE] if stored else [])
    assert source.hf_config["num_hidden_layers"] == layers
    counts["deepseek2.nextn_predict_layers"] = layers + 1
    path = write_gguf(tmp_path / "w.gguf", config, tensors, metadata=counts, extra=extra)
    with pytest.raises(CheckpointError, match=r"nextn_predict_layers must be below block_count"):
        resolve(path)


@pytest.mark.parametrize("value", [-1, True, "1", 10**9, [1]])
def test_a_wrong_count_is_named(tmp_path: Path, value: Any) -> None:
    config = {**CONFIG, "num_nextn_predict_layers": value}
    folder = write_hf_folder(tmp_path, config, tensors_of(CONFIG))
    with pytest.raises(ConfigError, match="config key 'num_nextn_predict_layers' (must|is)"):
        resolve(folder)
