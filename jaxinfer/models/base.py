"""What a model family is: the one record that each file in this folder exports.

Owns: ``ModelFamily``, ``TensorRule``, the config protocol, and the functions that work for every
family (``abstract_params``, ``forward``). Must not know: files, devices, the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.tree import nested
from jaxinfer.nn.attention import Attend, DenseCausal
from jaxinfer.nn.kv import KVSpec, KVState
from pallas_kernels.pins import ALL_XLA, Pins

if TYPE_CHECKING:
    import flax.linen as nn  # by families, when they make a module: see ``gqa.decoder``

type Params = dict[str, Any]  # nested dict of arrays, one array per layer and weight


class ModelConfig(Protocol):
    """The facts every family's frozen config states; the rest is the family's own business."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, int]:
        """The context of an engine without ``max_model_len``, and the longest one."""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        ...

    def for_context(self, length: int) -> Self:
        """The config in an engine whose sequences may have ``length`` tokens."""
        ...


@dataclass(frozen=True)
class TensorRule:
    """How one parameter is made from checkpoint tensors (Hugging Face names).

    ``param`` is the path in the params tree, joined by "/", ``shape`` what the module declares
    there. ``build`` receives the tensors in the order of ``sources`` and returns the parameter; it
    moves and joins, it does no arithmetic. ``shapes`` are the sources' expected shapes, checked
    before anything is read.
    """

    param: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    build: Callable[..., np.ndarray]


@dataclass(frozen=True)
class ModelFamily:
    """A family of architectures that share one module.

    ``module`` makes the linen module of a config. It is called with (token_ids, positions, kv,
    attend, pins, last), the first two int32[T] packed over sequences that ``attend`` tells apart,
    and returns the hidden states [T, D] after the final norm and the new KV state; its ``unembed``
    maps hidden states [..., D] to logits float32[..., V]. ``pins`` are those of kernels outside of
    attention, ``ALL_XLA`` unless given; ``last`` see ``hidden_states``.
    ``ignored_tensors`` are regular expressions of checkpoint tensors that carry nothing (buffers,
    an lm_head tied to the embedding).
    ``optional_prefix`` begins every tensor name in some checkpoints and none in others.
    """

    name: str
    architectures: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any], jnp.dtype], ModelConfig]
    module: Callable[[Any], nn.Module]
    tensor_rules: Callable[[Any], tuple[TensorRule, ...]]
    kv_spec: Callable[[Any], KVSpec]
    ignored_tensors: tuple[str, ...] = ()
    optional_prefix: str = ""


@dataclass(frozen=True)
class Model:
    """A family with a config: everything static about a model, without weights."""

    family: ModelFamily
    architecture: str
    config: ModelConfig

    @property
    def module(self) -> nn.Module:
        """The linen module; cheap, holds no arrays."""
        return self.family.module(self.config)

    @property
    def kv_spec(self) -> KVSpec:
        """What the model keeps per token."""
        return self.family.kv_spec(self.config)

    @cached_property
    def tensor_rules(self) -> tuple[TensorRule, ...]:
        """How its parameters are made from a checkpoint."""
        return self.family.tensor_rules(self.config)

    @cached_property  # each executable asks
    def _abstract_params(self) -> Params:
        dtype = self.config.dtype
        rules = self.tensor_rules
        return nested({rule.param: jax.ShapeDtypeStruct(rule.shape, dtype) for rule in rules})


def abstract_params(model: Model) -> Params:
    """Shapes and dtypes of every parameter, without memory.

    As the rules state them: to have the module declare its 36 layers takes 0.1 to 0.15 s.
    """
    return model._abstract_params


def layer_of(name: str) -> int | None:
    """Which layer a group of parameters is, by its name in every family's module; None for what is
    no layer's: the embedding, the final norm, the head.
    """
    number = name.removeprefix("layers_")
    return int(number) if number != name else None


def head_params(params: Params) -> Params:
    """The parameters that are no layer's, which ``unembed`` needs no others of."""
    return {name: group for name, group in params.items() if layer_of(name) is None}


def hidden_states(
    model: Model,
    params: Params,
    token_ids: jax.Array,  # int32[T]
    positions: jax.Array,  # int32[T]
    kv: KVState | None,
    attend: Attend,
    pins: Pins = ALL_XLA,
    last: jax.Array | None = None,  # int32[B]
) -> tuple[jax.Array, KVState | None]:  # [T, D], or with last [B, D]
    """Run the decoder; with ``PagedAttend`` this is the very function that serves.

    ``pins``: of the kernels outside of attention; unless given, plain XLA, which differentiates.
    ``last``: the last token of each row that ``attend`` tells apart, where only their hidden states
    are wanted. The last layer then computes keys and values of the others, and nothing else.
    """
    arguments = (token_ids, positions, kv, attend, pins, last)
    return model.module.apply({"params": params}, *arguments)  # type: ignore[return-value]


def unembed(model: Model, params: Params, hidden: jax.Array) -> jax.Array:  # float32[..., V]
    """Logits of hidden states [..., D]."""
    return model.module.apply({"params": params}, hidden, method="unembed")  # type: ignore[return-value]


def forward(model: Model, params: Params, token_ids: jax.Array) -> jax.Array:  # float32[T, V]
    """Logits of one whole sequence int32[T]; pure: jit, vmap and differentiate it freely."""
    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    hidden, _ = hidden_states(model, params, token_ids, positions, None, DenseCausal())
    return unembed(model, params, hidden)
