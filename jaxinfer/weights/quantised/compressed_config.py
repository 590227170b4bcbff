"""Reads a compressed-tensors config: groups of targets, each with the arguments of its weights.

Source: compressed-tensors 0.20 (quantization/quant_config.py, quant_args.py) and older versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.core.checks import as_int
from jaxinfer.core.errors import ConfigError
from jaxinfer.weights.quantised.config_keys import Keys
from jaxinfer.weights.quantised.scheme import PATTERN, Rule, Scheme, WeightScheme

MIXED = "mixed-precision"  # each group has its own format
# The layout of a format, and the type and the numbers of bits of its weights.
_FORMATS: Mapping[str, tuple[str, str, tuple[int, ...]]] = MappingProxyType(
    {
        "pack-quantized": ("packed", "int", (4, 8)),
        "naive-quantized": ("plain", "", (8,)),
        "int-quantized": ("plain", "int", (4, 8)),  # in int8 also if they have 4 bits
        "float-quantized": ("plain", "float", (8,)),
    }
)
_STATES = ("compressed", "frozen")
# How scales were found. Weights here are multiplied by activations that are not quantised, and the
# KV cache is not quantised either, so their arguments have no effect.
_NO_EFFECT = frozenset({"global_compression_ratio", "version", "kv_cache_scheme", "run_compressed"})
_OF_A_GROUP = frozenset({"input_activations", "output_activations"})
_OF_WEIGHTS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})


def compressed_scheme(keys: Keys) -> Scheme:
    """The scheme of a compressed-tensors config; raises ``ConfigError`` with the key."""
    keys.take("quant_method")
    keys.choice("quantization_status", of=_STATES, default="compressed")
    own = keys.choice("format", of=(*_FORMATS, MIXED))
    ignore = keys.targets("ignore")
    _refuse_sparsity(Keys(keys.take("sparsity_config", default={}), keys.path("sparsity_config")))
    groups = keys.take("config_groups", default={})
    found = Keys(groups, keys.path("config_groups"))
    keys.finish(_NO_EFFECT)
    weights: dict[str, WeightScheme] = {}
    for name in groups:
        _read_group(Keys(groups[name], found.path(name)), own, weights)
    # The reference tries patterns in alphabetical order.
    return Scheme(
        "compressed-tensors", tuple(Rule(*one) for one in sorted(weights.items(), key=_key)), ignore
    )


def _key(rule: tuple[str, WeightScheme]) -> tuple[bool, str]:
    return rule[0].startswith(PATTERN), rule[0]


def _read_group(keys: Keys, own: str, found: dict[str, WeightScheme]) -> None:
    """Add a group's targets to ``found``."""
    targets = keys.targets("targets")
    arguments = keys.take("weights")
    if arguments is None:  # only activations or the KV cache are quantised
        return
    own = keys.choice("format", of=tuple(_FORMATS), default=None if own == MIXED else own)
    keys.finish(_OF_A_GROUP)
    weights = _weights(Keys(arguments, keys.path("weights")), own)
    for target in targets:
        if found.setdefault(target, weights) != weights:
            raise ConfigError(
                f"config key {keys.path('targets')!r} has {target!r}, which another group has with "
                "other weights; remove it from one of them"
            )


def _weights(keys: Keys, own: str) -> WeightScheme:
    """The arguments of a group's weights."""
    layout, of_format, bits = _FORMATS[own]
    types = (of_format,) if of_format else ("int", "float")
    kind = keys.choice("type", of=types, default="int")
    count = keys.choice("num_bits", of=bits, default=8)
    symmetric = keys.flag("symmetric", default=True)
    keys.choice("dynamic", of=(False,), default=False)
    keys.choice("actorder", of=(False, True, "weight", "static", "group", "dynamic"), default=False)
    group, block_outputs = _shared_scales(keys, layout)
    keys.finish(_OF_WEIGHTS)
    if kind == "float":
        if not symmetric:
            keys.choice("symmetric", of=(True,))
        kind = "fp8"
    elif layout == "packed":
        kind = f"int{count}"
    else:
        kind = "int8"
    return WeightScheme(layout, kind, group, block_outputs, symmetric)


def _shared_scales(keys: Keys, layout: str) -> tuple[int | None, int]:
    """Inputs and outputs that share a scale."""
    size = as_int(keys.take("group_size"))
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    known = ("tensor", "channel", "group") if layout == "packed" else (*_STRATEGIES, "block")
    strategy = keys.choice("strategy", of=known, default=implied)
    block = keys.block("block_structure")
    if strategy == "group":
        return keys.group("group_size"), 1
    if strategy != "block":
        return None, 1
    if block is None:
        raise ConfigError(
            f"config key {keys.path('strategy')!r} is 'block', but 'block_structure' has no sizes; "
            "use another checkpoint of this model"
        )
    return block[1], block[0]


_STRATEGIES = ("tensor", "channel", "group")


def _refuse_sparsity(keys: Keys) -> None:
    """Raise ``ConfigError`` unless all values of a matrix are stored."""
    keys.choice("format", of=("dense",), default="dense")
    keys.finish(
        frozenset(
            {
                "global_sparsity",
                "ignore",
                "targets",
                "registry_requires_subclass",
                "sparsity_structure",
            }
        )
    )
