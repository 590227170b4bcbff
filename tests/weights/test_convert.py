"""Folders that are written as compressed-tensors: equal values when they are read again."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import jaxinfer
from jaxinfer.core.errors import CacheError, CheckpointError, ConfigError, SourceError
from jaxinfer.core.progress import NoProgress
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import build_model
from jaxinfer.weights.folder_files import checkpoint_files
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.quantised.convert import convert_folder
from jaxinfer.weights.quantised.on_load import QuantisedOnLoad, linear_names
from jaxinfer.weights.quantised.quantise import SCHEMES
from jaxinfer.weights.quantised.write import write_compressed
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit import published_formats
from kit.checkpoints import (
    HFConfig,
    Tensors,
    random_hf_tensors,
    stacked,
    tiny_qwen2_config,
    write_hf_folder,
)
from kit.memory_checkpoint import InMemory
from kit.tiny_models import tiny_config

CONFIG = tiny_qwen2_config(hidden_size=64, intermediate_size=192, num_key_value_heads=1)


def bfloat16_tensors(config: HFConfig = CONFIG) -> Tensors:
    tensors = random_hf_tensors(build_model(config, "float32"))
    return {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with other files."""
    folder = write_hf_folder(tmp_path / "source", CONFIG, bfloat16_tensors(), shards=2)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"top_k": 5}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ x }}")
    (folder / "original").mkdir()
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder


def convert(source: Path, folder: Path, scheme: str, ignore: tuple[str, ...] = ()) -> int:
    return convert_folder(str(source), folder, scheme, ignore=ignore, progress=NoProgress())


def opened(folder: Path) -> QuantisedCheckpoint:
    scheme = quantization_scheme(json.loads((folder / "config.json").read_text()))
    assert scheme is not None
    return QuantisedCheckpoint(SafetensorsCheckpoint(checkpoint_files(folder)), scheme)


def quantised(source: Path, scheme: str) -> QuantisedOnLoad:
    checkpoint = SafetensorsCheckpoint(checkpoint_files(source))
    model = build_model(CONFIG, "float32")
    return QuantisedOnLoad(checkpoint, scheme, linear_names(model, checkpoint))


def assert_equal(made: QuantisedCheckpoint, expected: QuantisedOnLoad) -> None:
    """Forms, values, and tensors that are not quantised."""
    assert made.forms == expected.forms
    assert made.tensors.keys() == expected.tensors.keys()
    for name in made.tensors:
        if name not in made.forms:
            assert made.tensors[name].dtype == "BF16"
            np.testing.assert_array_equal(made.read(name), expected.read(name))
            continue
        pairs = zip(
            made.read_quantised(name).arrays, expected.read_quantised(name).arrays, strict=True
        )
        for one, other in pairs:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_again(scheme: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert convert(source, folder, scheme) == 14
    assert_equal(opened(folder), quantised(source, scheme))
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"),
        "additional_chat_templates",
    }
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    assert config == CONFIG
    with safe_open(folder / "model.safetensors", "np") as file:  # the package reads it as well
        assert file.metadata() == {"format": "pt"}
        assert len(file.keys()) == len(bfloat16_tensors()) + 14 * (1 if scheme == "fp8" else 2)


def test_config_of_int4(source: Path, tmp_path: Path) -> None:
    """Matrices with other groups than most are listed by name; heads are always ignored."""
    folder = tmp_path / "made"
    ignored = "model.layers.0.mlp.up_proj"
    assert convert(source, folder, "int4", (ignored,)) == 13
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["ignore"] == ["lm_head", ignored]
    first, second = config["config_groups"].values()
    assert first["targets"] == ["Linear"] and first["weights"]["strategy"] == "channel"
    assert second["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    assert second["weights"] == weights | {"strategy": "group", "group_size": 64}
    assert len(opened(folder).forms) == 13


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        ("re:(", "ignore has the pattern '\\(', which is not a regular expression .*; correct it"),
        ("model.layers.9.mlp", "ignore has 'model.layers.9.mlp', which matches no matrix of the"),
        ("re:.*experts", "ignore has 're:.*experts', which matches no matrix of the model; corr"),
    ],
)
def test_names_to_ignore_that_are_refused(
    source: Path, tmp_path: Path, ignore: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "made", "int4", ("lm_head", ignore))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("ignore", ["lm_head", "model.embed_tokens", "re:.*embed_tokens"])
def test_matrices_that_are_never_quantised_may_be_ignored(ignore: str) -> None:
    """Recipes of other programs name them; a tied head has no tensor."""
    model = build_model(CONFIG | {"tie_word_embeddings": True}, "float32")
    checkpoint = InMemory(random_hf_tensors(model))
    assert "lm_head.weight" not in checkpoint.tensors
    assert len(linear_names(model, checkpoint, (ignore,))) == 14


def test_shards(source: Path, tmp_path: Path) -> None:
    folder, expected = tmp_path / "made", quantised(source, "int4")
    arguments = (folder, expected, CONFIG, source, NoProgress())
    assert write_compressed(*arguments, shard_bytes=20_000)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [
        f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))
    ]
    assert len(names) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    stored = sum(
        info.nbytes for info in SafetensorsCheckpoint(checkpoint_files(folder)).tensors.values()
    )
    assert index["metadata"]["total_size"] == stored
    assert_equal(opened(folder), expected)
    assert not write_compressed(*arguments)  # it exists


class Failing(QuantisedOnLoad):
    """Fails after some tensors were written."""

    def read_quantised(self, name: str):
        """See ``QuantisedOnLoad``."""
        if "layers.1" in name:
            raise CheckpointError("it is damaged")
        return super().read_quantised(name)


