"""GGUF metadata keys without a config key: the permitted ones and their permitted values.

Owns: the lists of keys, and the refusal of every key of the architecture that is in none of them.

A key of the architecture (``llama.*`` in a file of llama) describes the model's computation. It is
read by ``config`` or ``rope``, or listed here; any other key is refused by name, because a model
that ignores it may generate nonsense without an error. Sources: ``docs/gguf.md`` of ggml-org/ggml,
``Keys`` in gguf-py's constants.py, llama.cpp's src/llama-arch.cpp for the names and
src/llama-model.cpp for their meaning. Keys of other prefixes describe the file (its authors, its
licence, how it was quantised), except for those below.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError, SourceError
from jaxinfer.weights.gguf.header import GGUFHeader
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata

# Present in files of the supported architectures; no logit depends on them.
_WITHOUT_EFFECT = (
    "vocab_size",  # the embedding's number of rows
    "pooling_type",  # how embedding models reduce hidden states
    "rope.scaling.finetuned",  # a remark
    "attention.layer_norm_epsilon",  # an architecture uses one of the two epsilons, and reads it
    "attention.layer_norm_rms_epsilon",
)

_OFF = (0, False)
_NO_SCALE = (0, 1)  # 0 stands for "not set", as in llama.cpp
# Keys of other architectures, and the values with which they change nothing in ours.
_ONLY_AS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    dict.fromkeys(
        (
            "attention.max_alibi_bias",
            "attention.clamp_kqv",
            "attention.shared_kv_layers",
            "attention.temperature_length",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "router_logit_softcapping",
            "swin_norm",
            "use_parallel_residual",
            "rescale_every_n_layers",
            "leading_dense_block_count",
            "n_deepstack_layers",
            "moe_every_n_layers",
            "interleave_moe_layer_step",
            "expert_count",
            "expert_used_count",
            "expert_shared_count",
            "expert_group_count",
            "expert_group_used_count",
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
            "expert_gating_func",
            "expert_weights_norm",
            "expert_weights_scale",
            "rope.scaling.alpha",
            "rope.scaling.yarn_log_multiplier",
        ),
        _OFF,
    )
    | dict.fromkeys(
        (
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attention.output_scale",
            "attention.value_scale",
            "attention.temperature_scale",
            "rope.scale",  # in gguf.md alone, without a meaning
            "num_loops",
        ),
        _NO_SCALE,
    )
    | {"attention.causal": (True,)}
)
# Keys of files that are not models, and keys that llama.cpp reads without an architecture's prefix,
# with the architecture that has them.
_FOREIGN_PREFIXES = (("adapter.", None), ("xielu.", "apertus"))


def check_file_kind(header: GGUFHeader) -> None:
    """Raise ``SourceError`` for a file that is not a whole model, such as an adapter."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise SourceError(
            f"{header.path} holds no model: its general.type is {short(kind)}; name the model's "
            "file"
        )
    own = header.metadata.get("general.architecture")
    prefixes = tuple(prefix for prefix, owner in _FOREIGN_PREFIXES if owner != own)
    foreign = next((k for k in header.metadata if k.startswith(prefixes)), None)
    if foreign is not None:
        raise SourceError(
            f"{header.path} has the metadata key {foreign[:60]}, which no supported model has; "
            "name the model's file"
        )


def refuse_unread_keys(meta: ArchitectureMetadata) -> None:
    """Raise ``CheckpointError``, with the key's name, for a key that changes the model's result.

    These are keys of the architecture that have not been read from ``meta`` and are not permitted
    by the lists above.
    """
    for name, values in _ONLY_AS.items():
        if not meta.is_read(name):
            meta.only(name, *values)
    for name in _WITHOUT_EFFECT:
        meta.skip(name)
    quantisation = meta.header.metadata.get("general.quantization_version", 2)
    if quantisation != 2:  # version 1 stored other blocks, under the same type numbers
        raise CheckpointError(
            f"{meta.header.path}: metadata key general.quantization_version is "
            f"{short(quantisation)}; "
            "only 2 is supported, convert the model again"
        )
    if unread := meta.unread():
        raise CheckpointError(
            f"{meta.header.path}: metadata key {unread[0]} is not supported in a model of "
            f"{meta.architecture}, and might change what it computes; if it does not, remove it: "
            f"gguf-new-metadata --remove-metadata {unread[0]} INPUT OUTPUT"
        )
