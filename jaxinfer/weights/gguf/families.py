"""The config.json of a family from GGUF metadata, with the differences between families as data.

Owns: ``Family``, and the readers of keys that several families have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxinfer.weights.gguf.decoder import decoder_config
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata

# Keys of config.json that some of the metadata describe.
type Reader = Callable[[ArchitectureMetadata], Mapping[str, Any]]

WINDOWED, FULL = "sliding_attention", "full_attention"
ROPE_REMARK = "rope.scaling.finetuned"  # in files of Granite: whether heads rotate
REFERENCE, METAS = "reference", "Meta AI original pth"  # values of tensor_data_layout


@dataclass(frozen=True)
class Family:
    """How the config.json of one architecture follows from the metadata.

    Values are those of config.json, by its keys.
    """

    architecture: str
    model_type: str
    fixed: Mapping[str, Any] = MappingProxyType({})  # what llama.cpp computes, whatever a file says
    # true if a layer has this tensor, or one of these
    present: Mapping[str, str | tuple[str, ...]] = MappingProxyType({})
    readers: tuple[Reader, ...] = ()  # run before the keys that all decoders share are read
    # keys of ``decoder_config`` under other names, or without one, if the family has no such key
    renamed: Mapping[str, str | None] = MappingProxyType({})
    data_layouts: tuple[str, ...] = (REFERENCE,)
    options: Mapping[str, Any] = MappingProxyType({})  # of ``decoder_config``

    def __call__(self, meta: ArchitectureMetadata) -> dict[str, Any]:
        """The config.json; raises ``CheckpointError`` for a key whose value is not supported."""
        meta.only("tensor_data_layout", *self.data_layouts)
        read: dict[str, Any] = {}
        for reader in self.readers:
            read |= reader(meta)
        if not meta.is_read("attention.sliding_window"):
            meta.only("attention.sliding_window", 0)
        options = dict(self.options)
        for option, key in (("heads", "num_attention_heads"), ("kv_heads", "num_key_value_heads")):
            if key in read:
                options[option] = read[key]
        config = decoder_config(meta, **options)
        named = ((self.renamed.get(key, key), value) for key, value in config.items())
        return {
            **{key: value for key, value in named if key is not None},
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key: _is_present(meta, names) for key, names in self.present.items()},
            **self.fixed,
            **read,
        }


def _is_present(meta: ArchitectureMetadata, names: str | tuple[str, ...]) -> bool:
    return any(map(meta.has_in_a_layer, (names,) if isinstance(names, str) else names))


LLAMA_BIASES = MappingProxyType({"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"})
QKV_BIAS = MappingProxyType({"attention_bias": "attn_q.bias"})


def windows(period: int, *, default: int | None = None, optional: bool = False) -> Reader:
    """The window, and which layers have it: all but each ``period``-th, if the file does not say.

    ``default`` is llama.cpp's window of files without one; with ``optional`` these have none.
    """

    def read(meta: ArchitectureMetadata) -> Mapping[str, Any]:
        key, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
        if optional and meta.number_if_set(key) is None:
            meta.skip(pattern)
            return {"sliding_window": None}
        window, count = meta.count(key, default), meta.count("block_count")
        given = meta.pattern(pattern)
        if given is None:
            given = period
        if isinstance(given, int):
            given = [given == 0 or (i + 1) % given > 0 for i in range(count)]
        elif len(given) != count:
            meta.refuse(pattern, given, "must hold true or false for each block")
        kinds = [WINDOWED if one else FULL for one in given[: meta.num_layers]]
        return {"sliding_window": window, "layer_types": kinds}

    return read


def number(key: str, name: str, default: float | None = None) -> Reader:
    """A number; llama.cpp's ``default`` where it is not set, without one the file must have it."""

    def read(meta: ArchitectureMetadata) -> Mapping[str, Any]:
        stored = meta.number(name) if default is None else meta.number_if_set(name)
        return {key: stored or default}

    return read


def optional_number(key: str, name: str) -> Reader:
    """A number, or null where it is not set."""
    return lambda meta: {key: meta.number_if_set(name)}


def granite_factors(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Granite's; a factor that is not set is 1, and that of scores is the usual one."""
    heads, width = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", max(width // heads, 1))
    return {
        "attention_multiplier": meta.number_if_set("attention.scale") or head_dim**-0.5,
        "embedding_multiplier": meta.number_if_set("embedding_scale") or 1.0,
        "residual_multiplier": meta.number_if_set("residual_scale") or 1.0,
        "logits_scaling": meta.number_if_set("logit_scale") or 1.0,
    }


def constant(name: str, *values: Any) -> Reader:
    """A key that config.json does not have, and the values that are supported."""

    def read(meta: ArchitectureMetadata) -> Mapping[str, Any]:
        meta.only(name, *values)
        return {}

    return read


def ignored(*names: str) -> Reader:
    """Keys that llama.cpp does not read, or that tensors say as well."""

    def read(meta: ArchitectureMetadata) -> Mapping[str, Any]:
        for name in names:
            meta.skip(name)
        return {}

    return read


def counts(**names: str) -> Reader:
    """Positive integers, by their keys in config.json."""
    return lambda meta: {key: meta.count(name) for key, name in names.items()}


def image_positions(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Frequencies whose position is the time, height and width of an image: equal for text, and all
    frequencies must have one of the three.
    """
    heads, width = meta.count("attention.head_count"), meta.count("embedding_length")
    half = meta.count("attention.key_length", max(width // heads, 1)) // 2
    stored = meta.listed("rope.dimension_sections")
    if len(stored) < 3 or sum(stored[:3]) != half or any(stored[3:]):
        words = f"must have three sections of {half} frequencies"
        meta.refuse("rope.dimension_sections", stored, words, "use another model")
    return {}


def attending_layers(meta: ArchitectureMetadata) -> list[bool]:
    """For each layer whether it has KV heads."""
    return [count > 0 for count in meta.counts("attention.head_count_kv")[: meta.num_layers]]


def kv_heads(meta: ArchitectureMetadata) -> int:
    """The number of KV heads of the layers that have some.

    Raises ``CheckpointError`` if they have different numbers.
    """
    stored = meta.counts("attention.head_count_kv")
    found = {count for count in stored if count} or {meta.count("attention.head_count", 1)}
    if len(found) > 1:
        remedy = "use a model of which that is true"
        meta.refuse("attention.head_count_kv", stored, "must be the same where it is not 0", remedy)
    return found.pop()
