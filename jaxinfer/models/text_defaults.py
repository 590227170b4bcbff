"""Sizes of text decoders that published configs of models of text and images leave out.

transformers writes of the "text_config" in a config.json only the keys that differ from its
defaults: Gemma 3 4B's has no number of heads and no vocabulary, LLaVA 1.5's no sizes at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
_OF_RMS, _OF_LAYERS = "rms_norm_eps", "layer_norm_eps"
# Types whose norms are LayerNorms.
_LAYER_NORMS = ("cohere", "cohere2", "cohere_compass_text", "persimmon", "phi", "stablelm")
# Of each model type the defaults of transformers 5.24 in the order of _KEYS, and that of the norms'
# epsilon. None: the value is derived from others, or the family has the same default.
_ROWS: Mapping[str, tuple[int | float | None, ...]] = MappingProxyType(
    {
        "apertus1p5_text": (266752, 4096, 14336, 32, 32, None, None, 65536, 1e-05),
        "aria_text": (32000, 4096, 4096, 32, 32, None, None, 2048, 1e-06),
        "cohere": (256000, 8192, 22528, 40, 64, None, None, 8192, 1e-05),
        "cohere2": (256000, 8192, 22528, 40, 64, None, None, 8192, 1e-05),
        "cohere_compass_text": (256000, 8192, 22528, 40, 64, None, None, 8192, 1e-05),
        "cosmos3_edge_text": (131072, 2048, 9216, 28, 16, 8, 128, 131072, 1e-05),
        "deepseek_v2": (102400, 4096, 11008, 32, 32, None, None, 2048, 1e-06),
        "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, None, 4096, 1e-06),
        "dots3_note_text": (152064, 5120, 13824, 46, 128, None, None, 524288, 1e-05),
        "emu3_text_model": (184622, 4096, 14336, 32, 32, 8, None, 9216, 1e-05),
        "gemma": (256000, 3072, 24576, 28, 16, 16, 256, 8192, 1e-06),
        "gemma2": (256000, 2304, 9216, 26, 8, 4, 256, 8192, 1e-06),
        "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 256, 131072, 1e-06),
        "glm4v_text": (151552, 4096, 13696, 40, 32, 2, None, 32768, 1e-05),
        "glm4v_moe_text": (151424, 4096, 10944, 46, 96, 8, None, 65536, 1e-05),
        "glm5_next_text": (154880, 4096, 12288, 45, 64, None, None, 1048576, 1e-05),
        "glm_ocr_text": (59392, 1024, 4096, 16, 16, 8, None, 131072, 1e-05),
        "gpt_oss": (201088, 2880, 2880, 36, 64, 8, 64, 131072, 1e-05),
        "granite": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-06),
        "granite4_vision_text": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-06),
        "granite_docling_text": (133800, 1024, 2048, 28, 16, 4, None, 32768, 1e-05),
        "hunyuan_v1_dense": (290943, 4096, 11008, 32, 32, None, None, 2048, 1e-05),
        "hunyuan_vl_text": (290943, 4096, 11008, 32, 32, None, None, 2048, 1e-05),
        "hy_v4_vl_text": (120832, 6144, 18432, 78, 64, None, None, 262144, 1e-05),
        "hyperclovax": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-06),
        "lfm2": (65536, 2560, 12288, 32, 32, 8, None, 128000, None),
        "lfm2_moe": (65536, 2048, 7168, 32, 32, 8, None, 128000, None),
        "lfm3": (128000, 2048, 7680, 24, 16, 4, 128, 128000, None),
        "llama": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-06),
        "llama4_text": (202048, 5120, 8192, 48, 40, 8, 128, 131072, 1e-05),
        "ministral3": (131072, 4096, 14336, 34, 32, 8, 128, 262144, 1e-05),
        "mistral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-06),
        "mistral4": (131072, 4096, 12288, 36, 32, 32, None, 1048576, 1e-06),
        "mixtral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-05),
        "mllama_text_model": (128256, 4096, 14336, 40, 32, 8, None, 131072, 1e-05),
        "muse_spark_text": (202048, 8192, 16384, 62, 128, 16, 64, 1048576, 1e-05),
        "nemotron_h": (131072, 4096, 21504, None, 32, 8, 128, 4096, None),
        "opt": (50272, 768, None, 12, 12, None, None, 2048, None),
        "persimmon": (262144, 4096, 16384, 36, 64, None, None, 16384, 1e-05),
        "phi": (51200, 2048, 8192, 24, 32, None, None, 2048, 1e-05),
        "phi3": (32064, 3072, 8192, 32, 32, None, None, 4096, 1e-05),
        "qwen2": (151936, 4096, 22016, 32, 32, 32, None, 32768, 1e-06),
        "qwen2_5_omni_text": (152064, 3584, 18944, 28, 28, 4, None, 32768, 1e-06),
        "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 8, None, 32768, 1e-05),
        "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 8, None, 32768, 1e-05),
        "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 32768, 1e-06),
        "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 256, 32768, 1e-06),
        "qwen3_5_moe_text": (248320, 2048, None, 40, 16, 2, 256, 32768, 1e-06),
        "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, None, 32768, 1e-06),
        "qwen3_omni_moe_text": (3584, 2048, 18944, 28, 28, 4, None, 32768, 1e-06),
        "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 32, 128, 128000, 1e-06),
        "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16, 16, None, 128000, 1e-06),
        "qwen4_exp_text": (248320, 2048, None, 40, 16, 2, 256, 32768, 1e-06),
        "smollm3": (128256, 2048, 11008, 36, 16, 4, None, 32768, 1e-06),
        "stablelm": (50304, 2560, 6912, 32, 32, 32, None, 4096, 1e-05),
    }
)
_MORE: Mapping[str, Mapping[str, Any]] = MappingProxyType(  # in a family of another default
    {"cosmos3_edge_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e8}}}
)


# of models whose text decoders have other defaults than those of their type elsewhere
_OF_WHOLE: Mapping[str, tuple[int | float | None, ...]] = MappingProxyType(
    {"omniasr": (11984, 4096, 2816, 12, 8, 8, None, 8192, 1e-05)}
)


def text_defaults(model_type: Any, whole: Any = None) -> dict[str, Any]:
    """The values of the keys that a "text_config" of this type may lack, in a model of the type
    ``whole``; none of other types.
    """
    row = _ROWS.get(model_type) if isinstance(model_type, str) else None
    row = _OF_WHOLE.get(whole, row) if isinstance(whole, str) else row
    if row is None:
        return {}
    keys = (*_KEYS, _OF_LAYERS if model_type in _LAYER_NORMS else _OF_RMS)
    found = {key: value for key, value in zip(keys, row, strict=True) if value is not None}
    return {**found, **_MORE.get(model_type, {})}
