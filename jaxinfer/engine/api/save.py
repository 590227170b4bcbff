"""``save``: a model as a Hugging Face folder, the inverse of ``load``; and ``export``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.core.config import cache_root
from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import Progress
from jaxinfer.engine.api.language_model import LanguageModel
from jaxinfer.engine.api.load import load
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.models.base import Model, Params
from jaxinfer.weights.save import write_folder, write_model
from jaxinfer.weights.sources import resolve_source

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


def save(
    model: Model | LanguageModel,
    params: Params,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model with these parameters to a new Hugging Face folder.

    It holds config.json, model.safetensors (above 5 GB several files and an index),
    generation_config.json, tokenizer.json, tokenizer_config.json and the chat templates, and is
    complete or absent. ``jaxinfer.load(folder)`` gives the same parameters back, bit for bit;
    transformers and vLLM load it too. ``model`` is what ``jaxinfer.load`` returned, whose tokenizer
    and generation_config are the defaults, or its ``model`` alone. Matrices that are kept quantised
    are written dequantised, in the model's dtype. Raises ``CacheError`` if the folder exists or
    cannot be written, and ``ArgumentError`` for parameters that do not fit.
    """
    if isinstance(model, LanguageModel):
        _, _, own = model
        tokenizer = own if tokenizer is None else tokenizer
        if generation_config is None:
            generation_config = model.generation_config
        model = model.model
    write_model(
        Path(folder),
        model,
        params,
        tokenizer,
        generation_config or {},
        progress or progress_on(sys.stderr),
    )


def export(
    reference: str,
    folder: str | Path,
    *,
    weights: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> None:
    """Write the Hugging Face folder of a model: config, tokenizer, chat templates, and ``weights``.

    ``reference`` and ``settings`` are those of ``load``. Raises what ``load`` and ``save`` raise.
    """
    folder = Path(folder)
    if folder.exists():  # before anything is loaded
        raise CacheError(f"{folder} exists already; name a new folder")
    progress = progress or progress_on(sys.stderr)
    if weights:
        model = load(reference, progress=progress, **settings)
        save(model, model.params, folder, progress=progress)
        return
    from jaxinfer.text.tokenizer import load_tokenizer

    source = resolve_source(
        reference,
        cache_dir=cache_root(settings.get("cache_dir")),
        progress=progress,
        tokenizer=settings.get("tokenizer"),
        revision=settings.get("revision"),
        hf_overrides=settings.get("hf_overrides"),
        download_dir=settings.get("download_dir"),
    )
    write_folder(
        folder,
        hf_config=source.hf_config,
        generation_config=source.generation_config,
        tokenizer=load_tokenizer(source.tokenizer_spec()),
        checkpoint=None,
        dtype=None,
        progress=progress,
    )
