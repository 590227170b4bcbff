"""Writes a folder of quantised safetensors in compressed-tensors' formats.

int4 and int8 are written as pack-quantized, the format that the compressed-tensors package chooses
for integer weights without quantised activations, and fp8 as float-quantized. Tensors are read
and written one at a time. Format of the files: see ``safetensors_files``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.progress import Advance, Progress
from jaxinfer.core.staging import build_once
from jaxinfer.models.hf_keys import QUANTIZATION_KEYS
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.folder_files import FILE_NAME, INDEX_NAME
from jaxinfer.weights.quantised.compressed_config import MIXED
from jaxinfer.weights.quantised.config_keys import CONFIG
from jaxinfer.weights.quantised.packing import to_pairs, unsigned
from jaxinfer.weights.quantised.scheme import match_rank
from pallas_kernels.lib.quantised import Form, Quantised

SHARD_BYTES = 5 * 10**9  # as transformers writes them
_WEIGHT = ".weight"
_NUMPY = MappingProxyType(
    {
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "I32": "int32",
        "I64": "int64",
    }
)
_NAMES = MappingProxyType({dtype: name for name, dtype in _NUMPY.items()})
# Weights in other formats, which are not copied with the other files of the folder.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_COPIED_FOLDER = "additional_chat_templates"


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(_NUMPY[self.dtype]).itemsize


def write_compressed(
    folder: Path,
    checkpoint: Checkpoint,
    hf_config: Mapping[str, Any],
    source: Path,
    progress: Progress,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> bool:
    """Write the tensors of a checkpoint, config.json and the other files of the folder ``source``.

    The new folder is complete or absent. Returns whether it was written: False if it exists.
    Raises ``ConfigError`` for a form that compressed-tensors does not have, and ``CacheError`` if
    the folder cannot be written.
    """
    config = {key: value for key, value in hf_config.items() if key not in QUANTIZATION_KEYS}
    config[CONFIG] = compressed_config(checkpoint)

    def fill(new: Path) -> None:
        write_tensors(new, checkpoint, progress, shard_bytes=shard_bytes)
        (new / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
        _copy_files(source, new)

    return build_once(folder, fill, elsewhere="choose another folder")


def write_tensors(
    folder: Path, checkpoint: Checkpoint, progress: Progress, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a checkpoint's tensors into a folder, as one safetensors file or several and an index.

    Raises ``OSError``.
    """
    shards = _shards(checkpoint, shard_bytes)
    total = sum(_nbytes(entries) for shard in shards for entries in shard.values())
    with progress.task("write weights", total, "B") as advance:
        for name, shard in zip(_file_names(len(shards)), shards, strict=True):
            with (folder / name).open("wb") as file:
                _write_shard(file, shard, checkpoint, advance)
    if len(shards) > 1:
        (folder / INDEX_NAME).write_text(json.dumps(_index(shards), indent=2), "utf-8")


def compressed_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint's forms.

    The form of most matrices is that of the class of linear layers; others are listed by name, and
    so are layers that are not quantised. Raises ``ConfigError`` for a form that is not supported.
    """
    modules: dict[Form, list[str]] = {}
    for name, form in checkpoint.forms.items():
        if not name.endswith(_WEIGHT):
            raise ConfigError(
                f"tensor {name} is quantised, which compressed-tensors has only for weights of "
                "layers; leave it as it is"
            )
        modules.setdefault(form, []).append(name.removesuffix(_WEIGHT))
    forms = sorted(modules, key=lambda form: -len(modules[form]))
    formats = {form: _format(form) for form in forms}
    mixed = len(set(formats.values())) > 1
    groups = {}
    for index, form in enumerate(forms):
        targets = modules[form] if index else ["Linear"]
        group = {"targets": targets, "weights": _arguments(form)}
        group |= {"input_activations": None, "output_activations": None}
        groups[f"group_{index}"] = group | ({"format": formats[form]} if mixed else {})
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": MIXED if mixed else formats[forms[0]],
        "config_groups": groups,
        "ignore": _ignored(checkpoint),
        "kv_cache_scheme": None,
    }


def _ignored(checkpoint: Checkpoint) -> list[str]:
    """Linear layers that are not quantised; a tied head has no tensor but is such a layer."""
    matrices = (
        name.removesuffix(_WEIGHT)
        for name, info in checkpoint.tensors.items()
        if name.endswith(_WEIGHT) and len(info.shape) == 2 and name not in checkpoint.forms
    )
    linear = (module for module in matrices if match_rank(module, "Linear") is not None)
    return list(dict.fromkeys(["lm_head", *linear]))


def _format(form: Form) -> str:
    """The format's name."""
    plain = not (form.zeros or form.offsets or form.super_group)
    if plain and form.kind in ("int4", "int8"):
        return "pack-quantized"
    if plain and form.kind == "fp8" and form.group is None:
        return "float-quantized"
    raise ConfigError(
        f"matrices of the form {form} cannot be written as compressed-tensors; convert an "
        "unquantised checkpoint"
    )