def test_nothing_is_left_after_a_failure(source: Path, tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(checkpoint_files(source))
    names = linear_names(build_model(CONFIG, "float32"), checkpoint)
    failing = Failing(checkpoint, "int8", names)
    with pytest.raises(CheckpointError, match="it is damaged"):
        write_compressed(tmp_path / "made", failing, CONFIG, source, NoProgress())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_several_formats(source: Path, tmp_path: Path) -> None:
    """Matrices of several kinds in one folder."""
    made = [quantised(source, scheme) for scheme in ("fp8", "int4")]

    class Mixed(QuantisedOnLoad):
        """fp8 for attention, int4 for the rest."""

        @property
        def forms(self):
            """See ``QuantisedOnLoad``."""
            return {name: made["mlp" in name].forms[name] for name in made[0].forms}

        def read_quantised(self, name: str):
            """See ``QuantisedOnLoad``."""
            return made["mlp" in name].read_quantised(name)

    checkpoint = SafetensorsCheckpoint(checkpoint_files(source))
    mixed = Mixed(checkpoint, "fp8", made[0].forms)
    write_compressed(tmp_path / "made", mixed, CONFIG, source, NoProgress())
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert_equal(opened(tmp_path / "made"), mixed)


# Experts

WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def folder_of_experts(name: str, path: Path) -> Path:
    """A folder of a model whose published files have a layer's experts in two tensors."""
    config = {**tiny_config(name), **WIDE}
    if name == "gemma4_all":
        del config["shared_expert_intermediate_size"]
    tensors = stacked(random_hf_tensors(build_model(config, "float32")))
    assert tensors["model.layers.0.experts.gate_up_proj".replace(*PARENTS[name])].shape[0] == 7
    return write_hf_folder(path, config, tensors)


PARENTS = {"gemma4_all": ("", ""), "qwen3_5_moe": (".experts", ".mlp.experts")}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", PARENTS)
def test_stacked_experts_are_written_each_by_itself(name: str, scheme: str, tmp_path: Path) -> None:
    """Under the names of published quantised files; the parameters are those of --quantization."""
    source = folder_of_experts(name, tmp_path / "source")
    convert(source, made := tmp_path / "made", scheme)
    with safe_open(made / "model.safetensors", "np") as file:
        keys = {*file.keys()}
    start = "model.layers.0.experts.6.".replace(*PARENTS[name])
    own = {key.removeprefix(start) for key in keys if key.startswith(start)}
    parts = ("weight_scale", "weight" if scheme == "fp8" else "weight_packed")
    parts += () if scheme == "fp8" else ("weight_shape",)
    assert own == {f"{kind}_proj.{part}" for kind in ("gate", "up", "down") for part in parts}
    settings = {"skip_tokenizer_init": True, "cpu_weights": "quantised"}
    kept = jaxinfer.load(str(made), **settings)
    loaded = jaxinfer.load(str(source), quantization=scheme, **settings)
    assert sorted(kept.model.forms) == sorted(loaded.model.forms)
    assert {f"{start}{kind}_proj.weight" for kind in ("gate", "up", "down")} <= {
        name for name, _ in kept.model.forms
    }
    first, second = by_path(kept.params), by_path(loaded.params)
    assert first.keys() == second.keys()
    for path, array in first.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(second[path]), err_msg=path)


@pytest.mark.parametrize(
    ("name", "tensor", "pattern"),
    [
        ("granite_moe", "block_sparse_moe.input_linear.weight", "re:.*block_sparse_moe.*"),
        ("gpt_oss", "mlp.experts.gate_up_proj", "re:.*experts.*"),
    ],
)
def test_experts_without_names_of_their_own_are_refused(
    name: str, tensor: str, pattern: str, tmp_path: Path
) -> None:
    """Unless the user leaves them as they are."""
    tensors = random_hf_tensors(build_model(tiny_config(name), "float32"))
    source = write_hf_folder(tmp_path / "source", tiny_config(name), tensors)
    message = f"tensor model.layers.0.{tensor} has all experts .* --ignore '{re.escape(pattern)}'"
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "made", "int8")
    assert convert(source, tmp_path / "made", "int8", (pattern,)) == 8


# What is refused


def test_form_that_is_not_written(source: Path, tmp_path: Path) -> None:
    config, tensors, _ = published_formats.published("Qwen3-AWQ")
    folder = published_formats.write_published(tmp_path / "awq", config, tensors)
    checkpoint = published_formats.opened(folder)
    with pytest.raises(ConfigError, match="form int4 .*zeros cannot be written as compressed-ten"):
        write_compressed(tmp_path / "made", checkpoint, CONFIG, folder, NoProgress())


def test_folder_that_exists(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"source exists already; name a new folder"):
        convert(source, source, "int4")


def test_file_instead_of_a_folder(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"config\.json is not a folder; name a Hugging Face"):
        convert(source / "config.json", tmp_path / "made", "int4")


def test_folder_that_is_quantised(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "made", "int4")
    with pytest.raises(ConfigError, match="made is quantised already; convert the model that"):
        convert(tmp_path / "made", tmp_path / "again", "int8")


def test_weights_of_another_model(tmp_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 128}
    folder = write_hf_folder(tmp_path / "source", config, bfloat16_tensors())
    with pytest.raises(CheckpointError, match=r"has shape \(192, 64\) instead of \(128, 64\)"):
        convert(folder, tmp_path / "made", "int4")
    assert not (tmp_path / "made").exists()
