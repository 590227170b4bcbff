"""The shortest possible time of a step, from its bytes and operations and a device's ceilings.

Owns: the costs of a model's decode steps and prefills, and the measured ceilings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.base import Model, Params, abstract_params


@dataclass(frozen=True)
class Ceiling:
    """The measured maximum rates of a device."""

    bytes_per_s: float  # of device memory
    flops_per_s: float  # of a bfloat16 matmul


# Measured, not from the data sheet: a device-to-device copy, read and written bytes together, and a
# large bfloat16 matmul.
CEILINGS: Mapping[str, Ceiling] = MappingProxyType(
    {
        "NVIDIA H100 80GB HBM3": Ceiling(3.0e12, 800e12),
        "NVIDIA H200": Ceiling(4.3e12, 790e12),
    }
)


@dataclass(frozen=True)
class Costs:
    """Bytes and operations of one model."""

    weight_bytes: int  # that every step reads, without those of experts
    kv_bytes: int  # of one token of context, without layers whose attention has a window
    token_flops: float  # in the layers' matrices, for one token; two of fp8 count as one
    head_flops: int  # for one token whose logits are computed
    pair_flops: int  # in attention, for one query and one key, over all layers without a window
    expert_bytes: int = 0  # of all experts of all layers
    expert_share: float = 0.0  # of a layer's experts that a token uses
    state_bytes: int = 0  # of a sequence's state, which a step reads and writes

    def bytes_of_weights(self, tokens: float, distinct: float | None = None) -> float:
        """Bytes of the weights that a step with so many tokens reads.

        ``distinct`` is the measured share of experts that its tokens chose. Without it, tokens are
        taken to choose independently and all experts equally often, as with ``dummy_routing``
        "uniform"; then a layer reads 1 - (1 - share) ** tokens of its experts.
        """
        expected = 1 - (1 - self.expert_share) ** tokens
        share = expected if distinct is None else distinct
        return self.weight_bytes + share * self.expert_bytes


def costs_of(model: Model) -> Costs:
    """From the model's own parameters, without tables of which a step gathers only a few rows."""
    config = model.config
    # attention, also latent, and beside another mixer
    mixers: list[Any] = [getattr(layer.mixer, "attention", layer.mixer) for layer in config.layers]
    whole_context = [mixer for mixer in mixers if getattr(mixer, "window", None) is None]
    mixtures = list(config.experts.values())
    share = mixtures[0].routing.chosen / mixtures[0].count if mixtures else 0.0
    floats = dict(named_arrays(abstract_params(replace(model, forms=(), arrangement=None))))
    tables = {"positions"} if config.tie_word_embeddings else {"positions", "embed"}
    weight_bytes = expert_bytes = 0
    fp8 = set[str]()
    for name, leaf in named_arrays(abstract_params(model)):
        parts = name.split("/")  # perhaps of a quantised matrix, which is one array in `floats`
        whole = next(p for i in range(len(parts)) if (p := "/".join(parts[: i + 1])) in floats)
        if leaf.dtype == jnp.float8_e4m3fn:
            fp8.add(whole)
        if floats[whole].ndim == 3:  # a stack of experts
            expert_bytes += leaf.size * leaf.dtype.itemsize
        elif whole not in tables:
            weight_bytes += leaf.size * leaf.dtype.itemsize
    matrices = 0.0
    for name, leaf in floats.items():
        if "/" in name and leaf.ndim >= 2 and "norm" not in name and "bias" not in name:
            used = share if leaf.ndim == 3 else 1
            matrices += leaf.size * used * (0.5 if name in fp8 else 1)
    return Costs(
        weight_bytes=weight_bytes,
        kv_bytes=model.state.bytes_per_token,
        token_flops=2 * matrices,
        head_flops=2 * config.hidden_size * config.vocab_size,
        pair_flops=sum(map(_pair_flops, whole_context)),
        expert_bytes=expert_bytes,
        expert_share=share,
        state_bytes=model.state.bytes_per_slot,
    )


def named_arrays(params: Params) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree and their paths, such as layers_0/qkv."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _pair_flops(mixer: Any) -> int:
    """Operations of one query and one key; of latent attention in its expanded form.

    A recurrent mixer has no pairs; the operations of its state are few beside its matrices.
    """
    if not hasattr(mixer, "head_dim") or not mixer.state(jnp.dtype(jnp.float32)).paged:
        return 0
    value_dim = getattr(mixer, "value_dim", mixer.head_dim)
    return 2 * mixer.num_heads * (mixer.head_dim + value_dim)


@dataclass(frozen=True)
class Floor:
    """The shortest times of one model on one device, in seconds."""

    costs: Costs
    ceiling: Ceiling

    def decode(self, batch: int, context: float, distinct: float | None = None) -> float:
        """A step that gives each of ``batch`` sequences a token, over ``context`` tokens each.

        ``distinct``: see ``Costs.bytes_of_weights``.
        """
        costs = self.costs
        token = costs.token_flops + costs.head_flops + context * costs.pair_flops
        return self._seconds(decode_bytes(costs, batch, context, distinct), batch * token)

    def prefill(self, num_prompts: int, tokens: int, distinct: float | None = None) -> float:
        """The first token of each of ``num_prompts`` prompts of ``tokens`` tokens."""
        costs = self.costs
        pairs = tokens * (tokens + 1) / 2
        one = tokens * costs.token_flops + pairs * costs.pair_flops + costs.head_flops
        size = costs.bytes_of_weights(num_prompts * tokens, distinct)
        return self._seconds(size, num_prompts * one)

    def generate(
        self, num_prompts: int, num_input: int, num_output: int, distinct: float | None = None
    ) -> float:
        """All prompts prefilled at once, then all of them decoded together."""
        context = num_input + num_output / 2  # the mean over the decode steps
        steps = num_output - 1  # the first token comes from the prefill
        decode = self.decode(num_prompts, context, distinct)
        return self.prefill(num_prompts, num_input, distinct) + steps * decode

    def _seconds(self, size: float, flops: float) -> float:
        return max(size / self.ceiling.bytes_per_s, flops / self.ceiling.flops_per_s)


def decode_bytes(costs: Costs, batch: int, context: float, distinct: float | None = None) -> float:
    """Bytes that a decode step moves; ``distinct``: see ``Costs.bytes_of_weights``."""
    of_rows = batch * (context * costs.kv_bytes + 2 * costs.state_bytes)
    return costs.bytes_of_weights(batch, distinct) + of_rows
