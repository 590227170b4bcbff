"""The task of an engine: text, embeddings or scores; and the model that embeddings need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError, TokenizerError
from jaxinfer.core.pooling import Pooling
from jaxinfer.models.base import Model
from jaxinfer.models.hf_keys import WITHOUT_HEAD
from jaxinfer.models.registry import decoder_config
from jaxinfer.weights.sources import ModelSource

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


def with_task(config: EngineConfig, source: ModelSource) -> tuple[EngineConfig, ModelSource]:
    """The settings with the task and the pooling that "auto" and None stand for, and the source of
    the model that the task needs: embeddings need no head.

    Raises ``ConfigError`` for settings that do not go with the task.
    """
    task = config.task
    if task == "auto":
        task = "generate" if source.pooling is None else "embed"
    if task != "embed":
        if config.pooling is not None:
            raise ConfigError(f"pooling has no meaning for task {task!r}; leave it out")
        return replace(config, task=task), source
    if config.tap_points is not None:
        raise ConfigError("tap_points has no meaning for task 'embed'; leave it out")
    kind = config.pooling or ("last" if source.pooling is None else source.pooling.kind)
    hf_config = {**decoder_config(source.hf_config), WITHOUT_HEAD: True}
    return replace(config, task=task, pooling=kind), replace(source, hf_config=hf_config)


def pooling_of(config: EngineConfig, source: ModelSource, model: Model) -> Pooling | None:
    """How the model makes embeddings; None for another task. Without a description in its files
    vectors are normalised, as in vLLM.
    """
    if config.pooling is None:
        return None
    normalize = source.pooling is None or source.pooling.normalize
    sizes = _matryoshka_dimensions(source.hf_config)
    return Pooling(config.pooling, model.config.hidden_size, normalize, sizes)


def score_token_ids(config: EngineConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids of the two answers that a score compares; none for another task.

    Raises ``ConfigError`` if one of them is not one token.
    """
    if config.task != "score":
        return ()
    if tokenizer is None:
        raise ConfigError("task 'score' needs a tokenizer; leave skip_tokenizer_init out")
    words = config.score_tokens.split(",")
    if len(words) != 2:
        raise ConfigError(f"score_tokens must be two words, FOR,AGAINST, got {words!r}")
    found: list[int] = []
    for word in words:
        try:
            ids = tokenizer.encode(word, add_special_tokens=False)
        except TokenizerError as error:
            raise ConfigError(f"score_tokens has {word!r}: {error}") from error
        if len(ids) != 1:
            raise ConfigError(
                f"score_tokens has {word!r}, which is {len(ids)} tokens of this model; name words "
                "of one token each"
            )
        found += ids
    return tuple(found)


def _matryoshka_dimensions(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    given: Any = hf_config.get("matryoshka_dimensions") or []
    sizes = cast("list[Any]", given) if isinstance(given, list) else [given]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"matryoshka_dimensions of config.json must be a list of sizes, got {given!r}; correct "
            "the file"
        )
    return tuple(sizes)
