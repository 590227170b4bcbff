"""The files of a folder that hold the model are the ones that transformers selects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.core.errors import CheckpointError, JaxinferError, SourceError
from jaxinfer.models.registry import build_model
from jaxinfer.weights.plan import plan_params
from kit.checkpoints import Tensors, tiny_llama_config, write_hf_folder
from kit.model_sources import resolve

CONFIG = tiny_llama_config()
OTHER = {"layers.0.attention.wq.weight": np.zeros((2, 2), np.float32)}  # Mistral's own names


def fits(folder: Path) -> None:
    """Assert that the checkpoint is found and fits the model."""
    source = resolve(folder)
    assert source.checkpoint is not None
    plan_params(build_model(source.hf_config, "float32"), source.checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "consolidated.safetensors",
        "consolidated.00.safetensors",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
        "model-00001-of-00002.safetensors",
        "unrelated.safetensors",
        "original/consolidated.safetensors",
    ],
)
def test_other_files_next_to_the_single_one(tmp_path: Path, tensors: Tensors, name: str) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    (folder / name).parent.mkdir(exist_ok=True)
    save_file(OTHER, folder / name)
    fits(folder)


def test_the_single_file_wins_over_an_index(tmp_path: Path, tensors: Tensors) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    )
    fits(folder)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "adapter_model.safetensors", "unrelated.safetensors"]
)
def test_other_files_next_to_shards(
    tmp_path: Path, tensors: Tensors, name: str, indexed: bool
) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors, shards=2)
    save_file(OTHER, folder / name)
    if not indexed:
        (folder / "model.safetensors.index.json").unlink()
    fits(folder)


@pytest.mark.parametrize("other", ["consolidated.safetensors", "model.fp16.safetensors"])
def test_one_file_of_another_name(tmp_path: Path, tensors: Tensors, other: str) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    save_file(OTHER, folder / other)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    fits(folder)


def test_a_variant_alone_is_the_model(tmp_path: Path, tensors: Tensors) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    fits(folder)


@pytest.mark.parametrize("named", ["best.safetensors", "best.safetensors.index.json"])
def test_the_file_that_the_config_names(tmp_path: Path, tensors: Tensors, named: str) -> None:
    folder = write_hf_folder(tmp_path, {**CONFIG, "transformers_weights": named}, tensors)
    (folder / "model.safetensors").rename(folder / "best.safetensors")
    save_file(OTHER, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "best.safetensors")}
    (folder / "best.safetensors.index.json").write_text(json.dumps(index))
    fits(folder)


def _only(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")


def _named(name: object) -> Callable[[Path], Any]:
    config = {**CONFIG, "transformers_weights": name}
    return lambda folder: (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (_only("consolidated.safetensors"), SourceError, "holds consolidated.safetensors, another"),
        (_only("adapter_model.safetensors"), SourceError, "another layout or an adapter"),
        (
            _missing_shard,
            CheckpointError,
            "1 shards of 00003, and model-00002-of-00003.safetensors is",
        ),
        (_named("gone.safetensors"), SourceError, "names gone.safetensors, and .* no such file"),
        (_named("../m.safetensors"), SourceError, "names ../m.safetensors, and .* no such file"),
        (_named(3), SourceError, "'transformers_weights' is 3; it must name"),
    ],
    ids=["consolidated", "adapter", "shard", "named", "outside", "number"],
)
def test_a_folder_without_the_models_files(
    tmp_path: Path,
    tensors: Tensors,
    change: Callable[[Path], Any],
    kind: type[JaxinferError],
    message: str,
) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    change(folder)
    with pytest.raises(kind, match=message):
        resolve(folder)


def test_a_tensor_that_fits_nothing_is_named_with_its_file(
    tmp_path: Path, tensors: Tensors
) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file(OTHER, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"wq\.weight of more\.safetensors, which Llama"):
        fits(folder)
