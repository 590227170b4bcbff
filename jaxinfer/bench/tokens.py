"""The tokenizer of a benchmark: the ids that random prompts are drawn from, texts, counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.core.errors import BenchError, JaxinferError

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


def vocabulary(tokenizer: str | None, size: int | None) -> list[int]:
    """Token ids for random prompts, of a tokenizer's vocabulary or below ``size``.

    Raises ``BenchError`` if neither is given or the tokenizer cannot be read.
    """
    if size:
        return list(range(size))
    if tokenizer is None:
        raise BenchError(
            "random prompts need a vocabulary; give --tokenizer, --vocab-size, or a --model whose "
            "tokenizer is to be used"
        )
    if (path := _tokenizer_json(tokenizer)) is None:
        found = tokenizer_of(tokenizer)
        return [one for one in range(len(found)) if one not in found.special_token_ids]
    try:
        data = json.loads(path.read_text())
        special = {token["id"] for token in data["added_tokens"]}
        count = len(data["model"]["vocab"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is no tokenizer ({error}); give another --tokenizer") from error
    return [token_id for token_id in range(count) if token_id not in special]


def _tokenizer_json(reference: str) -> Path | None:
    """The tokenizer.json that a reference names, or that is in the folder it names, if any."""
    path = Path(reference)
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    return path if path.suffix == ".json" else None


def tokenizer_of(reference: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of a model in any form that ``jaxinfer serve`` takes.

    Raises ``BenchError`` if it cannot be read.
    """
    from jaxinfer.core.config import cache_root
    from jaxinfer.core.progress import NO_PROGRESS
    from jaxinfer.text.tokenizer import load_tokenizer
    from jaxinfer.text.tokenizer_config import TokenizerSpec
    from jaxinfer.weights.sources import resolve_source

    try:
        if (path := _tokenizer_json(reference)) is not None:
            return load_tokenizer(TokenizerSpec(tokenizer_json=path.read_text("utf-8")))
        source = resolve_source(reference, cache_dir=cache_root(), progress=NO_PROGRESS)
        return load_tokenizer(source.tokenizer_spec())
    except (OSError, JaxinferError) as error:
        raise BenchError(
            f"{reference!r} has no tokenizer that can be read ({error}); give --tokenizer or "
            "--vocab-size"
        ) from error
