"""A decoder as data: its layers, each with a mixer and a feed-forward network.

The differences between families are fields: norms, scales, rope. The specs do not import Flax,
which takes half as long as JAX to import and which an engine with compiled steps does not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import jax.numpy as jnp

from jaxinfer.nn.block import BlockSpec, MixerSpec, QueryGrowth, StepShape, kv_part, paged_as, part
from jaxinfer.nn.layer_spec import (
    BlockFactors,
    ExpertNorms,
    GateAct,
    LayerEndConfig,
    LayerInputsConfig,
    NormKind,
    NormPlaces,
    NormSpec,
    QKNormKind,
    SharedBlocksConfig,
    TokenIdsConfig,
)
from jaxinfer.nn.ngram_spec import NGramConfig, NGramMeanConfig
from jaxinfer.nn.positions import Alibi, Sinusoids
from jaxinfer.nn.residual_spec import PlainResidual, ResidualSpec
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import LayerState, PagedKind, StateLayout, keys_and_values, state_layout
from pallas_kernels.experts.stack import SWIGLU, Activation
from pallas_kernels.lib.numerics import Values
from pallas_kernels.route.routing import Routing

if TYPE_CHECKING:
    import flax.linen as nn

    from jaxinfer.nn.state import Chunk


class FeedForwardSpec(BlockSpec, Protocol):
    """The feed-forward network of a layer; its module is called like ``FeedForward``."""

    is_invariant: ClassVar[bool] = True

    @property
    def experts(self) -> ExpertsConfig | None:
        """The experts that the layer's gate_up and down are of. The default is None."""
        return None

    def with_experts(self, **fields: Any) -> Self:
        """The network with these fields of its experts; without experts the same."""
        del fields
        return self


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(BlockSpec):
    """Grouped-query attention.

    ``window`` is the attention window in tokens (None: no window); with ``chunk`` tokens attend
    within chunks of the context. ``scale`` multiplies scores, ``alibi`` is a bias of them.
    ``values`` says how values are made. ``qk_norm`` is an RMS norm of queries and of keys: before
    rope that of each head ("plain": without weights), or of all heads together, or that of each
    "rotated" head ("rotated_plain"); or before rope a LayerNorm of each head, with one weight and
    bias for all ("layer"), a weight of each ("layers"), or both of each ("layers_bias"), and the
    epsilon ``qk_norm_eps`` (None: that of the layer's norms). With ``sinks`` each head has a logit
    next to its scores in the softmax. With ``gate`` the output of each head is multiplied by
    ``gate_act`` of a projection of the token (``gate_bias``: a part of ``qkv_bias`` is that of the
    gates), with ``head_gate`` by one number. Queries, keys and values are limited to ``clip`` and
    its negative, and queries grow with the position. Scores x become c tanh(x / c) with a ``cap``
    c. ``out_norm`` is the epsilon of an RMS norm of all heads' outputs, ``head_norm`` of one of
    each head's, without weights and before gates. Values of ``own_value_dim`` components (None: as
    keys) have zeros behind them in pages (of ``page_dtype``) and are multiplied by ``value_scale``.
    """

    is_invariant: ClassVar[bool] = True
    is_invariant_on_gpu: ClassVar[bool] = True
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    chunk: Chunk | None = None
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNormKind | None = None
    qk_norm_eps: float | None = None
    sinks: bool = False
    gate: bool = False
    gate_bias: bool = True
    head_gate: bool = False
    gate_act: GateAct = "sigmoid"
    values: Values = "projected"
    clip: float | None = None
    cap: float | None = None
    growth: QueryGrowth | None = None
    alibi: Alibi | None = None
    out_norm: float | None = None
    head_norm: float | None = None
    page_dtype: jnp.dtype | None = None
    own_value_dim: int | None = None
    value_scale: float = 1.0

    @property
    def value_dim(self) -> int:
        """The width of values, and of a head's output."""
        return self.own_value_dim or self.head_dim

    def for_context(self, length: int) -> AttentionConfig:
        """See ``MixerSpec``. A context of no more chunks than a token sees needs none."""
        chunk = self.chunk and self.chunk.for_context(length)
        return replace(self, rope=self.rope and self.rope.for_context(length), chunk=chunk)

    def share(self, devices: int) -> AttentionConfig:
        """See ``MixerSpec``."""
        heads = part(self.num_heads, devices, "query heads")
        return replace(self, num_heads=heads, num_kv_heads=kv_part(self.num_kv_heads, devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """See ``MixerSpec``."""
        pages = self.page_dtype or dtype
        return keys_and_values(self.num_kv_heads, self.head_dim, pages, self.window, self.chunk)

    def with_pages(self, dtype: jnp.dtype) -> AttentionConfig:
        """See ``MixerSpec``."""
        return replace(self, page_dtype=dtype)

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``MixerSpec``."""
        return {"z": (self.num_heads, self.value_dim)}

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``MixerSpec``."""
        del params
        return import_module("jaxinfer.nn.mixers.bounds").attention_bytes(self, step)

    def words(self) -> str:
        """See ``MixerSpec``."""
        return f"{self.num_heads} query heads and {self.num_kv_heads} kv heads of {self.head_dim}"

    def module(self) -> nn.Module:
        """See ``MixerSpec``."""
        return import_module("jaxinfer.nn.mixers.attention").Attention(self)


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(FeedForwardSpec):
    """A dense feed-forward network; ``activation`` is a name in ``ACTIVATIONS``, or "xielu", which
    has parameters. A gate is multiplied by ``gate_scale`` before it, and the output by
    ``out_scale``. ``norm`` is the epsilon of an RMS norm of what the last matrix multiplies. With
    ``gate_cutoff`` a gate is what exceeds its mean by so many deviations, or 0. With a ``limit``
    activated gates go up to it, and ups are within it. ``swiglu`` is a function of gates and ups in
    place of all that, as experts have it. ``bias`` says that both matrices have biases, or the last
    one ("down").
    """

    is_invariant_on_gpu: ClassVar[bool] = True
    width: int
    activation: str
    gated: bool
    bias: bool | Literal["down"] = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    norm: float | None = None
    gate_cutoff: float | None = None
    limit: float | None = None
    swiglu: Activation | None = None

    def share(self, devices: int) -> FeedForwardConfig:
        """See ``MixerSpec``."""
        return replace(self, width=part(self.width, devices, "columns of a feed-forward network"))

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """See ``FeedForwardSpec``."""
        return {"mlp_post": (self.width,)}

    def words(self) -> str:
        """See ``FeedForwardSpec``."""
        return f"feed-forward {self.width}"

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.dense").FeedForward(self)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(FeedForwardSpec):
    """A mixture of experts: ``count`` gated networks of width ``width``, and a router.

    ``bias`` says that experts have biases (or their "sum" has one), ``router_bias`` that logits do,
    ``choice_bias`` that the scores by which experts are chosen have them, ``by_id`` that a table
    of token ids has a token's experts (the decoder then has a ``TokenIdsConfig``), ``expert_scale``
    that weights are multiplied by a parameter of each expert. ``shared`` is a network that every
    token uses as well; with ``shared_gate`` its output is weighted by the sigmoid of a logit, and
    it is multiplied by ``shared_scale``. With ``weighs_inputs`` a token is multiplied by its weight
    before the expert instead of after it (Llama 4). Choices from ``count`` on are of
    ``zero_experts``, which return the token itself, without ``zero_keeps`` zeros. With ``latent``
    experts read a projection of the token to that width, and their sum is projected back; ``norms``
    are of that latent and of each expert's output.
    ``dummy_routing`` replaces the router's choices: see ``EngineConfig``. ``slices``: several
    devices have a part of the columns of every expert, not whole experts.
    """

    is_invariant_on_gpu: ClassVar[bool] = True
    count: int
    width: int
    routing: Routing
    activation: Activation = SWIGLU
    bias: bool | Literal["sum"] = False
    router_bias: bool = False
    choice_bias: bool = False
    by_id: bool = False
    expert_scale: bool = False
    shared: FeedForwardConfig | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    weighs_inputs: bool = False
    latent: int | None = None
    norms: ExpertNorms | None = None
    zero_experts: int = 0
    zero_keeps: bool = True
    dummy_routing: str = "auto"
    slices: bool = False

    def share(self, devices: int) -> ExpertsConfig:
        """See ``MixerSpec``. A device knows the number of all experts."""
        shared = self.shared and self.shared.share(devices)
        if self.slices:
            width = part(self.width, devices, "columns of an expert")
            return replace(self, width=width, shared=shared)
        part(self.count, devices, "experts")
        return replace(self, shared=shared)

    @property
    def experts(self) -> ExpertsConfig:
        """See ``FeedForwardSpec``."""
        return self

    def with_experts(self, **fields: Any) -> ExpertsConfig:
        """See ``FeedForwardSpec``."""
        return replace(self, **fields)

    def words(self) -> str:
        """See ``FeedForwardSpec``."""
        return f"{self.routing.chosen} of {self.count} experts of {self.width}"

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.bounds").experts_bytes(self, params, step)

    def module(self) -> nn.Module:
        """See ``FeedForwardSpec``."""
        return import_module("jaxinfer.nn.ffn.experts").Experts(self)


@dataclass(frozen=True)
class LayerSpec:
    """One layer, with norms before or after its blocks (mixer, feed-forward network), or both, or
    before both and after the network ("ffn_both"), or before the network alone ("ffn").
    A norm after a block is of its output, before that is added to the residual stream. A layer may
    lack a block (``nn.absent``); it has one norm then, "shared". ``start`` precedes the mixer,
    ``end`` follows the network. Blocks of a ``parallel`` layer read the same stream, and
    their outputs are added to it together; they may share the norm before them. With ``on_norms``,
    of both blocks, that norm replaces the stream, to which outputs are added (MiniMax-01). With
    ``weights_of`` a layer has the parameters of that earlier layer, next to its own.
    """

    mixer: MixerSpec
    ffn: FeedForwardSpec
    norms: NormPlaces = "before"
    start: NGramConfig | NGramMeanConfig | None = None
    end: LayerEndConfig | None = None
    parallel: bool = False
    on_norms: tuple[BlockFactors, BlockFactors] | None = None
    weights_of: int | None = None

    @property
    def is_empty(self) -> bool:
        """True if the layer lacks both blocks, and so all norms."""
        return self.mixer.is_absent and self.ffn.is_absent

    def share(self, devices: int) -> LayerSpec:
        """One device's part of the layer: see ``MixerSpec``."""
        return replace(self, mixer=self.mixer.share(devices), ffn=self.ffn.share(devices))

    def state(self, dtype: jnp.dtype) -> LayerState:
        """The layer state: that of the mixer, and of the start if there is one."""
        own = self.mixer.state(dtype)
        more = self.start.state(dtype).per_slot if self.start else ()
        return replace(own, per_slot=own.per_slot + more)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder; ``lengths`` are an engine's default context length and the longest one.

    ``embed_scale`` multiplies embeddings, ``num_positions`` is the length of the table of learned
    positions, from row ``first_position`` on; ``sinusoids`` are a table without parameters. With
    ``embed_norm`` embeddings have a norm ("plain": without weights), with ``embed_width`` that many
    elements, then projected. ``dtype`` is that of weights and activations, ``norm_dtype`` that of
    norms (None: ``dtype``). Norms after blocks and the last may have other epsilons. With
    ``head_activation`` a matrix, this activation and a norm precede the head. Logits x, times a
    parameter and ``head_scale``, plus a bias (``head_bias``), times ``logit_scale``, become c
    tanh(x / c) with ``logit_cap`` c. Those of ``never``, ranges of tokens, are the least.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    lengths: tuple[int, int]
    norm: NormKind
    norm_eps: float
    tie_word_embeddings: bool
    dtype: jnp.dtype
    norm_dtype: jnp.dtype | None = None
    norm_groups: int = 1
    post_norm_eps: float | None = None
    final_norm_eps: float | None = None
    embed_scale: float | None = None
    num_positions: int | None = None
    first_position: int = 0
    sinusoids: Sinusoids | None = None
    embed_norm: bool | Literal["plain"] = False
    embed_width: int | None = None
    residual: ResidualSpec = PlainResidual()
    layer_inputs: LayerInputsConfig | SharedBlocksConfig | TokenIdsConfig | None = None
    logit_cap: float | None = None
    logit_scale: float | None = None
    head_bias: bool = False
    head_scale: float | None = None
    never: tuple[tuple[int, int], ...] = ()
    head_activation: str | None = None
    learned_rope: bool = False  # see ``rope_tables``
    own_layout: StateLayout | None = field(default=None, compare=False, repr=False)  # of a share

    def for_context(self, length: int) -> DecoderSpec:
        """The decoder for an engine with context length ``length``, on which some ropes depend."""
        layers = (replace(layer, mixer=layer.mixer.for_context(length)) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def with_pages(self, dtype: jnp.dtype) -> DecoderSpec | None:
        """The decoder with pages of ``dtype``; None if those of some layer have no such form."""
        mixers = [paged_as(layer.mixer, self.dtype, dtype) for layer in self.layers]
        pairs = zip(self.layers, mixers, strict=True)
        layers = tuple(replace(layer, mixer=own) for layer, own in pairs if own is not None)
        return replace(self, layers=layers) if len(layers) == len(mixers) else None

    def share(self, devices: int) -> DecoderSpec:
        """One device's part: see ``MixerSpec``. Embedding and head are as large as their arrays."""
        layers = tuple(layer.share(devices) for layer in self.layers)
        return replace(self, layers=layers, own_layout=self.layout)

    @property
    def norms(self) -> NormSpec:
        """The norms of the residual stream."""
        eps, dtype = (self.norm_eps, self.post_norm_eps), self.norm_dtype or self.dtype
        return NormSpec(self.norm, eps[0], dtype, eps[1], self.norm_groups)

    @property
    def stream_width(self) -> int:
        """Elements of a token in the residual stream."""
        return self.residual.num_streams * self.hidden_size

    @cached_property
    def experts(self) -> Mapping[int, ExpertsConfig]:
        """The mixtures of experts by the numbers of their layers."""
        found = ((i, layer.ffn.experts) for i, layer in enumerate(self.layers))
        return {i: experts for i, experts in found if experts is not None}

    @cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rope configs of the layers."""
        found = (layer.mixer.rope for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @cached_property
    def layout(self) -> StateLayout:
        """The layout of the layers' state, that of all devices."""
        if self.own_layout is not None:
            return self.own_layout
        states = [layer.state(self.dtype) for layer in self.layers]
        if not any(state.paged for state in states):  # by pages of no bytes prefixes are found
            first = next((i for i, state in enumerate(states) if state.per_slot), None)
            if first is not None:
                states[first] = replace(states[first], paged=(PagedKind(()),))
        return state_layout(states)

    def module(self) -> nn.Module:
        """The module, which is cheap and holds no arrays."""
        return import_module("jaxinfer.nn.decoder").Decoder(self)
