"""The specs of embeddings of n-grams that a layer adds to residual streams (Qwen3.8-Flash-Next), or
to a token's own one (LongCat-Flash-Lite).

Their modules are in ``nn.ngrams``, the hash of n-grams in ``nn.ngram_hash``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, StepShape
from jaxinfer.nn.state import Entry, LayerState

if TYPE_CHECKING:
    import flax.linen as nn

TABLE = "ngrams/table"  # in the parameters of a layer; a step reads few of its rows
LAST_IDS, LAST_INPUTS = "ngram_ids", "ngram_inputs"  # the state of a sequence


@dataclass(frozen=True, kw_only=True)
class NGramConfig(BlockSpec):
    """Embeddings of n-grams, added to ``num_streams`` streams of ``width`` before the mixer.

    The n-grams that end with a token, of 2 up to ``len(multipliers)`` tokens, are hashed to rows of
    a table: those of each length by as many functions as the others, of which ``sizes`` are the
    numbers of rows, a prime each. An n-gram does not pass ``boundary``: that token stands for all
    tokens up to the last one, and for those before the first. Of the ``embed_dim`` elements of
    all rows a value is made, and a key for each stream, whose product with the stream is the gate
    of the value. Its causal convolution of ``conv_width`` taps, each as many tokens apart as the
    longest n-gram has, is added with SiLU. Keys, streams and inputs of the convolution have RMS
    norms, of each stream. The table has ``num_rows``, in files ``num_parts`` tensors; several
    devices have a part of its rows each.
    """

    num_streams: int
    width: int
    multipliers: tuple[int, ...]  # of the tokens of an n-gram, the last one's first; below 2 ** 63
    sizes: tuple[int, ...]
    boundary: int
    embed_dim: int
    num_rows: int
    num_parts: int
    conv_width: int
    norm_eps: float

    def __post_init__(self) -> None:
        """Check that each length has as many functions, with rows of one width."""
        heads, rest = divmod(len(self.sizes), len(self.multipliers) - 1)
        assert heads and not rest, "functions of each length"
        assert self.embed_dim % len(self.sizes) == 0 and sum(self.sizes) <= self.num_rows

    @property
    def taps(self) -> int:
        """The tokens over which the convolution reaches."""
        return (self.conv_width - 1) * len(self.multipliers) + 1

    @property
    def channels(self) -> int:
        """Elements of a token in all streams."""
        return self.num_streams * self.width

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the last tokens of a sequence, the newest first, and the last inputs
        of the convolution (``pallas_kernels.short_conv``).
        """
        ids = Entry(LAST_IDS, (len(self.multipliers) - 1,), jnp.dtype(jnp.int32))
        return LayerState(per_slot=(ids, Entry(LAST_INPUTS, (self.taps, self.channels), dtype)))

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.pooled_bounds").ngram_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"embeddings of {len(self.sizes)} n-grams of a token"

    def module(self) -> nn.Module:
        """The module; its parameters are those of the layer under "ngrams"."""
        return import_module("jaxinfer.nn.ngrams").NGrams(self, name="ngrams")


@dataclass(frozen=True, kw_only=True)
class NGramMeanConfig(BlockSpec):
    """The first ``width`` elements of the stream, a token's embedding, become the mean of it and of
    projections of its n-grams' embeddings.

    The n-grams that end with a token, of 2 up to ``longest`` tokens, are hashed to rows of a table
    modulo ``sizes``, as many of each length: polynomials in ``base``. Tokens up to ``boundary``,
    which is before the last token, count as 0, and so do those before the first.
    """

    width: int
    longest: int
    base: int
    sizes: tuple[int, ...]
    boundary: int

    def __post_init__(self) -> None:
        """Check that each length has as many functions."""
        assert self.longest > 1 and len(self.sizes) % (self.longest - 1) == 0, "functions of each"

    @property
    def row_width(self) -> int:
        """Elements of a row of the table."""
        return self.width // len(self.sizes)

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``: the last tokens of a sequence, the newest first."""
        del dtype
        return LayerState(per_slot=(Entry(LAST_IDS, (self.longest - 1,), jnp.dtype(jnp.int32)),))

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``: in float32 the embeddings, twice, and three arrays of the stream."""
        del params
        rows = len(self.sizes) * (self.row_width + 4)  # and four integers of the hash
        return 4 * step.x.shape[0] * (2 * rows + 3 * self.width)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"embeddings of {len(self.sizes)} n-grams of a token"

    def module(self) -> nn.Module:
        """The module; its parameters are those of the layer under "ngrams"."""
        return import_module("jaxinfer.nn.ngrams").NGramMean(self, name="ngrams")


def without_table(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a layer without the table of n-grams, if it has one: no matrix."""
    group, name = TABLE.split("/")
    if group not in layer:
        return layer
    return {**layer, group: {key: own for key, own in layer[group].items() if key != name}}
