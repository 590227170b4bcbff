"""A trainer's weights as parameters of our models, made on the device.

A trainer's model names its arrays in its own way ("layers.3.attn.q_proj.w", [D, N, H]) and maps the
names to those of Hugging Face's tensors. The parameter specs say how our fused arrays are made of
these tensors. ``TrainerWeights`` composes both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.core.errors import ArgumentError
from jaxinfer.models.base import Model, Params
from jaxinfer.models.division import in_device_order
from jaxinfer.models.params import ParamSpec, by_path, nested
from jaxinfer.models.sources import Source
from jaxinfer.nn.placement import Placement

# Tunix's mappings lead to arrays of other JAX engines, whose names differ from those of Hugging
# Face's tensors in these parts.
_OTHER_NAMES = (
    (r"\.(kernel|scale|embedding)$", ".weight"),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^(model\.)?lm_head(?=\.|$)", "lm_head"),
    (r"^lm_head$", "lm_head.weight"),
)


class TrainerWeights:
    """Makes parameters of a model from a trainer's tree.

    ``mapping`` has the tensor's name for each of the trainer's names, with ``*`` for the numbers of
    layers; a value may be a tuple that begins with the name (the rest is sharding).
    """

    def __init__(self, model: Model, placement: Placement, mapping: Mapping[str, Any]) -> None:
        if model.forms and model.devices > 1:
            raise ArgumentError("rollouts on several devices take weights of floats")
        self._model = model.whole
        self._devices = model.devices
        self._patterns = [
            (re.compile(re.escape(name).replace(r"\*", r"(\d+)")), _tensor_name(target))
            for name, target in mapping.items()
        ]
        shardings = {path: placement.sharding(array.axes) for path, array in model.arrays.items()}
        self._build = jax.jit(self._built, out_shardings=nested(shardings))

    def params(self, tree: Any) -> Params:
        """The parameters, new arrays on the devices; nothing is copied to the host, and the trainer
        may donate its arrays afterwards.

        Raises ``ArgumentError``, naming the array or the tensor, if one is missing, unknown or of
        another size, or if the tree holds LoRA adapters.
        """
        return self._build(_named(tree))

    def _built(self, named: Mapping[str, jax.Array]) -> Params:
        tensors: dict[str, tuple[str, jax.Array]] = {}
        for name, array in named.items():
            tensors[self._tensor_of(name)] = name, array
        needed = {source.name for spec in self._model.param_specs for source in spec.sources}
        if unknown := [name for tensor, (name, _) in tensors.items() if tensor not in needed]:
            raise ArgumentError(
                f"the trainer's array {unknown[0]} is not one of {self._model.architecture}; check "
                "that both have the same config"
            )
        arrays, leaves = self._model.arrays, dict[str, Any]()
        for spec in self._model.param_specs:
            leaves |= by_path({spec.path: _made(spec, tensors)})
        made = {
            path: in_device_order(leaf.astype(arrays[path].dtype), arrays[path], self._devices)
            for path, leaf in leaves.items()
        }
        return nested(made)

    def _tensor_of(self, name: str) -> str:
        if "lora" in name:
            raise ArgumentError(
                f"{name} is a LoRA adapter, and rollouts take whole weights; train all parameters, "
                "or merge the adapters"
            )
        for pattern, target in self._patterns:
            if found := pattern.fullmatch(name):
                return target.replace("*", "{}").format(*found.groups())
        raise ArgumentError(
            f"the trainer's array {name} has no tensor in to_hf_mappings; name it in "
            "rollout_mapping_config"
        )


def _made(spec: ParamSpec, tensors: Mapping[str, tuple[str, jax.Array]]) -> Any:
    """One parameter from its tensors; see ``ParamSpec``."""
    own = [_as_stored(source, tensors) for source in spec.sources]
    count = spec.sources_per_piece
    pieces = [spec.built(own[i * count : (i + 1) * count], i) for i in range(len(own) // count)]
    if spec.finish is not None:
        pieces = [spec.finish(piece) for piece in pieces]
    if spec.pieces is None:
        return pieces[0]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *pieces)


def _as_stored(source: Source, tensors: Mapping[str, tuple[str, jax.Array]]) -> jax.Array:
    """The trainer's array as the checkpoint's tensor.

    A kernel [inputs..., outputs...] becomes a linear weight [O, I]; embeddings are [V, D] in both.
    """
    if source.name not in tensors:
        raise ArgumentError(
            f"the trainer has no {source.name}; check that its config is the rollout's, and "
            "to_hf_mappings"
        )
    name, array = tensors[source.name]
    if array.size != math.prod(source.shape):
        raise ArgumentError(
            f"the trainer's {name} has shape {array.shape}, and {source.name} is {source.shape}; "
            "check that both have the same config"
        )
    if len(source.shape) != 2 or "embed" in name:
        return array.reshape(source.shape)
    outputs, inputs = source.shape
    return array.reshape(inputs, outputs).T


def _tensor_name(target: Any) -> str:
    """The name of Hugging Face's tensor that a value of a mapping means."""
    name = target if isinstance(target, str) else target[0]
    for pattern, replacement in _OTHER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _named(tree: Any) -> dict[str, jax.Array]:
    """The arrays of a tree by dotted path; an nnx state's variables are its leaves."""
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [
            str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path
        ]
        if keys[-1:] == ["value"]:
            del keys[-1]
        found[".".join(keys)] = leaf
    return found
