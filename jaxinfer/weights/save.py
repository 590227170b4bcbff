"""Writes a model as a Hugging Face folder: the inverse of loading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.core.errors import ArgumentError, CacheError
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import build_once
from jaxinfer.models.arguments import checked_params
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import ParamSpec, tensors_of
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.weight import stored
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo
from jaxinfer.weights.quantised.write import write_tensors
from jaxinfer.weights.stacked_experts import StackedExperts
from pallas_kernels.lib.quantised import Form, Quantised

_DTYPES = ("float32", "float16", "bfloat16", "int32")
_STORED = ("F32", "F16", "BF16", "I32")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
_OF_THE_FILES = ("transformers_weights",)  # keys of config.json about the files it came with


class ParamsCheckpoint:
    """Parameters as the checkpoint tensors that they are made of; see ``Checkpoint``.

    Matrices that are kept quantised are dequantised to the model's dtype. Host memory holds one
    parameter at a time. Raises ``ArgumentError`` for parameters that do not fit the model.
    """

    unneeded: frozenset[str] = frozenset()

    def __init__(self, model: Model, params: Params) -> None:
        checked_params(params, model.arrays)
        self.forms: dict[str, Form] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._model = model
        self._params = params
        self._specs: dict[str, tuple[ParamSpec, int]] = {}  # and the number of the source
        self._last: tuple[ParamSpec, list[np.ndarray]] | None = None
        for spec in model.declared_specs:
            dtype = _dtype_of(spec, model)
            for number, source in enumerate(spec.sources):
                size = int(np.prod(source.shape)) * dtype.itemsize
                stored = _STORED[_DTYPES.index(dtype.name)]
                self.tensors[source.name] = TensorInfo(source.shape, stored, size, readable=True)
                self._specs.setdefault(source.name, (spec, number))

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``."""
        spec, number = self._specs[name]
        if self._last is None or self._last[0] is not spec:
            self._last = None  # frees its arrays first
            self._last = (spec, tensors_of(spec, self._array(spec)))
        found = self._last[1]
        if spec.sources[number].part is None:
            tensor = found[number]
        else:
            own = [one for one, its in zip(found, spec.sources, strict=True) if its.name == name]
            tensor = np.stack(own) if part is None else own[part]
        return np.asarray(tensor, _dtype_of(spec, self._model))

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``."""
        raise NotImplementedError(f"{name} is not quantised")

    def _array(self, spec: ParamSpec) -> Any:
        leaf: Any = self._params
        for part in spec.path.split("/"):
            leaf = leaf[part]
        if not isinstance(spec.arrays, ArraySpec):  # made of one tensor that is not quantised
            return {name: np.asarray(array) for name, array in leaf.items()}
        own = self._model.arrays.get(spec.path)
        if own is not None and own.dtype == np.int32:
            return np.asarray(leaf)
        found = stored(leaf, by_output=spec.matrix == "rows")
        return np.asarray(found.dense(self._model.config.dtype))


def _dtype_of(spec: ParamSpec, model: Model) -> np.dtype:
    """The dtype in which a parameter's tensors are written."""
    array = model.arrays.get(spec.path)
    dtype = np.dtype(model.config.dtype if array is None else array.dtype)
    if dtype.name not in _DTYPES:
        raise ArgumentError(
            f"parameter {spec.path} is {dtype}, and only {', '.join(_DTYPES)} can be saved"
        )
    return dtype


def write_folder(
    folder: Path,
    *,
    hf_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    checkpoint: Checkpoint | None,
    dtype: str | None,
    progress: Progress,
) -> None:
    """Write config.json, generation_config.json, tokenizer and tensors, each if it is given.

    The new folder is complete or absent. Raises ``CacheError`` if it exists or cannot be written.
    """
    if not hf_config:
        raise ArgumentError("a model that was not read from a config.json cannot be saved")
    if folder.exists():
        raise CacheError(f"{folder} exists already; name a new folder")
    config = {key: value for key, value in hf_config.items() if key not in _OF_THE_FILES}
    if dtype is not None:
        config |= {"dtype": dtype, "torch_dtype": dtype}  # new and old name in transformers

    def fill(new: Path) -> None:
        if checkpoint is not None:
            write_tensors(new, checkpoint, progress)
        _write_json(new / "config.json", config)
        if generation_config:
            _write_json(new / "generation_config.json", _generation(generation_config))
        if tokenizer is not None:
            tokenizer.save_pretrained(new)

    if not build_once(folder, fill, elsewhere="choose another folder"):
        raise CacheError(f"{folder} exists already; name a new folder")  # made in the meantime


def write_model(
    folder: Path,
    model: Model,
    params: Params,
    tokenizer: Tokenizer | None,
    generation_config: Mapping[str, Any],
    progress: Progress,
) -> None:
    """``write_folder`` of a model with its parameters; raises ``ArgumentError`` if they do not
    fit.
    """
    tensors = ParamsCheckpoint(model, params)
    write_folder(
        folder,
        hf_config=model.hf_config,
        generation_config=generation_config,
        tokenizer=tokenizer,
        checkpoint=StackedExperts(tensors) if model.family.stacked_experts else tensors,
        dtype=np.dtype(model.config.dtype).name,
        progress=progress,
    )


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of sampling in fields that transformers, vLLM and jaxinfer all read alike.

    transformers refuses a temperature of 0, and vLLM does not read ``do_sample``.
    """
    if config.get("temperature") != 0:
        return dict(config)
    rest = {key: value for key, value in config.items() if key not in _SAMPLING}
    return rest | {"do_sample": True, "top_k": 1}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(
        json.dumps(dict(content), indent=2, ensure_ascii=False, default=dict) + "\n", "utf-8"
    )
