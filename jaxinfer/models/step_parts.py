"""Config keys and checkpoint tensors that Step 3 and 3.5 have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models.experts import ExpertTensors, expert_axes, router_specs
from jaxinfer.models.linears import dense_linears, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, join
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import ExpertsConfig

TENSORS = ExpertTensors(router="moe.gate", choice_bias="moe.router_bias", shared="share_expert.")


def sparse_layers(given: Any, num_layers: int, first: int) -> set[int]:
    """The layers with experts: a list, or numbers between commas; those from ``first`` on if it is
    None.
    """
    if given is None:
        return set(range(first, num_layers))
    items = given.split(",") if isinstance(given, str) else given
    known = isinstance(items, list) and all(str(one).strip().isdecimal() for one in items)
    if not known:
        raise ConfigError(
            f"config key 'moe_layers_enum' must hold numbers of layers, got {short(given)}"
        )
    return {int(one) for one in items}


def stacked_expert_specs(
    path: str, source: str, ffn: ExpertsConfig, width: int
) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts: a tensor each for all gates, ups and downs."""
    yield from router_specs(path, source, ffn, width, TENSORS)
    e, f, axes = ffn.count, ffn.width, expert_axes(ffn)
    pairs = tuple(
        Source(f"{source}moe.{name}_proj.weight", (e, f, width), part=i)
        for i in range(e)
        for name in ("gate", "up")
    )
    array = ArraySpec((e, 2 * f, width), axes.gate_up)
    yield ParamSpec(path + "gate_up", array, pairs, join, pieces=e, matrix="experts")
    downs = tuple(Source(f"{source}moe.down_proj.weight", (e, width, f), part=i) for i in range(e))
    array = ArraySpec((e, width, f), axes.down)
    yield ParamSpec(path + "down", array, downs, as_is, pieces=e, matrix="experts")
    assert ffn.shared is not None
    linears = dense_linears(ffn.shared, width, TENSORS.shared)
    yield from linear_specs(f"{path}shared/", source, linears)[0]
