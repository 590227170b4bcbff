"""``LanguageModel``: the weights and functions that serve, for research."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from jaxinfer.core.errors import ArgumentError, EngineError
from jaxinfer.core.progress import Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.requests.outputs import RequestOutput
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.models.arguments import checked_batch, checked_params
from jaxinfer.models.base import (
    Model,
    Params,
    forward,
    forward_batch,
    next_token_losses,
    normalised_stream,
    unembed,
)
from jaxinfer.models.quantised import sizes_by_form
from jaxinfer.models.views import WeightViews
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.points import Edit
from jaxinfer.weights.save import write_model

if TYPE_CHECKING:
    from jaxinfer.engine.loop.engine import Engine
    from jaxinfer.text.tokenizer import Tokenizer


_OF_OTHERS = MappingProxyType(
    {
        "run_with_cache": 'logits, taps = m.forward(tokens, taps="all")',
        "run_with_hooks": "m.forward(tokens, edit={point: function})",
        "trace": "m.forward(tokens, taps=[point], edit={point: function})",
        "add_hook": "the argument edit of m.forward and m.generate",
        "hooks": "the argument edit of m.forward and m.generate",
        "to_tokens": "m.tokenizer.encode(text)",
        "to_string": "m.tokenizer.decode(ids)",
        "to_str_tokens": "[m.tokenizer.decode(id) for id in ids]",
        "cfg": "m.config, and m.model.hf_config for config.json",
        "unembed": "m.logits(hidden)",
        "ln_final": "m.logits(stream, final_norm=True), and the point final_norm",
        "lm_head": "m.logits(hidden), and m.W_U",
        "embed": "m.W_E, and the point embed",
        "W_pos": 'm.params["positions"], of a model with learned positions',
        "blocks": "the points layers.0.z and others, and m.W_Q[0]",
        "layers": "the points layers.0.z and others, and m.W_Q[0]",
        "transformer": "the points layers.0.z and others, and m.W_Q[0]",
    }
)


@dataclass(frozen=True, eq=False, repr=False)
class LanguageModel(WeightViews):
    """A model with its weights, from ``jaxinfer.load`` or ``llm.model``. Immutable.

    ``model`` is the model without weights, ``params`` the nested dict of its parameters (one array
    per layer and weight), ``generation_config`` that of its files. It unpacks as
    ``model, params, tokenizer = jaxinfer.load(...)``, for ``jaxinfer.models.forward(model, params,
    token_ids)``. ``W_Q`` and others are views of the weights by layer and head: ``WeightViews``.
    """

    model: Model
    params: Params
    _tokenizer: Tokenizer | None = None
    generation_config: Mapping[str, Any] = MappingProxyType({})
    _generate: Callable[..., list[RequestOutput]] | None = None
    reference: str = ""  # the model's name, folder or file, as the user gave it
    _no_tokenizer: str = "it was left out"  # why there is none

    def __iter__(self) -> Iterator[Any]:
        """The model, its parameters and its tokenizer, None without one."""
        return iter((self.model, self.params, self._tokenizer))

    def __repr__(self) -> str:
        """A few lines: architecture, sizes, how the weights are kept, where they came from."""
        return "\n".join(
            [f"LanguageModel of {self.reference or 'weights'}", *described(self.model)]
        )

    if not TYPE_CHECKING:  # a type checker should know attributes that do not exist

        def __getattr__(self, name: str) -> Any:
            """An error with the equivalent of a name of TransformerLens or nnsight."""
            here = f"; here it is {_OF_OTHERS[name]}" if name in _OF_OTHERS else ""
            raise AttributeError(f"LanguageModel has no {name!r}{here}", name=name, obj=self)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ``EngineError`` if it has none."""
        if self._tokenizer is None:
            raise EngineError(f"this model has no tokenizer: {self._no_tokenizer}")
        return self._tokenizer

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
        taps: Sequence[str] | str = (),
        edit: Mapping[str, Edit] = MappingProxyType({}),
    ) -> Any:
        """Logits of one sequence, float32[T, V], or of a batch, float32[B, T, V].

        ``tokens`` are a list or an array int32[T], a batch int32[B, T] with ``lengths`` int32[B]
        (by default all T), or a list of lists, which is padded. A text, or a list of texts, is
        encoded as ``tokenizer.encode`` does, with the special tokens that the tokenizer adds, such
        as a first token of its own. Logits of padding are 0.
        ``params`` replaces the model's own parameters: ``jax.grad(lambda p: loss(m.forward(tokens,
        params=p)))(m.params)``; under ``jax.jit`` pass them as an argument in the same way.
        ``taps`` names activations to return as well, ``edit`` has functions that replace some, both
        also by patterns (``jaxinfer.models.forward``); with taps the result is (logits, dict).
        Raises
        ``ArgumentError`` for other arguments, and ``KeyError`` for an unknown name.
        """
        ids, sizes = checked_batch(self._encoded(tokens), lengths, self.config)
        weights = self._weights(params)
        if sizes is None:
            return forward(self.model, weights, ids, taps, edit)
        return forward_batch(self.model, weights, ids, sizes, taps, edit)

    def loss(
        self,
        tokens: Any,
        *,
        lengths: Any = None,
        params: Params | None = None,
        per_token: bool = False,
    ) -> jax.Array:  # float32[]; per token float32[T - 1], or of a batch float32[B, T - 1]
        """The cross-entropy of each next token, in nats: the mean, or of each.

        Arguments are those of ``forward``, and it can be differentiated by ``params``. The mean is
        over all predicted tokens of a batch; its padding counts as none, and is 0 per token. Raises
        ``ArgumentError`` for fewer than two tokens.
        """
        ids, sizes = checked_batch(self._encoded(tokens), lengths, self.config)
        if ids.shape[-1] < 2:
            raise ArgumentError("loss takes at least two tokens, as it is of next ones, and got 1")
        logits = self.forward(ids, lengths=sizes, params=params)
        losses, mean = next_token_losses(logits, ids, sizes)
        return losses if per_token else mean

    def logits(self, hidden: Any, *, final_norm: bool = False, params: Params | None = None) -> Any:
        """Logits float32[..., V] of hidden states [..., D], as the tap ``final_norm`` gives them.

        With ``final_norm`` they are residual streams, such as ``layers.3.resid_post``, which are
        normalised first: a logit lens. Raises ``ArgumentError`` for another width.
        """
        width = self.config.stream_width if final_norm else self.config.hidden_size
        shape = getattr(hidden, "shape", ())
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
        *,
        edit: Mapping[str, Any] = MappingProxyType({}),
        positions: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """``LLM.generate`` with these weights. The first call builds the engine, without a copy of
        the weights; ``llm.model`` has one already. Raises what ``LLM`` and its ``generate`` raise.

        ``edit`` has functions by point, as ``forward`` does, or vectors, which are added: every
        step applies them, to prompts and to drawn tokens. A function is traced by JAX. It gets
        activations [T, ...] of tokens of perhaps several prompts, and so must compute each token by
        itself. ``positions`` are those of the tokens to edit, counted from 0: an int, several, or a
        slice (``slice(5, None)``: from the sixth token on; default all). The engine is compiled for
        the very function objects, so define them once; it is kept until other ones come.
        """
        if self._generate is None:
            raise EngineError("this model has no engine of its own; use the one it came from")
        if edit or positions is not None:
            options |= {"edit": edit, "positions": positions}
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
            self._tokenizer,
            config,
            progress or progress_on(sys.stderr),
        )

    def _encoded(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.tokenizer.encode(tokens)
        if not isinstance(tokens, list | tuple):
            return tokens
        texts = cast("Sequence[Any]", tokens)
        if not texts or not all(isinstance(text, str) for text in texts):
            return texts
        return [self.tokenizer.encode(text) for text in texts]

    def _weights(self, params: Params | None) -> Params:
        if params is None:
            return self.params
        checked_params(params, self.model.arrays, dtypes=False)
        return params


def described(model: Model) -> list[str]:
    """Lines about a model: its sizes, and how its weights are kept."""
    config = model.config
    words = [f"{len(config.layers)} layers of width {config.hidden_size}"]
    blocks = [*(layer.mixer for layer in config.layers), *(layer.ffn for layer in config.layers)]
    words += [text for text in dict.fromkeys(block.words() for block in blocks) if text]
    sizes = sizes_by_form(model.param_specs, np.dtype(config.dtype))
    forms = ", ".join(f"{size.count:,} {form}" for form, size in sizes.items())
    count = sum(size.count for size in sizes.values())
    return [
        f"  {model.architecture}: {', '.join(words)}, vocabulary {config.vocab_size:,}",
        f"  {count:,} parameters: {forms}; activations {config.dtype.name}",
    ]


def model_of_engine(
    engine: Engine, generate: Callable[..., list[RequestOutput]] | None = None
) -> LanguageModel:
    """The model of a running engine, whose ``generate`` it calls while those weights are served."""
    weights = engine.weights
    params = weights.params

    def checked(given: Params, *arguments: Any, **options: Any) -> list[RequestOutput]:
        if given is not params or weights.params is not params:
            raise EngineError(
                "the engine serves other weights than this model's; call "
                "llm.update_weights(m.params) and llm.generate"
            )
        if "edit" in options:
            raise EngineError(
                "the steps of this engine are compiled without edits; call generate of "
                "jaxinfer.load(MODEL), or steer with tap_points"
            )
        assert generate is not None, "else there is no engine to call"
        return generate(*arguments, **options)

    return LanguageModel(
        weights.model,
        params,
        engine.tokenizer,
        weights.generation_config,
        None if generate is None else checked,
        weights.reference,
    )
