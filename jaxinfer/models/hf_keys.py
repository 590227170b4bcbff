"""Refuses keys of a ``config.json`` that the family does not read and that may change the result.

A key that a family reads is supported, or refused by the reader. Other keys that change nothing are
listed here. An unknown key is refused by name if its words suggest that it changes the computation
of a layer, since ignoring it would change tokens without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError

WITHOUT_HEAD = "_without_head"  # which the engine sets for tasks that need no head
NO_EFFECT = frozenset(
    {
        # names and versions
        *("_commit_hash", "_name_or_path", "architectures", "auto_map", "finetuning_task"),
        "is_composition",
        *("is_llama_config", "model_type", "name_or_path", "tokenizer_class"),
        *("transformers_version", "unsloth_fixed", "unsloth_version"),
        # token ids and settings of generation: ``engine.requests.facts``
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "max_length", "max_new_tokens"),
        *("min_length", "min_p", "pad_token_id", "prefix", "repetition_penalty", "sep_token_id"),
        *("do_sample", "task_specific_params", "temperature", "top_k", "top_p"),
        # the first layer with a window, which families with windows read
        "max_window_layers",
        # the file of the weights: ``weights.sources``
        "transformers_weights",
        # dtypes and implementations, which the engine's settings decide
        *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
        *("_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled"),
        *("attn_implementation", "attention_implementation", "chunk_size_feed_forward", "dtype"),
        *("experts_implementation", "pretraining_tp", "reorder_and_upcast_attn", "torch_dtype"),
        *("torchscript", "use_bfloat16", "use_cache", "use_flash_attention"),
        *("use_flash_attention_2", "use_flash_attn", "use_sdpa", "tf_legacy_loss"),
        # training
        *(
            "activation_dropout",
            "attention_dropout",
            "attention_probs_dropout_prob",
            "attn_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "gradient_checkpointing",
        ),
        *("hidden_dropout", "initializer_factor", "initializer_range", "neftune_noise_alpha"),
        *("resid_pdrop", "residual_dropout", "rope_init", "router_aux_loss_coef"),
        *("router_z_loss_coef", "aux_loss_alpha", "seq_aux"),
        # outputs besides logits
        *("output_attentions", "output_hidden_states", "output_past", "output_router_logits"),
        *("return_dict", "tie_last_hidden_states"),
        # heads for other tasks
        *("_num_labels", "id2label", "label2id", "num_labels", "predict_special_tokens"),
        *("problem_type", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj", "n_special"),
        # other lengths than max_position_embeddings
        *("max_sequence_length", "model_max_length", "n_ctx", "seq_length"),
        # encoder-decoder models
        *("is_decoder", "is_encoder_decoder", "tie_encoder_decoder"),
    }
)
# Keys of other families, and the values at which they change nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "embedding_multiplier": (1,),
        "is_causal": (True,),
        "logit_scale": (1,),
        "logits_scaling": (1,),
        "num_experts": (0,),
        "num_local_experts": (0,),
        "pruned_heads": ({},),
        "residual_multiplier": (1,),
        "rope_pct": (1,),
        "rotary_pct": (1,),
    }
)
# Keys that say how a checkpoint is quantised; the second was compressed-tensors' first name.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": (
            "quantised safetensors cannot be read; use an unquantised checkpoint or a GGUF file"
        ),
        "dual_chunk_attention_config": (
            "remove it for plain attention, as transformers computes it"
        ),
        "per_layer_config": "layers that differ in size are not supported; use another checkpoint",
    }
)
REMOVE_KEY = "remove it from config.json if these weights do not need it"
_READ_FROM = ("gguf",)  # quant_methods that only name the kind of file that the weights came from
# Words of keys that may change the computation of a layer; (^|_) excludes "rope" in "property".
_MATTERS = re.compile(
    r"(^|_)m?rope|rotary|alibi|ntk|yarn|position|attn|attention|softcap|scal(e|ing)|multiplier"
    r"|norm|window|expert|scoring|topk|n_group|bias|activation|quant|logit|residual|epsilon|sparse|layer_type"
    r"|(^|_)(act|eps|ffn|heads?|kv|mlp|moe|qk|qkv|router|softmax|theta)(_|$)"
)


class KeysRead(Mapping[str, Any]):
    """A config that records which of its keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def unread(self) -> dict[str, Any]:
        """The entries whose keys were not read."""
        return {key: value for key, value in self._config.items() if key not in self._read}


def refuse_unread(config: KeysRead, architecture: str) -> None:
    """Raise ``ConfigError`` for a key that was not read and may change the result."""
    for key, value in config.unread().items():
        if key not in NO_EFFECT and not _is_neutral(key, value):
            remedy = REMEDIES.get(key, REMOVE_KEY)
            raise ConfigError(
                f"config key {key!r} is {short(value)}, which {architecture} does not know here "
                f"and which may change what it computes; {remedy}"
            )


def _is_neutral(key: str, value: object) -> bool:
    """True if a key is switched off, or does not affect the computation of layers."""
    if key in NEUTRAL:
        return value is None or value in NEUTRAL[key]
    if key == "quantization_config" and isinstance(value, Mapping):
        return value.get("quant_method") in (None, *_READ_FROM)
    switched_off = value is None or value is False or value in ("", [], {})
    return switched_off or not (key in REMEDIES or _MATTERS.search(key.lower()))
