"""Linear layers of checkpoints as parameters, as most families have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, as_is, conv_taps, join, join_outputs
from jaxinfer.models.sources import ArraySpec, RowOrder, Shape, Source
from jaxinfer.nn.decoder_config import FeedForwardConfig
from jaxinfer.nn.placement import Axes, Fused


class Linear(NamedTuple):
    """A linear layer: the name of its parameter, and of the tensors that are joined to make it.

    A single tensor has all outputs; several have ``widths`` of them, by default those of a fused
    axis. ``rows`` are the row orders of the tensors; empty if all are in order. Without
    ``first_bias`` the first tensor has no bias where the others do.
    """

    name: str
    tensors: tuple[str, ...]
    shape: Shape
    axes: Axes
    bias: bool
    rows: tuple[RowOrder | None, ...] = ()
    widths: tuple[int, ...] = ()
    first_bias: bool = True


def dense_linears(
    ffn: FeedForwardConfig, width: int, source: str = "mlp.", names: TensorNames | None = None
) -> tuple[Linear, ...]:
    """The linear layers of a network, by default with Llama's tensors after ``source``."""
    f, both = ffn.width, ffn.bias is True
    into, down = (f"{source}gate_proj", f"{source}up_proj"), f"{source}down_proj"
    into = into if ffn.gated else into[1:]
    if names is not None:
        into, down = names.into, names.down
    first = Linear("up", into, (width, f), (None, "ffn"), both)
    if ffn.gated:
        axes = (None, Fused("ffn", (f, f)))
        first = Linear("gate_up", into, (width, 2 * f), axes, both)
    return first, Linear("down", (down,), (f, width), ("ffn", None), bool(ffn.bias))


def linear_specs(
    path: str, source: str, linears: Iterable[Linear]
) -> tuple[list[ParamSpec], list[ParamSpec]]:
    """The weights of linear layers, and their biases."""
    weights: list[ParamSpec] = []
    biases: list[ParamSpec] = []
    for linear in linears:
        (inputs, outputs), axes = linear.shape, linear.axes
        array, stored = ArraySpec(linear.shape, axes), _sources(linear, source, "weight", inputs)
        weights.append(ParamSpec(path + linear.name, array, stored, join_outputs, matrix="out_in"))
        if linear.bias:
            axis, stored = axes[1], _sources(linear, source, "bias")
            if not linear.first_bias:
                assert isinstance(axis, Fused), "it has several tensors"
                stored, outputs = stored[1:], outputs - axis.widths[0]
                axis = Fused(axis.name, axis.widths[1:], axis.units[1:])
            array = ArraySpec((outputs,), (axis,))
            biases.append(ParamSpec(f"{path}{linear.name}_bias", array, stored, join))
    return weights, biases


def conv_specs(
    path: str, tensor: str, shape: Shape, axis: str | Fused, *, bias: bool
) -> Iterator[ParamSpec]:
    """The taps [W, C] of a causal convolution of each channel, and its bias if it has one.

    The channels lie on ``axis``.
    """
    width, channels = shape
    taps = (Source(f"{tensor}.weight", (channels, 1, width)),)
    yield ParamSpec(f"{path}conv", ArraySpec(shape, (None, axis)), taps, conv_taps)
    if bias:
        own = (Source(f"{tensor}.bias", (channels,)),)
        yield ParamSpec(f"{path}conv_bias", ArraySpec((channels,), (axis,)), own, as_is)


def _sources(linear: Linear, source: str, kind: str, *inputs: int) -> tuple[Source, ...]:
    """The weights or the biases of a linear layer."""
    axis, widths = linear.axes[1], linear.widths or linear.shape[1:]
    if not linear.widths and isinstance(axis, Fused) and len(linear.tensors) > 1:
        widths = axis.widths
    orders = linear.rows or (None,) * len(linear.tensors)
    return tuple(
        Source(f"{source}{tensor}.{kind}", (out, *inputs), rows=rows)
        for tensor, out, rows in zip(linear.tensors, widths, orders, strict=True)
    )
