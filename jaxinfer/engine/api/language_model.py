"""``LanguageModel``: the weights and functions that serve, for research."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxinfer.core.errors import ArgumentError, EngineError
from jaxinfer.core.progress import Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.models.arguments import checked_batch, checked_params
from jaxinfer.models.base import Model, Params, forward, forward_batch, normalised_stream, unembed
from jaxinfer.models.views import WeightViews
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.points import Edit
from jaxinfer.weights.save import write_model

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class LanguageModel(WeightViews):
    """A model with its weights, from ``jaxinfer.load`` or ``llm.model``. Immutable.

    ``model`` is the model without weights, ``params`` the nested dict of its parameters (one array
    per layer and weight), ``generation_config`` that of its files. It unpacks as
    ``model, params, tokenizer = jaxinfer.load(...)``, for ``jaxinfer.models.forward(model, params,
    token_ids)``. ``W_Q`` and others are views of the weights by layer and head: ``WeightViews``.
    """

    model: Model
    params: Params = field(repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    generation_config: Mapping[str, Any] = field(default=MappingProxyType({}), repr=False)
    _generate: Callable[..., list[RequestOutput]] | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Any]:
        """The model, its parameters and its tokenizer."""
        return iter((self.model, self.params, self.tokenizer))

    @property
    def config(self) -> DecoderSpec:
        """Sizes, layers and options of the decoder; ``model.hf_config`` is the config.json."""
        return self.model.config

    def forward(
        self,
        tokens: Any,
        *,
        lengths: Any = None,
        params: Params | None = None,
        taps: Sequence[str] = (),
        edit: Mapping[str, Edit] = MappingProxyType({}),
    ) -> Any:
        """Logits of one sequence, float32[T, V], or of a batch, float32[B, T, V].

        ``tokens`` are a list or an array int32[T], a batch int32[B, T] with ``lengths`` int32[B]
        (by default all T), or a list of lists, which is padded. Logits of padding are 0.
        ``params`` replaces the model's own parameters: ``jax.grad(lambda p: loss(m.forward(tokens,
        params=p)))(m.params)``; under ``jax.jit`` pass them as an argument in the same way.
        ``taps`` names activations to return as well, ``edit`` has functions that replace some
        (``jaxinfer.models.forward``); with taps the result is (logits, dict). Raises
        ``ArgumentError`` for other arguments, and ``KeyError`` for an unknown name.
        """
        ids, sizes = checked_batch(tokens, lengths, self.config)
        weights = self._weights(params)
        if sizes is None:
            return forward(self.model, weights, ids, taps, edit)
        return forward_batch(self.model, weights, ids, sizes, taps, edit)

    def logits(self, hidden: Any, *, final_norm: bool = False, params: Params | None = None) -> Any:
        """Logits float32[..., V] of hidden states [..., D], as the tap ``final_norm`` gives them.

        With ``final_norm`` they are residual streams, such as ``layers.3.resid_post``, which are
        normalised first: a logit lens. Raises ``ArgumentError`` for another width.
        """
        shape, width = getattr(hidden, "shape", ()), self.config.hidden_size
        if not shape or shape[-1] != width:
            raise ArgumentError(
                f"logits takes hidden states [..., {width}], and got an array {list(shape)}"
            )
        weights = self._weights(params)
        if final_norm:
            hidden = normalised_stream(self.model, weights, hidden)
        return unembed(self.model, weights, hidden)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """``LLM.generate`` with these weights. The first call builds the engine, without a copy of
        the weights; ``llm.model`` has one already. Raises what ``LLM`` and its ``generate`` raise.
        """
        if self._generate is None:
            raise EngineError("this model has no engine of its own; use the one it came from")
        return self._generate(self.params, prompts, sampling_params, **options)

    def with_params(self, params: Params) -> LanguageModel:
        """The same model with other parameters; raises ``ArgumentError`` if they do not fit."""
        checked_params(params, self.model.arrays)
        return replace(self, params=params)

    def save(self, folder: str | Path, *, progress: Progress | None = None) -> None:
        """Write a new Hugging Face folder with these weights and the tokenizer; see
        ``jaxinfer.save``.
        """
        config = self.generation_config
        write_model(
            Path(folder),
            self.model,
            self.params,
            self.tokenizer,
            config,
            progress or progress_on(sys.stderr),
        )

    def _weights(self, params: Params | None) -> Params:
        if params is None:
            return self.params
        checked_params(params, self.model.arrays, dtypes=False)
        return params
