"""A Hugging Face config from GGUF metadata.

Owns: one function per GGUF architecture, and the rope scaling. Must not know: tensor data formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from gguf.constants import TokenType

from jaxinfer.core.errors import CheckpointError, UnknownArchitectureError
from jaxinfer.nn.rope import Llama3Scaling, RopeConfig, inverse_frequencies
from jaxinfer.weights.gguf_header import GGUFHeader

# Meta's constants, the same in Llama 3.1, 3.2 and 3.3; GGUF keeps only what follows from them.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT = 8192

_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED)


def hf_config_from_gguf(
    header: GGUFHeader,
    rope_factors: np.ndarray | None,  # float32[H / 2]: the tensor rope_freqs.weight
) -> dict[str, Any]:
    """What the model's config.json would say.

    Raises ``UnknownArchitectureError``, or ``CheckpointError`` for a key that is missing.
    """
    architecture = header.metadata.get("general.architecture")
    build = _BUILDERS.get(str(architecture))
    if build is None:
        raise UnknownArchitectureError(
            f"{header.path} is a GGUF of architecture {architecture!r}; "
            f"known are {', '.join(_BUILDERS)}"
        )
    config = build(_Metadata(header, str(architecture)))
    tokens = {f"{name}_token_id": _token_id(header, name) for name in ("bos", "eos")}
    config |= {
        "vocab_size": _tensor_rows(header, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{key: value for key, value in tokens.items() if value is not None},
    }
    if rope_factors is not None:
        config["rope_scaling"] = _llama3_scaling(header, config, rope_factors)
    return config


def generation_config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The token ids that begin and end a text; a chat turn's end counts as an end.

    Raises ``CheckpointError`` for an id that is no number.
    """
    named = (_token_id(header, name) for name in ("eos", "eot", "eom"))
    ends = {token_id for token_id in named if token_id is not None} | _turn_ends(header.metadata)
    config: dict[str, Any] = {"eos_token_id": sorted(ends)} if ends else {}
    bos = _token_id(header, "bos")
    return config if bos is None else config | {"bos_token_id": bos}


def _token_id(header: GGUFHeader, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = header.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise CheckpointError(
            f"{header.path}: metadata key {key} must be an integer, got {str(value)[:40]!r}; "
            "convert the model again"
        )
    return value


def _turn_ends(metadata: Mapping[str, Any]) -> set[int]:
    """Special tokens that end a turn by their text, as in llama.cpp: many files name only eos."""
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        return set()  # no vocabulary; whoever needs one says so
    return {
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in _TURN_ENDS and kind in _SPECIAL_TYPES
    }


class _Metadata:
    """Metadata of one architecture: keys without its prefix, checked as they are read."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header = header
        self._prefix = architecture + "."

    def text(self, key: str, default: str) -> str:
        return self._value(key, default, str, "a string")

    def count(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default, int, "a positive integer")
        return value if value > 0 else self._refuse(key, value, "a positive integer")

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as its shortest decimal: 1e-05 instead of 9.999999747378752e-06."""
        return float(str(np.float32(self._value(key, default, (int, float), "a number"))))

    def _value(self, key: str, default: Any, kind: type | tuple[type, ...], words: str) -> Any:
        value = self.header.metadata.get(self._prefix + key, default)
        if value is None:
            raise CheckpointError(
                f"{self.header.path} lacks the metadata key {self._prefix + key}; "
                "convert the model again"
            )
        if not isinstance(value, kind) or isinstance(value, bool):
            self._refuse(key, value, words)
        return value

    def _refuse(self, key: str, value: object, words: str) -> NoReturn:
        raise CheckpointError(
            f"{self.header.path}: metadata key {self._prefix + key} must be {words}, "
            f"got {str(value)[:40]!r}; convert the model again"
        )

    @property
    def num_layers(self) -> int:
        count = self.count("block_count")
        names = (name.split(".") for name in self.header.tensors if name.startswith("blk."))
        present = len({parts[1] for parts in names})
        if count != present:
            raise CheckpointError(
                f"{self.header.path} says it has {count} blocks but holds tensors of {present}; "
                "download it again"
            )
        return count

    @property
    def has_experts(self) -> bool:
        return bool(self.header.metadata.get(self._prefix + "expert_count"))

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors


def _decoder(meta: _Metadata) -> dict[str, Any]:
    """The keys that llama, qwen2 and qwen3 share."""
    heads = meta.count("attention.head_count")
    hidden_size = meta.count("embedding_length")
    if meta.has_experts:
        raise UnknownArchitectureError(
            f"{meta.header.path} is a mixture of experts, which no known family covers"
        )
    config: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": meta.count("feed_forward_length"),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": meta.count("attention.key_length", max(hidden_size // heads, 1)),
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "hidden_act": "silu",
    }
    return config


def _llama(meta: _Metadata) -> dict[str, Any]:
    return _decoder(meta) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": meta.has_tensor("blk.0.ffn_up.bias"),
    }


def _qwen2(meta: _Metadata) -> dict[str, Any]:
    return _decoder(meta) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(meta: _Metadata) -> dict[str, Any]:
    return _decoder(meta) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": meta.has_tensor("blk.0.attn_q.bias"),
    }


def _gpt2(meta: _Metadata) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": meta.count("embedding_length"),
        "n_inner": meta.count("feed_forward_length"),
        "n_layer": meta.num_layers,
        "n_head": meta.count("attention.head_count"),
        "n_positions": meta.count("context_length"),
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_BUILDERS = MappingProxyType({"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gpt2": _gpt2})


def _rope_scaling(meta: _Metadata) -> dict[str, Any] | None:
    kind = meta.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        original = meta.count("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(
    header: GGUFHeader, config: Mapping[str, Any], factors: np.ndarray
) -> dict[str, Any]:
    """The scaling whose factors the file holds: known up to Llama 3's constants, then compared."""
    scaling = Llama3Scaling(
        factor=float(factors.max()),
        low_freq_factor=_LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=_LLAMA3_HIGH_FREQ_FACTOR,
        original_max_position_embeddings=_LLAMA3_ORIGINAL_CONTEXT,
    )
    plain = RopeConfig(config["head_dim"], config["rope_theta"])
    expected = inverse_frequencies(plain) / inverse_frequencies(
        RopeConfig(plain.head_dim, plain.theta, scaling)
    )
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{header.path}: its rope_freqs.weight does not follow Llama 3's rope scaling, "
            "the only one supported in this form"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


def _tensor_rows(header: GGUFHeader, name: str) -> int:
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} has no tensor {name}; download it again")
    return header.tensors[name].shape[0]
