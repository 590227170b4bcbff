"""``ModelFamily``, which each family's file exports, ``Model``, and functions for every family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxinfer.core.points import IN_LAYER, canonical, expanded, is_pattern, names_of, unknown
from jaxinfer.models.arguments import checked_token_ids
from jaxinfer.models.params import ParamSpec, nested
from jaxinfer.models.quantised import keep_quantised
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.block import BlockSpec
from jaxinfer.nn.context import StepContext, dense_context
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.linear import Stream
from jaxinfer.nn.placement import is_divided
from jaxinfer.nn.points import BY_HEAD, Edit, Points
from jaxinfer.nn.state import State, StateLayout
from pallas_kernels.all_reduce.api import Peers
from pallas_kernels.harness.pins import ALL_XLA, Pins
from pallas_kernels.lib.arrangements import named
from pallas_kernels.lib.quantised import Form

if TYPE_CHECKING:
    import flax.linen as nn  # imported when a module is made: see ``nn.decoder_config``

type Params = dict[str, Any]  # nested dict of arrays, one array per layer and weight


@dataclass(frozen=True)
class ModelFamily:
    """A family of architectures: its config reader and the specs of its parameters.

    ``ignored_tensors`` are regular expressions of checkpoint tensors that are not needed (buffers,
    an lm_head tied to the embedding). ``optional_prefix`` is a prefix of all tensor names in some
    checkpoints of the family, or several. ``other_names`` are regular expressions of names that
    some checkpoints have in place of those of the specs, and what they stand for. ``calls`` are
    executables beside the step that only this family has: records ``exec.calls.call.Call``, whose
    functions are those of modules, as another process may compile them. With ``stacked_experts``
    some checkpoints have a layer's experts in two tensors, which ``weights.stacked_experts``
    presents as those of single experts; models of floats are saved so.
    """

    name: str
    config_from_hf: Callable[[Mapping[str, Any], jnp.dtype], DecoderSpec]
    param_specs: Callable[[DecoderSpec], tuple[ParamSpec, ...]]
    ignored_tensors: tuple[str, ...] = ()
    optional_prefix: str | tuple[str, ...] = ""
    other_names: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    calls: tuple[Any, ...] = ()
    stacked_experts: bool = False


@dataclass(frozen=True)
class Model:
    """A family with a config: everything static about a model, without weights.

    ``forms`` are the forms of the checkpoint tensors that stay quantised, by their names in the
    family's specs; ``arrangement`` is the name of the order in which kernels read them.
    ``hf_config`` is the config.json that ``config`` was read from. ``devices`` are those among
    which steps divide it: arrays and state are then those of all devices, in their order
    (``models.division``), where ``whole`` has them as functions of whole arrays need them.
    ``context`` is the context length that ``config`` is for.
    """

    family: ModelFamily
    architecture: str
    config: DecoderSpec
    forms: tuple[tuple[str, Form], ...] = ()
    arrangement: str | None = None
    hf_config: Mapping[str, Any] = field(default=MappingProxyType({}), compare=False, repr=False)
    devices: int = 1
    context: int = 0

    def __repr__(self) -> str:
        """Architecture, layers and dtype; ``config`` has all options."""
        config = self.config
        return f"Model({self.architecture}, {len(config.layers)} layers, {config.dtype.name})"

    @property
    def module(self) -> nn.Module:
        """The Flax module, which is cheap to make and holds no arrays."""
        return self.config.module()

    def module_on(self, axis: str | None) -> nn.Module:
        """The module; within ``jax.shard_map`` along ``axis`` that of this device's share."""
        return self.module if axis is None else self.own_config.module()

    @property
    def whole(self) -> Model:
        """The model for functions of whole arrays."""
        return self if self.devices == 1 else replace(self, devices=1)

    def for_tokens(self, count: int) -> Model:
        """The model for a sequence that may be longer than its context, on whose length some ropes
        depend, as in transformers.
        """
        if count <= self.context:
            return self
        return replace(self, config=self.config.for_context(count), context=count)

    @cached_property
    def state(self) -> StateLayout:
        """The layout of the model's state."""
        return self.config.layout.on(self.devices)

    @cached_property
    def declared_specs(self) -> tuple[ParamSpec, ...]:
        """The specs of the parameters as the family declares them: of a model of floats."""
        return tuple(one.on(self.devices) for one in self.family.param_specs(self.config))

    @cached_property
    def param_specs(self) -> tuple[ParamSpec, ...]:
        """The specs of the parameters, which say how they are made from a checkpoint.

        Raises ``CheckpointError`` for forms that do not fit the matrices, or each other.
        """
        return keep_quantised(self.declared_specs, dict(self.forms), named(self.arrangement))

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays of the parameters by path, each with its dtype."""
        own = self.config.dtype
        leaves = (leaf for spec in self.param_specs for leaf in spec.leaves.items())
        return {path: replace(array, dtype=array.dtype or own) for path, array in leaves}

    @cached_property  # used for each executable
    def _abstract_params(self) -> Params:
        return nested(
            {path: jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in self.arrays.items()}
        )

    @cached_property
    def own_params(self) -> Params:
        """The abstract parameters of one device."""
        if self.devices == 1:
            return self._abstract_params

        def own(array: ArraySpec) -> jax.ShapeDtypeStruct:
            pairs = zip(array.shape, array.axes, strict=True)
            shape = (size // self.devices if is_divided(axis) else size for size, axis in pairs)
            return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

        return nested({path: own(array) for path, array in self.arrays.items()})

    @cached_property
    def own_config(self) -> DecoderSpec:
        """The decoder of one device; raises ``ConfigError`` if it cannot be divided."""
        return self.config if self.devices == 1 else self.config.share(self.devices)

    @cached_property  # used for each bucket
    def blocks(self) -> tuple[tuple[BlockSpec, Params], ...]:
        """Each kind of mixer and feed-forward network of one device once, with the abstract
        parameters of its layer.
        """
        kinds: dict[object, tuple[BlockSpec, Params]] = {}
        for i, layer in enumerate(self.own_config.layers):
            if layer.is_empty:
                continue
            own = self.own_params.get(f"layers_{i}", {})  # none, if all are borrowed
            if layer.weights_of is not None:
                own = {**self.own_params[f"layers_{layer.weights_of}"], **own}
            leaves, structure = jax.tree.flatten(own)
            for block in filter(None, (layer.start, layer.mixer, layer.ffn)):
                kinds.setdefault((block, structure, *leaves), (block, own))
        return tuple(kinds.values())


def abstract_params(model: Model) -> Params:
    """The abstract parameters, as the specs declare them.

    Deriving them from the Flax module would take 0.1 to 0.15 s for 36 layers.
    """
    return model._abstract_params


def layer_of(name: str) -> int | None:
    """The layer's number of a group of parameters, by its name.

    None for parameters outside the layers: embedding, final norm, head.
    """
    number = name.removeprefix("layers_")
    return int(number) if number != name else None


def head_params(params: Params) -> Params:
    """The parameters outside the layers; ``unembed`` needs no others."""
    return {name: group for name, group in params.items() if layer_of(name) is None}


def hidden_states(
    model: Model,
    params: Params,
    token_ids: jax.Array,  # int32[T]
    ctx: StepContext,
    state: State | None = None,
    only: jax.Array | None = None,  # int32[B]
) -> tuple[jax.Array, State | None]:  # [T, D], or with only [B, D]
    """Run the decoder; with a step's context and state this is the function that serves.

    ``only``: index of the last token of each row, if only their hidden states are needed. The last
    layer with a state of its own then computes only the state of the other tokens.
    """
    module = model.module_on(ctx.axis)
    if isinstance(ctx.points, Points):
        module = module.clone(with_points=ctx.points.layers, dense=ctx.rows is None)
    arguments = (token_ids, state, ctx, only)
    return module.apply({"params": params}, *arguments)  # type: ignore[return-value]


def first_layers(
    model: Model,
    params: Params,
    token_ids: jax.Array,  # int32[T]
    ctx: StepContext,
    state: State,
    count: int,
) -> tuple[jax.Array, State]:  # and [T, n * D]: the residual stream
    """Run the first ``count`` layers; ``other_layers`` continues from their result.

    ``params`` need no other layers, and the arrays of other layers in ``state`` may be None.
    """

    def run(module: Any) -> tuple[jax.Array, State]:
        stream, layers = module.embedded(token_ids, ctx), range(count)
        own = module.with_layer_inputs(token_ids, ctx)
        after, new = module.run_layers(stream, state, own, layers=layers)
        return after.total(), new

    return model.module_on(ctx.axis).apply({"params": params}, method=run)  # type: ignore[return-value]


def other_layers(
    model: Model,
    params: Params,
    x: jax.Array,  # [T, n * D]
    token_ids: jax.Array,  # int32[T]
    ctx: StepContext,
    state: State,
    first: int,
    only: jax.Array | None = None,  # int32[B]
) -> tuple[jax.Array, State]:  # as ``hidden_states``
    """Run the layers from ``first`` on, and the final norm."""

    def run(module: Any) -> tuple[jax.Array, State]:
        layers = range(first, len(model.config.layers))
        own = module.with_layer_inputs(token_ids, ctx)
        after, new = module.run_layers(Stream(x), state, own, layers=layers, only=only)
        return module.finished(after, ctx), new

    return model.module_on(ctx.axis).apply({"params": params}, method=run)  # type: ignore[return-value]


def unembed(
    model: Model,
    params: Params,
    hidden: jax.Array,  # [..., D]
    pins: Pins = ALL_XLA,
    axis: str | None = None,
    peers: Peers | None = None,
) -> jax.Array:  # float32[..., V]
    """Logits of hidden states; by default in plain XLA, as ``dense_context`` has it. ``axis`` and
    ``peers`` are as in ``StepContext``.
    """
    given = hidden, pins, axis, peers
    return model.module.apply({"params": params}, *given, method="unembed")  # type: ignore[return-value]


def normalised_stream(model: Model, params: Params, stream: jax.Array) -> jax.Array:
    """The final norm of residual streams [..., n * D], for ``unembed``: a logit lens."""

    def run(module: Any) -> jax.Array:
        flat = stream.reshape(-1, stream.shape[-1])
        return module.finished(Stream(flat), dense_context(len(flat)))  # type: ignore[no-any-return]

    hidden: Any = model.module.apply({"params": params}, method=run)
    return hidden.reshape(*stream.shape[:-1], -1)  # type: ignore[no-any-return]


def forward(
    model: Model,
    params: Params,
    token_ids: jax.Array,
    taps: Sequence[str] | str = (),
    edit: Mapping[str, Edit] = MappingProxyType({}),
) -> Any:  # float32[T, V], or with taps (float32[T, V], dict)
    """Logits of one whole sequence int32[T]. A pure function, for jit, vmap and grad.

    ``taps`` names activations to return as well, such as ``layers.3.resid_post``; ``nn.points``
    lists all of them with their shapes, and TransformerLens's names are known, too. ``"all"`` are
    all of them, and ``*`` stands for any characters, as in ``layers.*.resid_post``. ``edit`` has
    functions by name or pattern, which replace the activation there by what they return, of the
    same shape. Raises ``KeyError``, with the nearest names, for an unknown point.

    Under ``jax.jit``, ``model`` is static (``static_argnums=0``), and ``params`` should be an
    argument: weights that a function closes over are compiled into it as constants. A rope that
    depends on the context is that of the sequence if this is longer than the model's context
    length. Raises ``ArgumentError`` for tokens that are not such an array.
    """
    token_ids = checked_token_ids(token_ids, model.config)
    model = model.for_tokens(token_ids.shape[0])
    taps, edit = _expanded(model, params, token_ids, names_of(taps), edit)
    points = Points(taps, edit)
    hidden, _ = hidden_states(model, params, token_ids, dense_context(token_ids.shape[0], points))
    if missing := points.missing():
        given = next(name for name in (*taps, *edit) if canonical(name) == missing[0])
        raise KeyError(unknown(given, _points_of(model, params, token_ids)))
    logits = unembed(model, params, hidden)
    return (logits, points.found(taps)) if taps else logits


def _expanded(
    model: Model,
    params: Params,
    token_ids: jax.Array,
    taps: tuple[str, ...],
    edit: Mapping[str, Edit],
) -> tuple[tuple[str, ...], dict[str, Edit]]:
    """Taps and edits with the points that patterns stand for. The points of a model are known by a
    trace, so without patterns, names are checked after the pass.
    """
    if not any(map(is_pattern, (*taps, *edit))):
        return taps, dict(edit)
    known = _points_of(model, params, token_ids)

    def points(name: str) -> tuple[str, ...]:
        if not (found := expanded(name, known)):
            raise KeyError(unknown(name, known))
        return found

    chosen = dict.fromkeys(point for name in taps for point in points(name))
    return tuple(chosen), {p: edit[name] for name in edit for p in points(name)}


def _points_of(model: Model, params: Params, token_ids: jax.Array) -> list[str]:
    """The names of all points of ``forward``, found by tracing it."""
    layers = range(len(model.config.layers))
    names = ["embed", *(f"layers.{i}.{point}" for i in layers for point in IN_LAYER), "final_norm"]
    points = Points(names)
    context = dense_context(token_ids.shape[0], points)
    jax.eval_shape(lambda p, ids: hidden_states(model, p, ids, context)[0], params, token_ids)
    missing = {*points.missing()}
    return [name for name in names if name not in missing]


def next_token_losses(
    logits: jax.Array,  # float32[T, V], or [B, T, V]
    token_ids: jax.Array,  # int32[T], or [B, T]
    lengths: jax.Array | None = None,  # int32[B], of a batch
) -> tuple[jax.Array, jax.Array]:  # float32[T - 1] or [B, T - 1], and float32[]
    """The cross-entropy of each next token, in nats, 0 for padding, and its mean over others."""
    logits, following = logits[..., :-1, :], token_ids[..., 1:]
    chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    if lengths is None:
        return losses, losses.mean()
    is_next = jnp.arange(1, token_ids.shape[1]) < lengths[:, None]
    losses = jnp.where(is_next, losses, 0)
    return losses, losses.sum() / jnp.maximum(is_next.sum(), 1).astype(losses.dtype)


def forward_batch(
    model: Model,
    params: Params,
    token_ids: jax.Array,  # int32[B, T]
    lengths: jax.Array,  # int32[B]
    taps: Sequence[str] | str = (),
    edit: Mapping[str, Edit] = MappingProxyType({}),
) -> Any:  # float32[B, T, V], or with taps (float32[B, T, V], dict of [B, ...])
    """``forward`` of several sequences, each of its own length. Results for padding are 0.

    An edit receives the activation of one sequence.
    """
    found = jax.vmap(lambda one: forward(model, params, one, taps, edit))(token_ids)
    real = jnp.arange(token_ids.shape[1]) < lengths[:, None]  # bool[B, T]

    def masked(value: jax.Array, axis: int = 1) -> jax.Array:
        shape = [1] * value.ndim
        shape[0], shape[axis] = real.shape
        return jnp.where(real.reshape(shape), value, 0)

    if not taps:
        return masked(found)
    logits, values = found
    axes = {name: 2 if canonical(name).endswith(BY_HEAD) else 1 for name in values}
    return masked(logits), {name: masked(value, axes[name]) for name, value in values.items()}
