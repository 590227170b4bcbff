"""The least bytes and operations of a model's steps, from its own parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.core.profile import EXPERTS, GATE_UP, HEAD, OTHERS, OpCosts, Part
from jaxinfer.models.base import Model, Params, abstract_params, layer_of
from jaxinfer.nn.ngram_spec import TABLE


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
    in_part = [any(getattr(one, name, None) for name in ("window", "chunk")) for one in mixers]
    whole_context = [mixer for mixer, part in zip(mixers, in_part, strict=True) if not part]
    mixtures = list(config.experts.values())
    share = mixtures[0].routing.chosen / mixtures[0].count if mixtures else 0.0
    floats = dict(_named(abstract_params(replace(model, forms=(), arrangement=None))))
    tables = {"positions"} if config.tie_word_embeddings else {"positions", "embed"}
    weight_bytes = expert_bytes = 0
    fp8 = set[str]()
    for name, leaf in _named(abstract_params(model)):
        parts = name.split("/")  # perhaps of a quantised matrix, which is one array in `floats`
        whole = next(p for i in range(len(parts)) if (p := "/".join(parts[: i + 1])) in floats)
        if leaf.dtype == jnp.float8_e4m3fn:
            fp8.add(whole)
        if floats[whole].ndim == 3:  # a stack of experts
            expert_bytes += leaf.size * leaf.dtype.itemsize
        elif whole not in tables and not whole.endswith(TABLE):
            weight_bytes += leaf.size * leaf.dtype.itemsize * _uses(model, name)
    matrices = 0.0
    for name, leaf in floats.items():
        if _part_of(name, leaf.ndim, tied=False) not in (None, HEAD):
            used = share if leaf.ndim == 3 else 1
            matrices += leaf.size * used * _uses(model, name) * (0.5 if name in fp8 else 1)
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


def _uses(model: Model, name: str) -> int:
    """How often a step reads a parameter: one of a shared block for each layer that uses it, one of
    a layer also for those that borrow its weights.
    """
    own = model.config.layers
    if (layer := layer_of(name.split("/")[0])) is not None:
        return 1 + sum(one.weights_of == layer for one in own)
    start, _, block = name.partition("/block_")
    if start != "layer_inputs" or not block:
        return 1
    number = int(block.split("/")[0])
    return sum(getattr(layer.mixer, "block", None) == number for layer in own)


def _named(params: Params) -> Iterator[tuple[str, Any]]:
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


def op_costs_of(model: Model) -> OpCosts:
    """The costs of a model's ops, with the same sums as ``costs_of``."""
    whole = costs_of(model)
    floats = dict(_named(abstract_params(replace(model, forms=(), arrangement=None))))
    sizes: dict[str, int] = {}
    fp8 = set[str]()
    for name, leaf in _named(abstract_params(model)):
        parts = name.split("/")  # perhaps of a quantised matrix, which is one array in `floats`
        owner = next(p for i in range(len(parts)) if (p := "/".join(parts[: i + 1])) in floats)
        sizes[owner] = sizes.get(owner, 0) + leaf.size * leaf.dtype.itemsize
        if leaf.dtype == jnp.float8_e4m3fn:
            fp8.add(owner)
    found: dict[str, Part] = {}
    head_size = model.config.hidden_size * model.config.vocab_size
    for name, leaf in floats.items():
        if (part := _part_of(name, leaf.ndim, tied=model.config.tie_word_embeddings)) is None:
            continue
        used = whole.expert_share if part == EXPERTS else 1.0
        uses = _uses(model, name)
        count = head_size if part == HEAD else leaf.size * uses
        before = found.get(part, Part())
        found[part] = Part(
            before.count + uses,
            before.bytes + sizes[name] * uses,
            before.flops + 2 * count * used * (0.5 if name in fp8 else 1),
        )
    return OpCosts(
        parts=found,
        weight_bytes=whole.weight_bytes,
        kv_bytes=whole.kv_bytes,
        pair_flops=whole.pair_flops,
        state_bytes=whole.state_bytes,
        expert_share=whole.expert_share,
    )


def _part_of(name: str, rank: int, *, tied: bool) -> str | None:
    """The part of a parameter; None if it is no matrix that a step multiplies."""
    if name == "lm_head" or (name == "embed" and tied):
        return HEAD
    if "/" not in name or rank < 2 or "norm" in name or "bias" in name or name.endswith(TABLE):
        return None
    if rank == 3:
        return EXPERTS
    return GATE_UP if name.endswith("/gate_up") else OTHERS
