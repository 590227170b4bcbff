"""Checkpoint tensors of mixers with lightning attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, stack
from jaxinfer.models.sources import ArraySpec, PackedHeads, RotaryRows, Source
from jaxinfer.nn.mixers.lightning_spec import LightningConfig


class LightningTensors(NamedTuple):
    """The names of a layer's tensors, behind "model.layers.N."; MiniMax's by default.

    With ``packed`` the rows of ``qkv`` are those of a head's query, key and value, then of the
    next head.
    """

    qkv: str = "self_attn.qkv_proj"
    gate: str = "self_attn.output_gate"
    o: str = "self_attn.out_proj"
    norm: str = "self_attn.norm"
    qk_norms: tuple[str, str] = ("", "")
    packed: bool = True


MINIMAX = LightningTensors()


def lightning_specs(
    path: str,
    source: str,
    c: LightningConfig,
    width: int,
    norm_dtype: jnp.dtype | None,
    names: LightningTensors = MINIMAX,
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.lightning``."""
    inner, order = c.inner, None
    if names.packed:
        assert c.rope is None, "of packed heads no part rotates"
        order = PackedHeads(c.num_heads, (c.head_dim,) * 3)
    elif c.rope is not None:
        order = RotaryRows(2 * c.num_heads, c.head_dim, c.rope.width)  # of queries and of keys
    linears = (
        Linear(
            "qkvz",
            (names.qkv, names.gate),
            (width, 4 * inner),
            (None, c.projected),
            bias=False,
            rows=(order, None),
            widths=(3 * inner, inner),
        ),
        Linear("o", (names.o,), (inner, width), ("heads", None), bias=False),
    )
    yield from linear_specs(path, source, linears)[0]
    norm = (Source(f"{source}{names.norm}.weight", (inner,)),)
    array = ArraySpec((inner,), ("heads",), norm_dtype)
    yield ParamSpec(f"{path}inner_norm", array, norm, as_is)
    if c.qk_norm:
        rows = None if c.rope is None else RotaryRows(1, c.head_dim, c.rope.width)
        norms = tuple(
            Source(f"{source}{name}.weight", (c.head_dim,), rows=rows) for name in names.qk_norms
        )
        array = ArraySpec((2, c.head_dim), (None, None), norm_dtype)
        yield ParamSpec(f"{path}qk_norms", array, norms, stack)
