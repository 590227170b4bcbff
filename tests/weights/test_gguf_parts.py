"""GGUF files that are split into parts, by path and from the hub."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.core.errors import JaxinferError
from jaxinfer.models.registry import build_model
from jaxinfer.weights.gguf.checkpoint import open_gguf
from jaxinfer.weights.gguf.header import read_header
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf
from kit.model_sources import resolve

CONFIG = tiny_llama_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``m.gguf``, and the same in parts."""
    folder = tmp_path_factory.mktemp("split")
    tensors = random_hf_tensors(build_model(CONFIG, "float32"))
    write_gguf(folder / "m.gguf", CONFIG, tensors)
    write_gguf(folder / "m.gguf", CONFIG, tensors, part_tensors=9)
    return folder


def first(folder: Path) -> Path:
    return min(folder.glob("m-00001-of-*.gguf"))


def test_parts_are_the_whole_file(folder: Path) -> None:
    whole, parts = open_gguf(folder / "m.gguf"), open_gguf(first(folder))
    assert len(parts.header.files) > 1
    assert parts.hf_config == whole.hf_config and parts.tensors == whole.tensors
    for name in whole.tensors:
        np.testing.assert_array_equal(parts.read(name), whole.read(name))
    source = resolve(first(folder))
    assert source.name == "m"
    assert source.files == tuple(file.resolve() for file in parts.header.files)


def test_a_part_that_changes_is_another_model(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = resolve(first(copy)).fingerprint
    last = max(copy.glob("m-*-of-*.gguf"))
    last.write_bytes(last.read_bytes() + b"\0")
    assert resolve(first(copy)).fingerprint != before


def last_of(folder: Path) -> Path:
    return max(folder.glob("m-*-of-*.gguf"))


def missing(folder: Path) -> Path:
    last_of(folder).unlink()
    return first(folder)


def renamed(folder: Path) -> Path:
    return first(folder).rename(folder / "model.gguf")


def exchanged(folder: Path) -> Path:
    shutil.copy(folder / "m.gguf", last_of(folder))
    return first(folder)


def twice(folder: Path) -> Path:
    shutil.copy(sorted(folder.glob("m-*-of-*.gguf"))[1], last_of(folder))
    return first(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (last_of, r"is part \d of \d; give the first, .*m-00001-of-0000\d\.gguf"),
        (missing, r"m-0000\d-of-0000\d\.gguf is missing; download it into the folder of m-00001"),
        (renamed, r"model\.gguf is one part of a GGUF file that is split into \d; give the parts"),
        (exchanged, r"is not part \d of \d, as its name says; download it again"),
        (twice, r"is not part \d of \d, as its name says; download it again"),
    ],
)
def test_parts_that_do_not_fit(
    change: Callable[[Path], Path], message: str, folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    with pytest.raises(JaxinferError, match=message):
        resolve(change(copy))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (b"split.no", r"m-00001-of-\S+ is not part 1 of \d"),
        (b"split.tensors.count", r"the parts of .* have \d+ tensors instead of \d+; download"),
    ],
)
def test_damaged_parts(key: bytes, message: str, folder: Path, tmp_path: Path) -> None:
    """A number of each part is one more than it should be."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for part in copy.glob("m-*-of-*.gguf"):
        data = bytearray(part.read_bytes())
        data[data.index(key) + len(key) + 4] += 1  # after the type
        part.write_bytes(data)
    with pytest.raises(JaxinferError, match=message):
        resolve(first(copy))


def test_a_tensor_is_in_one_part(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    second = sorted(copy.glob("m-*-of-*.gguf"))[1]
    own, others = (read_header(part).tensors for part in (second, first(copy)))
    name, same = next((a, b) for a in own for b in others if len(a) == len(b))
    second.write_bytes(second.read_bytes().replace(name.encode(), same.encode()))
    with pytest.raises(JaxinferError, match="has the tensor .*, which an earlier part has too"):
        resolve(first(copy))
