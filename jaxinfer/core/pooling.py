"""Embeddings: how a model makes one vector of a text, and what a request may ask of it."""

from __future__ import annotations

import msgspec

from jaxinfer.core.checks import as_int
from jaxinfer.core.errors import RequestError

KINDS = ("last", "mean", "cls")  # of the last token, of all tokens, of the first token


class Pooling(msgspec.Struct, frozen=True):
    """How a model makes a vector of its hidden states: ``kind`` is one of ``KINDS``.

    ``dimensions`` are the sizes to which its vectors may be shortened (matryoshka embeddings); if
    the model's config names none, every size up to its ``width`` is possible.
    """

    kind: str
    width: int = 0  # D
    normalize: bool = True
    dimensions: tuple[int, ...] = ()


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one text's vector is made. Names and defaults are vLLM's.

    ``dimensions``: the first of its values, normalised again. ``normalize``: to length 1; None: as
    the model's config says. ``truncate_prompt_tokens``: the first tokens of a longer text; -1: as
    many as fit the context. Raises ``RequestError`` naming the field if a value is invalid.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            whole = as_int(value)
            if value is not None and (whole is None or whole < least or whole == 0):
                raise RequestError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.normalize not in (None, True, False):
            raise RequestError(f"normalize must be True or False, got {self.normalize!r}")


def check_dimensions(dimensions: int | None, pooling: Pooling) -> None:
    """Raise ``RequestError`` if the model's vectors cannot be shortened to this size."""
    if dimensions is None or dimensions == pooling.width:
        return
    if pooling.dimensions and dimensions not in pooling.dimensions:
        sizes = ", ".join(map(str, pooling.dimensions))
        raise RequestError(
            f"dimensions is {dimensions}, and this model's vectors may have {sizes} or "
            f"{pooling.width}; choose one of them"
        )
    if not 1 <= dimensions <= pooling.width:
        raise RequestError(
            f"dimensions is {dimensions}, and this model's vectors have {pooling.width}; choose at "
            "most as many"
        )
