"""Converts a Hugging Face folder of floats into a quantised one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxinfer.core.config import cache_root
from jaxinfer.core.errors import CacheError, ConfigError, SourceError
from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model
from jaxinfer.models.registry import build_model
from jaxinfer.weights.locate import Places, locate
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.quantised.on_load import QuantisedOnLoad, is_ignored, linear_names
from jaxinfer.weights.quantised.write import write_compressed
from jaxinfer.weights.sources import resolve_source


def convert_folder(
    reference: str,
    folder: Path,
    scheme: str,
    *,
    ignore: Sequence[str] = (),
    progress: Progress,
) -> int:
    """Write the model ``reference`` to a new ``folder``, with its linear layers quantised.

    ``scheme`` is one of ``quantise.SCHEMES``; ``ignore``: see ``linear_names``. Returns the number
    of quantised matrices. All checks are made before weights are read. Raises ``SourceError``
    (``CheckpointError`` for a broken file), ``ConfigError``, and ``CacheError`` if the folder
    exists or cannot be written.
    """
    if folder.exists():
        raise CacheError(f"{folder} exists already; name a new folder")
    cache_dir = cache_root()
    source_folder = locate(reference, Places(cache_dir), progress).path
    if not source_folder.is_dir():
        raise SourceError(
            f"{reference} is not a folder; name a Hugging Face folder of unquantised safetensors"
        )
    source = resolve_source(reference, cache_dir=cache_dir, progress=progress)
    if source.scheme is not None:
        raise ConfigError(
            f"{reference} is quantised already; convert the model that it was made from"
        )
    assert source.checkpoint is not None, "a folder without weights is refused"
    model = build_model(source.hf_config, "float32")
    plan_params(model, source.checkpoint)  # names, shapes and dtypes
    names = linear_names(model, source.checkpoint, ignore)
    _refuse_stacks(model, ignore)
    checkpoint = QuantisedOnLoad(source.checkpoint, scheme, names, threads=None)
    write_compressed(folder, checkpoint, source.hf_config, source_folder, progress)
    return len(checkpoint.forms)


def _refuse_stacks(model: Model, ignore: Sequence[str]) -> None:
    """Raise ``ConfigError`` for experts whose tensors have no names of their own in files.

    Files of compressed-tensors have a matrix for each layer, and readers of such a family look for
    no tensors of single experts.
    """
    specs = (spec for spec in model.param_specs if spec.matrix in ("experts", "experts_in_out"))
    for source in (spec.sources[0] for spec in specs):
        layer = source.name.removesuffix(".weight")
        if source.part is not None and not is_ignored(layer, ignore):
            parent = layer.split(".")[-2]
            raise ConfigError(
                f"tensor {source.name} has all experts of a layer, which compressed-tensors has no "
                f"form for; leave experts as they are with --ignore 're:.*{parent}.*', or convert "
                "nothing and use --quantization of the other commands, which quantises them, too"
            )
