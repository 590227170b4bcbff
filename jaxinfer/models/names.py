"""The names of a decoder's checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from jaxinfer.models.params import as_is, stack
from jaxinfer.nn.decoder_config import LayerSpec


class TensorNames(NamedTuple):
    """The names of tensors without ".weight" and ".bias"; Llama's by default.

    ``layer`` is the start of a layer's names, {} is its number; ``qkv`` to ``qk_norms`` come behind
    it. One name in ``qkv`` is of a tensor with queries, keys and values, and one in ``into`` of a
    tensor with gate and up, or of a network without a gate. With ``packed`` the rows of the one
    tensor in ``qkv`` are those of a KV head's queries, its key and its value, then of the next;
    with ``groups`` of a group of heads their queries, values and keys, then of the next group.
    ``gate`` is the tensor of the gates of heads, None where they are among the queries' rows. With
    ``in_order`` component i of a head of which a part rotates does so with i + H/2.
    """

    embed: str = "model.embed_tokens"
    positions: str = ""
    layer: str = "model.layers.{}."
    final_norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    into: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    stacked_norms: bool = False
    in_order: bool = False
    packed: bool = False
    gate: str | None = None
    groups: int = 0
    o_norm: str = ""
    down_norm: str = ""
    embed_norm: str = ""
    project: tuple[str, str] = ("", "")  # of embeddings of another width, and back
    sinks: str = "self_attn.sinks"


LLAMA = TensorNames()
PLAIN = TensorNames(into=("mlp.up_proj",))  # without a gate


class NormSources(NamedTuple):
    """The names of a layer's norms in order, and the functions that build one and several.

    ``after`` are the names in layers whose norms are after their blocks, if those of others are
    before them.
    """

    names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    one: Callable[..., np.ndarray] = as_is
    several: Callable[..., np.ndarray] = stack
    after: tuple[str, ...] = ()

    def of_layer(self, layer: LayerSpec) -> tuple[str, ...]:
        """The names of a layer's norms; of two, that of a block which it lacks is not there."""
        names = self.after if self.after and layer.norms == "after" else self.names
        blocks = (layer.mixer, layer.ffn) if len(names) == 2 else ()
        return tuple(n for n, own in zip_longest(names, blocks) if not (own and own.is_absent))