def _arguments(form: Form) -> dict[str, Any]:
    """The arguments of a group's weights."""
    return {
        "num_bits": 4 if form.kind == "int4" else 8,
        "type": "float" if form.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if form.group is None else "group",
        "group_size": form.group,
        "dynamic": False,
    }


def _entries(checkpoint: Checkpoint, name: str) -> dict[str, _Entry]:
    """The tensors as which a logical tensor is written."""
    info, form = checkpoint.tensors[name], checkpoint.forms.get(name)
    if form is None:
        return {name: _Entry(info.dtype, info.shape)}
    outputs, inputs = info.shape
    module = name.removesuffix(_WEIGHT)
    groups = 1 if form.group is None else inputs // form.group
    scales = {f"{module}.weight_scale": _Entry(_NAMES[form.scale_dtype], (outputs, groups))}
    if form.kind == "fp8":
        return {name: _Entry("F8_E4M3", info.shape)} | scales
    words = _Entry("I32", (outputs, inputs // (8 if form.kind == "int4" else 4)))
    shape = {f"{module}.weight_shape": _Entry("I64", (2,))}
    return {f"{module}.weight_packed": words} | scales | shape


def _arrays(checkpoint: Checkpoint, name: str) -> Iterator[np.ndarray]:
    """The arrays of ``_entries``, in their order."""
    if name not in checkpoint.forms:
        yield checkpoint.read(name)
        return
    w = checkpoint.read_quantised(name)
    if w.kind == "fp8":
        yield from (w.values, w.scales)
        return
    yield from (_words(w), w.scales, np.array([w.num_outputs, w.num_inputs], np.int64))


def _words(w: Quantised) -> np.ndarray:  # int32[O, K / 8 or K / 4]
    """Unsigned values, the first in the lowest bits."""
    octets = to_pairs(w.values) if w.kind == "int4" else unsigned(w.values)
    return octets.view(np.int32)


type _Shard = dict[str, dict[str, _Entry]]  # entries by the logical tensor


def _nbytes(entries: Mapping[str, _Entry]) -> int:
    return sum(entry.nbytes for entry in entries.values())


def _shards(checkpoint: Checkpoint, shard_bytes: int) -> list[_Shard]:
    """Consecutive tensors in files of at most ``shard_bytes``, unless one tensor is larger."""
    shards: list[_Shard] = [{}]
    free = shard_bytes
    for name in checkpoint.tensors:
        entries = _entries(checkpoint, name)
        size = _nbytes(entries)
        if shards[-1] and size > free:
            shards.append({})
            free = shard_bytes
        shards[-1][name] = entries
        free -= size
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [FILE_NAME]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_shard(file: BinaryIO, shard: _Shard, checkpoint: Checkpoint, advance: Advance) -> None:
    """One safetensors file; its header is known before any tensor is read."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entries in shard.values():
        for name, entry in entries.items():
            header[name] = {"dtype": entry.dtype, "shape": entry.shape}
            header[name]["data_offsets"] = [end, end := end + entry.nbytes]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
    for logical, entries in shard.items():
        for entry, array in zip(entries.values(), _arrays(checkpoint, logical), strict=True):
            assert array.shape == entry.shape and str(array.dtype) == _NUMPY[entry.dtype], logical
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        advance(_nbytes(entries))


def _index(shards: Sequence[_Shard]) -> dict[str, Any]:
    files = zip(_file_names(len(shards)), shards, strict=True)
    weight_map = {
        name: file for file, shard in files for entries in shard.values() for name in entries
    }
    total = sum(_nbytes(entries) for shard in shards for entries in shard.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _copy_files(source: Path, new: Path) -> None:
    """Tokenizer, templates, generation_config.json: all files but weights and config.json."""
    for path in sorted(source.iterdir()):
        is_weights = path.name.removesuffix(".index.json").endswith(_WEIGHTS)
        if path.is_file() and path.name != "config.json" and not is_weights:
            shutil.copyfile(path, new / path.name)
        elif path.is_dir() and path.name == _COPIED_FOLDER:
            shutil.copytree(path, new / path.name)
