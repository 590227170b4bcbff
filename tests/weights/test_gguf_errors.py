"""Errors of GGUF files are one sentence, and are raised before weights are read."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxinfer.core.errors import (
    CheckpointError,
    TokenizerError,
    UnknownArchitectureError,
)
from jaxinfer.models.registry import build_model
from kit.checkpoints import (
    Tensors,
    random_hf_tensors,
    tiny_llama_config,
    tiny_phi3_config,
    tiny_qwen2_config,
    write_gguf,
)
from kit.model_sources import load, resolve

CONFIG = tiny_llama_config()


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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (200, "is stored as type 200, which cannot"),
        (4, "is stored as type 4, which cannot"),
        (9, r"is stored as Q8_1 \(type 9\), which"),
        (15, r"is stored as Q8_K \(type 15\), which"),
        (24, r"is stored as I8 \(type 24\), which"),
    ],
)
def test_gguf_with_a_type_that_cannot_be_read(tmp_path: Path, kind: int, message: str) -> None:
    """The tensor, its type, and those that can be read are named."""
    wide = tiny_llama_config(hidden_size=256)  # whole blocks of Q8_K
    path = write_gguf(tmp_path / "m.gguf", wide, random_hf_tensors(build_model(wide, "float32")))
    content, name = bytearray(path.read_bytes()), b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # behind the rank and two sizes
    assert content[at : at + 4] == struct.pack("<I", GGMLQuantizationType.F32)
    content[at : at + 4] = struct.pack("<I", kind)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"blk\.0\.ffn_up\.weight of .*{message}") as caught:
        resolve(path)
    assert "download" not in str(caught.value)
    listed = str(caught.value).partition("convert the model to ")[2].replace(" or ", ", ")
    assert {"F32", "BF16", "Q8_0", "Q6_K", "IQ4_XS"} < {*listed.split(", ")}
    assert not {"Q8_1", "Q8_K", "I8"} & {*listed.split(", ")}


def test_gguf_of_unknown_architecture(tmp_path: Path, gguf_file: Path) -> None:
    content = gguf_file.read_bytes().replace(b"llama", b"plamo")
    gguf_file.write_bytes(content)
    with pytest.raises(UnknownArchitectureError, match="'plamo'; known are olmo, .* and .. oth"):
        resolve(gguf_file)


def test_mixture_of_experts_gguf(tmp_path: Path) -> None:
    config = tiny_qwen2_config()
    tensors = random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata={"qwen2.expert_count": 8})
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


@pytest.mark.parametrize("count", [10_001, 2**32 - 1, [10_001] * 3])
def test_gguf_with_too_many_blocks(tmp_path: Path, tensors: Tensors, count: Any) -> None:
    """No list of that length is made."""
    metadata = {"llama.block_count": count}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, metadata=metadata)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"llama\.block_count must be at most 10000, got"):
            resolve(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


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


SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"


@pytest.mark.parametrize(
    ("scaling", "extra", "metadata", "message"),
    [
        ({}, {SHORT: 6}, {}, f"has the tensor {SHORT} but not {LONG}; download it again"),
        ({}, {LONG: 6}, {}, f"has the tensor {LONG} but not {SHORT}; download it again"),
        ({}, {LONG: 8, SHORT: 8}, {}, f"tensor {LONG} does not hold 6 positive numbers"),
        ({}, {LONG: 6, SHORT: 6}, {"factor": 2.0}, "scaling.factor is supported only as 0 or 1"),
        ({}, {LONG: 6, SHORT: 6}, {"type": "yarn", "factor": 2.0}, "scales rope twice, by the"),
        (None, {}, {"type": "longrope"}, "scaling.type is supported as none, linear or yarn"),
    ],
)
def test_gguf_with_wrong_factors_of_longrope(
    tmp_path: Path,
    scaling: dict[str, Any] | None,
    extra: dict[str, int],
    metadata: dict[str, Any],
    message: str,
) -> None:
    config = tiny_phi3_config(rope_scaling=scaling)
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        random_hf_tensors(build_model(tiny_phi3_config(), "float32")),
        extra={name: np.linspace(1, 9, size, dtype=np.float32) for name, size in extra.items()},
        metadata={f"phi3.rope.scaling.{key}": value for key, value in metadata.items()},
    )
    with pytest.raises(CheckpointError, match=message):
        resolve(path)


def test_gguf_without_tokenizer(tmp_path: Path, gguf_file: Path) -> None:
    hidden = gguf_file.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenized.ggml.tokens")
    gguf_file.write_bytes(hidden)
    with pytest.raises(TokenizerError, match="holds no tokenizer; name a model"):
        resolve(gguf_file).tokenizer_spec()
