"""Headers that the formats' own readers refuse are refused, and those that they accept are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from jaxinfer.core.errors import CheckpointError, JaxinferError, SourceError
from jaxinfer.weights import safetensors_files, safetensors_header
from jaxinfer.weights.gguf.header import read_header as read_gguf
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit.checkpoints import Tensors, tiny_llama_config, write_gguf, write_hf_folder
from kit.model_sources import resolve

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NEXT = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def write(path: Path, header: Any, data: int = 16, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(size + text + bytes(range(data)))
    return path


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, "numpy"):
            return True
    except SafetensorError:
        return False


REFUSED: dict[str, Any] = {
    "overlap": {"a": F32, "b": {**NEXT, "data_offsets": [4, 12]}},
    "same bytes": {"a": F32, "b": F32},
    "moved": {"a": {**F32, "data_offsets": [4, 12]}},
    "gap": {"a": F32, "b": {**NEXT, "data_offsets": [12, 20]}},
    "bytes after": {"a": F32},
    "texts": {"a": {**F32, "shape": ["2"]}, "b": NEXT},
    "fractions": {"a": {**F32, "data_offsets": [0.5, 8.5]}, "b": NEXT},
    "whole fraction": {"a": {**F32, "shape": [2.0]}, "b": NEXT},
    "truth value": {"a": {**F32, "shape": [2, True]}, "b": NEXT},
    "negative": {"a": {**F32, "shape": [-2]}, "b": NEXT},
    "negative zero": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[-0,16]}}',
    "exponent": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16e0]}}',
    "three offsets": {"a": {**F32, "data_offsets": [0, 8, 8]}, "b": NEXT},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}, "b": NEXT},
    "dtype": {"a": {**F32, "dtype": "F31"}, "b": NEXT},
    "lower case": {"a": {**F32, "dtype": "f32"}, "b": NEXT},
    "half a byte": {"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}},
    "huge shape": {"a": {**F32, "shape": [2**62, 2**62]}, "b": NEXT},
    "metadata": {"__metadata__": {"format": 1}, "a": F32, "b": NEXT},
    "metadata list": {"__metadata__": ["pt"], "a": F32, "b": NEXT},
    "list": [],
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}',
    "nested": b"[" * 100_000,
    "nested within": b'{"a":' * 100_000,
    "after the object": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}\0',
    "UTF-16": '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.encode("utf-16"),
    "surrogate": b'{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "twice within": b'{"a":{"dtype":"F32","shape":[4],"shape":[4],"data_offsets":[0,16]}}',
}
# The library takes the last of two keys, and blanks before the object, which its format forbids.
STRICTER: dict[str, Any] = {
    "twice": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
    b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "blank": b' {"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
}
ACCEPTED: dict[str, Any] = {
    "in another order": {"b": NEXT, "a": F32},
    "empty": {
        "e": {"dtype": "F32", "shape": [0, 7], "data_offsets": [8, 8]},
        "b": NEXT,
        "a": F32,
        "z": {"dtype": "F32", "shape": [0], "data_offsets": [16, 16]},
    },
    "scalar": {"a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}, "b": NEXT},
    "four bits": {"a": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}, "b": NEXT},
    "metadata": {"__metadata__": {"format": "pt"}, "a": F32, "b": NEXT},
    "blanks after": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}  \n',
    "more keys": {"a": {**F32, "note": [1]}, "b": NEXT},
}


@pytest.mark.parametrize("name", [*REFUSED, *STRICTER])
def test_a_header_that_is_not_of_the_format(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.safetensors", (REFUSED | STRICTER)[name])
    assert library_reads(path) == (name in STRICTER)
    with pytest.raises(CheckpointError, match=r"x\.safetensors (has|is) .*; download it again"):
        SafetensorsCheckpoint([path])


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_header_of_the_format(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.safetensors", ACCEPTED[name])
    assert library_reads(path)
    ours = SafetensorsCheckpoint([path])
    with safe_open(path, "numpy") as theirs:
        assert set(ours.tensors) == set(theirs.keys())
        for tensor, info in ours.tensors.items():
            assert list(info.shape) == theirs.get_slice(tensor).get_shape()
            if info.dtype == "F32":
                np.testing.assert_array_equal(ours.read(tensor), theirs.get_tensor(tensor))


def test_a_header_of_more_than_100_megabytes_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": F32, "b": NEXT}, length=100_000_001)
    with path.open("r+b") as file:
        file.truncate(200_000_000)  # a hole, which takes no place
    assert not library_reads(path)
    with pytest.raises(CheckpointError, match="header of 100000001 bytes does not fit in"):
        SafetensorsCheckpoint([path])


def test_a_checkpoint_has_a_bounded_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write(tmp_path / "1.safetensors", {"a": F32, "b": NEXT})
    other = write(tmp_path / "2.safetensors", {"c": F32, "d": NEXT})
    for module in (safetensors_header, safetensors_files):
        monkeypatch.setattr(module, "MAX_TENSORS", 3)
    assert len(SafetensorsCheckpoint([one]).tensors) == 2
    with pytest.raises(CheckpointError, match=r"holds more than 3 tensors; use another checkpoint"):
        SafetensorsCheckpoint([one, other])
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 1)
    monkeypatch.delattr(safetensors_header, "parse_json")  # it is counted before
    with pytest.raises(CheckpointError, match=r"1\.safetensors .*it has more than 1 tensors"):
        SafetensorsCheckpoint([one])


# indexes, and other files that name files


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "a/../../secret.safetensors", "/etc/x.safetensors", ".."]
)
def test_no_index_leads_out_of_its_folder(tmp_path: Path, tensors: Tensors, name: str) -> None:
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config(), tensors, shards=2)
    (folder / "model-00001-of-00002.safetensors").rename(tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    first = "model-00001-of-00002.safetensors"
    content["weight_map"] = {k: name if v == first else v for k, v in weight_map.items()}
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="index.json names .*, which is outside its folder;"):
        resolve(folder)


def test_links_may_lead_out_of_a_folder(tmp_path: Path, tensors: Tensors) -> None:
    """Hugging Face's cache has folders of links to files elsewhere."""
    folder = write_hf_folder(tmp_path / "snapshots" / "1", tiny_llama_config(), tensors, shards=2)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(Path("../../blobs") / blob.name)
    assert resolve(folder).checkpoint is not None


