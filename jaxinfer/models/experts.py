"""Config keys and checkpoint tensors of mixtures of experts.

The differences between families are arguments: names of keys and of tensors, and the routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.linears import Linear, dense_linears, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, join, join_flat, plus_one, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import (
    DecoderSpec,
    ExpertsConfig,
    FeedForwardConfig,
    FeedForwardSpec,
)
from jaxinfer.nn.placement import Axes, Fused
from pallas_kernels.experts.stack import GATED, Activation
from pallas_kernels.route.routing import SCORES, Groups, Routing

_COUNT = "num_local_experts"
_CORRECT = "correct these numbers in config.json"
_TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


class ExpertTensors(NamedTuple):
    """The names of a layer's tensors, behind "model.layers.N."; {} is the number of an expert."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"
    choice_bias_dims: int = 1  # with 2 the tensor is [1, E]
    latents: tuple[str, str] = ("", "")  # the projection to a latent, and back
    norms: tuple[str, str] = ("", "")  # of the latent, and of each expert's output, less 1


_TENSORS = ExpertTensors()
MIXTRAL_TENSORS = ExpertTensors(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


class RoutingKeys(NamedTuple):
    """The keys that say how experts are chosen."""

    chosen: str = "num_experts_per_tok"
    groups: str = "n_group"
    renormalised: str = "norm_topk_prob"
    scores: str = "scoring_func"


_KEYS = RoutingKeys()


def experts_config(
    config: Mapping[str, Any],
    *,
    count: str,
    width: str,
    routing: Routing,
    keys: RoutingKeys = _KEYS,
    more_choices: int = 0,
    **more: Any,
) -> ExpertsConfig:
    """A mixture of experts whose number and width are the keys ``count`` and ``width``.

    Newer files may have the number under "num_local_experts", transformers' common name. ``keys``
    are those that ``routing`` was read from, ``more_choices`` is the number of a token's choices
    besides these experts, ``more`` are further fields. Raises ``ConfigError``
    if a token would use more experts than it may.
    """
    if "activation" not in more:
        more["activation"] = expert_activation(hf.activation(config, "hidden_act", "silu"))
    if config.get(count) is None and config.get(_COUNT) is not None:
        count = _COUNT
    number = hf.positive_int(config, count)
    most = number if routing.groups is None else _in_groups(number, routing.groups, keys)
    most += more_choices
    if routing.chosen > most:
        among = f"the {number} of {count!r}"
        if routing.groups is not None:
            among = f"{most} experts: 'topk_group' {routing.groups.chosen} of {among} in groups"
        raise ConfigError(
            f"config key {keys.chosen!r} is {routing.chosen}, and a token can choose among "
            f"{among}; {_CORRECT}"
        )
    return ExpertsConfig(
        count=number, width=hf.positive_int(config, width), routing=routing, **more
    )


def expert_activation(name: str) -> Activation:
    """The function of a gate and an up in experts, by the name of the gate's activation."""
    return Activation(kind=f"{GATED}relu2" if name == "relu2" else name)


def gated_network(
    config: Mapping[str, Any], width: int, *, bias: bool = False
) -> FeedForwardConfig:
    """A dense network with the activation of the experts."""
    activation = hf.activation(config, "hidden_act", "silu")
    return FeedForwardConfig(width=width, activation=activation, gated=True, bias=bias)


def _in_groups(number: int, groups: Groups, keys: RoutingKeys) -> int:
    """The experts among which a token can choose; raises ``ConfigError`` for impossible groups."""
    size = number // groups.count
    if number % groups.count or (groups.score == "best_two" and size < 2):
        raise ConfigError(
            f"config key {keys.groups!r} is {groups.count}, and {number} experts cannot be divided "
            f"into so many equal groups{' of two or more' * (groups.score == 'best_two')}; "
            f"{_CORRECT}"
        )
    if groups.chosen > groups.count:
        raise ConfigError(
            f"config key 'topk_group' is {groups.chosen}, and there are {groups.count} groups "
            f"({keys.groups!r}); {_CORRECT}"
        )
    return size * groups.chosen


def sparse_layers(config: Mapping[str, Any], experts: ExpertsConfig) -> list[FeedForwardSpec]:
    """The network of each layer: dense in ``mlp_only_layers``, and where a step skips layers."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    step = hf.positive_int(config, "decoder_sparse_step", 1)
    given, known = config.get("mlp_only_layers") or [], range(num_layers)
    listed = given if isinstance(given, list) else [None]
    if len(listed) > num_layers or not all(type(one) is int and one in known for one in listed):
        raise ConfigError(
            f"config key 'mlp_only_layers' must be a list of layers below {num_layers}, got "
            f"{short(given)}"
        )
    is_dense = [i in {*listed} or (i + 1) % step > 0 for i in range(num_layers)]
    if not any(is_dense):
        return [experts] * num_layers
    width = hf.positive_int(config, "intermediate_size")
    dense = gated_network(config, width)
    return [dense if one else experts for one in is_dense]


def networks_by_layer(
    config: Mapping[str, Any],
    experts: ExpertsConfig,
    *,
    first: int,
    key: str = "first_k_dense_replace",
    width: str = "intermediate_size",
    bias: bool = False,
) -> list[FeedForwardSpec]:
    """The network of each layer: ``mlp_layer_types`` decides, else the first layers are dense.

    ``key`` says how many do, ``first`` if it is absent; ``width`` is the key of their width, and
    ``bias`` says that they have biases.
    """
    num_layers = hf.positive_int(config, "num_hidden_layers")
    first = hf.layer_index(config, key, first)
    kinds = hf.layer_kinds(config, "mlp_layer_types", num_layers, ("dense", "sparse"))
    kinds = kinds or ["dense" if i < first else "sparse" for i in range(num_layers)]
    if "dense" not in kinds:
        return [experts] * num_layers
    dense = gated_network(config, hf.positive_int(config, width), bias=bias)
    return [dense if kind == "dense" else experts for kind in kinds]


def biased_experts(
    config: Mapping[str, Any],
    *,
    count: str = "n_routed_experts",
    shared: str | None = "n_shared_experts",
    renormalised: bool = True,
    scores: str = "sigmoid",
    choice_bias: bool = True,
    shared_bias: bool = False,
) -> ExpertsConfig:
    """Experts with DeepSeek-V3's keys, chosen by biased sigmoids, and those of all tokens.

    ``count`` and ``shared`` are the keys of their numbers, ``renormalised`` is the default of its
    key, ``scores`` that of the scoring function. With ``shared_bias`` those of all tokens have
    biases.
    """
    given = {"norm_topk_prob": hf.flag(config, "norm_topk_prob", renormalised)}
    number = 0 if shared is None else hf.layer_index(config, shared, 1)
    width = number * hf.positive_int(config, "moe_intermediate_size")
    return experts_config(
        config,
        count=count,
        width="moe_intermediate_size",
        routing=grouped_routing(hf.with_values(config, given), scores),
        choice_bias=choice_bias,
        shared=gated_network(config, width, bias=shared_bias) if width else None,
    )


def experts_per_token(config: Mapping[str, Any]) -> int:
    """The number of experts that a token chooses."""
    return hf.positive_int(config, _KEYS.chosen)


def grouped_routing(config: Mapping[str, Any], scores: str, keys: RoutingKeys = _KEYS) -> Routing:
    """The routing of DeepSeek's keys, or of others; ``scores`` is the family's default scoring
    function.

    Raises ``ConfigError`` for a scoring function or a method of choice that is unknown.
    """
    found = config.get(keys.scores) or scores
    if found not in SCORES:
        raise ConfigError(
            f"config key {keys.scores!r} is {found!r}; known scoring functions are "
            f"{', '.join(SCORES)}"
        )
    method = config.get("topk_method") or ("noaux_tc" if found == "sigmoid" else "greedy")
    if method not in _TOPK_METHODS:
        raise ConfigError(
            f"config key 'topk_method' is {method!r}; known methods are {', '.join(_TOPK_METHODS)}"
        )
    groups, count = None, hf.positive_int(config, keys.groups, 1)
    chosen = hf.positive_int(config, "topk_group", 1)
    if method != "greedy" and (count, chosen) != (1, 1):
        groups = Groups(count, chosen, "best_two" if method == "noaux_tc" else "best")
    return Routing(
        chosen=hf.positive_int(config, keys.chosen),
        scores=found,
        renormalised=hf.flag(config, keys.renormalised, found == "sigmoid"),
        scale=hf.positive_float(config, "routed_scaling_factor", 1.0),
        groups=groups,
    )


def expert_specs(
    path: str,
    source: str,
    ffn: ExpertsConfig,
    width: int,
    names: ExpertTensors = _TENSORS,
    routed: int | None = None,
) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts, each of which has three tensors of its own.

    ``path`` and ``source`` are the starts of the paths of parameters and of the names of tensors;
    ``width`` is that of the residual stream, ``routed`` that of the router's input, if it is
    another one.
    """
    yield from router_specs(path, source, ffn, routed or width, names)
    e, f, axes = ffn.count, ffn.width, expert_axes(ffn)

    def sources(name: str, expert: int, outputs: int, inputs: int) -> Source:
        return Source(f"{source}{name.format(expert)}.weight", (outputs, inputs))

    outer, halves = width, ffn.activation.halves
    if ffn.latent is not None:
        yield from _latent_specs(path, source, ffn.latent, outer, names)
        width = ffn.latent
    into = (names.gate, names.up)[-halves:]
    pairs = tuple(sources(name, i, f, width) for i in range(e) for name in into)
    array = ArraySpec((e, halves * f, width), axes.gate_up)
    yield ParamSpec(path + "gate_up", array, pairs, join, pieces=e, matrix="experts")
    downs = tuple(sources(names.down, i, width, f) for i in range(e))
    array = ArraySpec((e, width, f), axes.down)
    yield ParamSpec(path + "down", array, downs, join, pieces=e, matrix="experts")
    for kind, name in zip(("latent", "output"), names.norms, strict=True) if ffn.norms else ():
        own = (Source(f"{source}{name}.weight", (width,)),)
        yield ParamSpec(f"{path}{kind}_norm", ArraySpec((width,), (None,)), own, plus_one)
    if ffn.shared is not None:
        linears = dense_linears(ffn.shared, outer, names.shared)
        weights, biases = linear_specs(f"{path}shared/", source, linears)
        yield from (*weights, *biases)
    if ffn.shared_gate:
        gate = Source(f"{source}{names.shared_gate}.weight", (1, outer))
        array = ArraySpec((outer, 1), (None, None))
        yield ParamSpec(path + "shared_gate", array, (gate,), transposed)


def _latent_specs(
    path: str, source: str, latent: int, width: int, names: ExpertTensors
) -> list[ParamSpec]:
    """The projections around experts that read a latent; every device has them."""
    axes, (into, back) = (None, None), names.latents
    linears = (
        Linear("into_latent", (into,), (width, latent), axes, bias=False),
        Linear("from_latent", (back,), (latent, width), axes, bias=False),
    )
    return linear_specs(path, source, linears)[0]


class ExpertAxes(NamedTuple):
    """The logical axes of the arrays of a layer's experts."""

    gate_up: Axes
    down: Axes


def expert_axes(ffn: ExpertsConfig) -> ExpertAxes:
    """The axes of experts, of which a device has some or a part of every one."""
    if ffn.slices:
        columns = Fused("ffn", (ffn.width,) * ffn.activation.halves)
        return ExpertAxes((None, columns, None), (None, None, "ffn"))
    whole: Axes = ("experts", None, None)
    return ExpertAxes(whole, whole)


def router_specs(
    path: str, source: str, ffn: ExpertsConfig, width: int, names: ExpertTensors
) -> Iterator[ParamSpec]:
    """The parameters of a layer's router, which is small and never quantised."""
    count = ffn.count + ffn.zero_experts
    weight = Source(f"{source}{names.router}.weight", (count, width))
    yield ParamSpec(path + "router", ArraySpec(weight.shape, (None, None)), (weight,), as_is)
    if ffn.router_bias:
        bias = Source(f"{source}{names.router}.bias", (count,))
        yield ParamSpec(path + "router_bias", ArraySpec((count,), (None,)), (bias,), as_is)
    if ffn.choice_bias:
        shape = (1,) * (names.choice_bias_dims - 1) + (count,)
        bias = Source(f"{source}{names.choice_bias}", shape)
        array = ArraySpec((count,), (None,), jnp.dtype(jnp.float32))
        yield ParamSpec(path + "choice_bias", array, (bias,), join_flat)


def unused_parameters(config: DecoderSpec) -> int:
    """Parameters of experts that a token does not choose."""
    return sum(
        (ffn.count - ffn.routing.chosen) * (_weights(ffn, config) + _biases(ffn, config))
        for ffn in config.experts.values()
    )


def _weights(ffn: ExpertsConfig, config: DecoderSpec) -> int:
    """Weights of one expert."""
    return (1 + ffn.activation.halves) * (ffn.latent or config.hidden_size) * ffn.width


def _biases(ffn: ExpertsConfig, config: DecoderSpec) -> int:
    """Biases of one expert."""
    width = config.hidden_size if ffn.bias else 0
    return 2 * ffn.width + width if ffn.bias is True else width
