"""Whatever is wrong with a model is one sentence that names it, said before weights are read."""

import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxinfer.core.errors import (
    CheckpointError,
    ConfigError,
    JaxinferError,
    SourceError,
    TokenizerError,
    UnknownArchitectureError,
)
from jaxinfer.core.progress import NoProgress
from jaxinfer.models.registry import build_model
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from jaxinfer.weights.sources import ModelSource, resolve_source
from kit.checkpoints import (
    Tensors,
    random_hf_tensors,
    tiny_llama_config,
    write_gguf,
    write_hf_folder,
)

CONFIG = tiny_llama_config()
EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def resolve(reference: Path | str, **options: Any) -> ModelSource:
    options = {"cache_dir": Path("unused"), "progress": NoProgress()} | options
    return resolve_source(str(reference), **options)


def load(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load as far as headers allow: reading any tensor fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("data was read before all headers were checked")

    source = resolve(reference)
    model = build_model(source.hf_config, "float32")
    monkeypatch.setattr(type(source.checkpoint), "read", refuse)
    load_params(model, source, cache_dir=Path("unused"), seed=0, progress=NoProgress())


@pytest.fixture
def tensors() -> Tensors:
    return random_hf_tensors(build_model(CONFIG, "float32"))


@pytest.fixture
def folder(tmp_path: Path, tensors: Tensors) -> Path:
    return write_hf_folder(tmp_path / "model", CONFIG, tensors)


@pytest.fixture
def gguf_file(tmp_path: Path, tensors: Tensors) -> Path:
    return write_gguf(tmp_path / "m.gguf", CONFIG, tensors)


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
    """Root may read everything; give that up within the block."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # nobody
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
        resolve(copy)  # also imports what an ordinary user may not be allowed to read any more
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
    config = CONFIG | {"architectures": ["MambaForCausalLM"]}
    source = resolve(write_hf_folder(tmp_path, config, tensors))
    with pytest.raises(UnknownArchitectureError, match="MambaForCausalLM.*LlamaForCausalLM"):
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
def test_corrupt_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        resolve(folder)


def test_tensor_in_two_files(tmp_path: Path, tensors: Tensors) -> None:
    folder = write_hf_folder(tmp_path, CONFIG, tensors)
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="is both in"):
        resolve(folder)


def test_file_cut_after_opening(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint([folder / "model.safetensors"])
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is truncated"):
        checkpoint.read(NORM)


# What the model needs against what the checkpoint holds


def _without(tensors: Tensors) -> None:
    del tensors[NORM]


def _with_more(tensors: Tensors) -> None:
    tensors["model.extra.weight"] = np.zeros(3, np.float32)


def _reshaped(tensors: Tensors) -> None:
    tensors[EMBED] = tensors[EMBED][:-1]


def _turned(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def _as_int8(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM].astype(np.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, r"no tensor model\.norm\.weight, which LlamaForCausalLM needs"),
        (_with_more, r"holds tensor model\.extra\.weight, which LlamaForCausalLM does not use"),
        (_reshaped, r"embed_tokens\.weight has shape \(95, 64\) instead of \(96, 64\)"),
        (_turned, r"down_proj\.weight has shape \(128, 64\) instead of \(64, 128\)"),
        (_as_int8, r"model\.norm\.weight is stored as I8, which cannot be read"),
    ],
    ids=["missing", "unexpected", "shape", "turned", "dtype"],
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


# GGUF


def test_not_a_gguf(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\x03\x04 some archive"):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"m\.gguf is not a GGUF file"):
            resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [4, 20, 60, 1500], ids=["magic", "counts", "key", "vocabulary"])
def test_gguf_cut_in_its_header(gguf_file: Path, kept: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="ends inside its header"):
        resolve(gguf_file)


def test_gguf_cut_in_its_data(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="is truncated: tensor .* ends at byte"):
        resolve(gguf_file)


@pytest.mark.parametrize("version", [1, 4, 0x03000000], ids=["old", "new", "big-endian"])
def test_gguf_version(gguf_file: Path, version: int) -> None:
    content = bytearray(gguf_file.read_bytes())
    content[4:8] = struct.pack("<I", version)
    gguf_file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"GGUF version {version}"):
        resolve(gguf_file)


def test_gguf_with_nonsense_in_its_header(gguf_file: Path) -> None:
    content = bytearray(gguf_file.read_bytes())
    kind_of_first_key = 24 + 8 + len("general.architecture")
    content[kind_of_first_key : kind_of_first_key + 4] = struct.pack("<I", 77)
    gguf_file.write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt header .value type 77 is unknown"):
        resolve(gguf_file)


def test_gguf_of_unknown_architecture(tmp_path: Path, gguf_file: Path) -> None:
    content = gguf_file.read_bytes().replace(b"llama", b"mamba")
    gguf_file.write_bytes(content)
    with pytest.raises(UnknownArchitectureError, match="'mamba'; known are llama, qwen2"):
        resolve(gguf_file)


def test_split_gguf(tmp_path: Path, tensors: Tensors) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, metadata={"split.count": 2})
    with pytest.raises(SourceError, match="one part of a split GGUF; join the parts"):
        resolve(path)


def test_mixture_of_experts_gguf(tmp_path: Path, tensors: Tensors) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, metadata={"llama.expert_count": 8})
    with pytest.raises(UnknownArchitectureError, match="mixture of experts"):
        resolve(path)


def test_gguf_lacking_a_key(tmp_path: Path, tensors: Tensors) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    renamed = path.read_bytes().replace(b"llama.block_count", b"llama.block_kount")
    path.write_bytes(renamed)
    with pytest.raises(CheckpointError, match=r"lacks the metadata key llama\.block_count"):
        resolve(path)


def test_gguf_without_its_last_layer(tmp_path: Path, tensors: Tensors) -> None:
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, kept)
    with pytest.raises(CheckpointError, match="says it has 2 blocks but holds tensors of 1"):
        resolve(path)


@pytest.mark.parametrize("value", ["two", 0], ids=["text", "zero"])
def test_gguf_with_a_senseless_key(tmp_path: Path, tensors: Tensors, value: Any) -> None:
    metadata = {"llama.attention.key_length": value}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, metadata=metadata)
    with pytest.raises(CheckpointError, match="key_length must be a positive integer, got"):
        resolve(path)


def test_gguf_with_a_foreign_tensor(tmp_path: Path, tensors: Tensors) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, extra=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight has no place"):
        resolve(path)


def test_gguf_without_a_tensor(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, kind=GGMLQuantizationType.Q8_0)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.mlp\.up_proj\.weight"):
        load(path, monkeypatch)


def test_gguf_with_unsupported_rope_factors(tmp_path: Path, tensors: Tensors) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, extra=extra)
    with pytest.raises(CheckpointError, match="does not follow Llama 3's rope scaling"):
        resolve(path)


# Tokenizers


def test_absent_tokenizer(folder: Path) -> None:
    source = resolve(folder)
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        source.tokenizer_spec()


def test_named_tokenizer_is_missing(folder: Path) -> None:
    source = resolve(folder, tokenizer=str(folder / "nowhere"))
    with pytest.raises(TokenizerError, match="nowhere is neither a folder"):
        source.tokenizer_spec()


def test_broken_tokenizer_files(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not JSON"):
        resolve(folder).tokenizer_spec()
    (folder / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        resolve(folder).tokenizer_spec()


def test_gguf_without_tokenizer(tmp_path: Path, gguf_file: Path) -> None:
    hidden = gguf_file.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenized.ggml.tokens")
    gguf_file.write_bytes(hidden)
    with pytest.raises(TokenizerError, match="holds no tokenizer; name a folder"):
        resolve(gguf_file).tokenizer_spec()


# Any damage at all


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_damaged_header_never_surprises(
    folder: Path, gguf_file: Path, suffix: str, tmp_path: Path
) -> None:
    """Whatever byte is changed, the file is refused in our words or read as something valid."""
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