@pytest.mark.parametrize(
    "weight_map",
    ['{"a": 1}', '{"a": null}', "[]", "{}", '{"a": {"b": 1}}', '{"a": "x", "a": "y"}', "[" * 10**5],
    ids=["number", "null", "list", "empty", "object", "twice", "nested"],
)
def test_an_index_that_names_no_files(tmp_path: Path, tensors: Tensors, weight_map: str) -> None:
    folder = write_hf_folder(tmp_path, tiny_llama_config(), tensors, shards=2)
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(CheckpointError, match=r"index\.json is not a safetensors index"):
        resolve(folder)


def test_no_module_leads_out_of_its_folder(tmp_path: Path, tensors: Tensors) -> None:
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config(), tensors)
    (tmp_path / "config.json").write_text('{"pooling_mode": "mean"}')
    (folder / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": ".."}]))
    with pytest.raises(SourceError, match=r"modules\.json names the folder '\.\.', which is out"):
        resolve(folder)


# GGUF


def number_at(content: bytes, key: bytes, behind: int, size: int = 8) -> tuple[int, int]:
    """The place and the value of a number ``behind`` bytes after ``key``."""
    at = content.index(key) + len(key) + behind
    return at, int.from_bytes(content[at : at + size], "little")


def _with(key: bytes, behind: int, change: Callable[[int], int], size: int = 8) -> Any:
    def made(content: bytearray) -> None:
        at, value = number_at(content, key, behind, size)
        content[at : at + size] = change(value).to_bytes(size, "little")

    return made


def _general(content: bytearray, offset: int, number: int) -> None:
    content[offset : offset + 8] = number.to_bytes(8, "little")


VECTOR = b"output_norm.weight"  # its entry: rank, one size, type, offset
MATRIX = b"blk.0.attn_q.weight"
CHANGES: dict[str, tuple[Any, str]] = {
    "offset": (_with(VECTOR, 16, lambda n: n + 32), r"'output_norm.weight' begins at byte \d+ of"),
    "one bit": (_with(MATRIX, 24, lambda n: n ^ (1 << 12)), "'blk.0.attn_q.weight' begins at byte"),
    "rank": (_with(MATRIX, 0, lambda n: 5, 4), "'blk.0.attn_q.weight' has 5 dimensions"),
    "tensors": (lambda content: _general(content, 8, 2**60), "it says it has 1152921504606846976"),
    "keys": (lambda content: _general(content, 16, 2**40), "tensors and 1099511627776 metadata"),
    "a size": (_with(VECTOR, 4, lambda n: 2**63), "begins at byte|is truncated"),
    "key's length": (_with(b"general.archit", -22, lambda n: 2**63), "ends inside its header"),
    "array": (
        _with(b"tokenizer.ggml.tokens", 8, lambda n: 2**62),
        "its arrays have more than 8000000 values",
    ),
    "array of arrays": (
        _with(b"tokenizer.ggml.tokens", 4, lambda n: 9, 4),
        "an array has values of type 9",
    ),
    "truth value": (_with(b"general.flag", 4, lambda n: 2, 1), "a truth value is 2"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gguf_header_that_llama_cpp_refuses(tmp_path: Path, tensors: Tensors, name: str) -> None:
    flag = {"general.flag": True}
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_config(), tensors, metadata=flag)
    change, message = CHANGES[name]
    content = bytearray(path.read_bytes())
    assert read_gguf(path).tensors
    change(content)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31 + 1, True, "32", 32.0])
def test_an_alignment_is_a_power_of_two(tmp_path: Path, tensors: Tensors, alignment: Any) -> None:
    metadata = {"general.alignmenT": alignment}  # the writer would use another one itself
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_config(), tensors, metadata=metadata)
    path.write_bytes(path.read_bytes().replace(b"general.alignmenT", b"general.alignment"))
    with pytest.raises(JaxinferError, match="general.alignment is"):
        read_gguf(path)


def test_bytes_behind_the_last_tensor_are_as_for_llama_cpp(gguf_file: Path) -> None:
    whole = read_gguf(gguf_file)
    last = max(whole.tensors.values(), key=lambda one: one.offset)
    content = gguf_file.read_bytes()
    gguf_file.write_bytes(content[: last.offset + last.nbytes])  # without its padding
    assert read_gguf(gguf_file).tensors == whole.tensors
    gguf_file.write_bytes(content + b"more")
    assert read_gguf(gguf_file).tensors == whole.tensors
    gguf_file.write_bytes(content[: last.offset + last.nbytes - 1])
    with pytest.raises(CheckpointError, match="is truncated: tensor"):
        read_gguf(gguf_file)
