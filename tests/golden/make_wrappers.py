"""Makes data/wrappers.json.gz: what transformers saves of models of text and images or sound.

A tool, run by hand in the environment of ``make_golden.py``; tests read only its output.

    python make_wrappers.py [MODEL_TYPE ...]

Without names all rows of ``WRAPPERS`` are made. For each architecture the file has the config.json
that ``save_pretrained`` writes, with small sizes, and the names and shapes of the tensors.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from cases import BARE, LATENT, NEMOTRON_H, NO_TOKENS, merged, without
from safetensors import safe_open
from transformers.models.auto import CONFIG_MAPPING, modeling_auto

FILE = Path(__file__).parent / "data" / "wrappers.json.gz"
# Sizes of encoders, for those keys that a config has.
SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "encoder_ffn_dim"), 8),
    **dict.fromkeys(("d_model", "projection_dim"), 8),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "n_layers", "num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    "num_key_value_heads": 2,
    "out_hidden_size": 32,
    "vocab_size": 20,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
PARTIAL = merged(MROPE, partial_rotary_factor=0.5, mrope_section=[1, 1, 0])
WIDE = merged(MROPE, mrope_section=[4, 2, 2], mrope_interleaved=True)
QWEN_EXPERTS = {
    **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "rope_parameters": WIDE,
}
PATCHES = {"image_size": 8, "patch_size": 4}
SAM = {"hidden_size": 8, "output_channels": 8, "mlp_dim": 8, "downsample_channels": [8, 8]}
SAM |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
SAM |= {"global_attn_indexes": [0]}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA4_EXPERTS = {"num_local_experts": 5, "intermediate_size_mlp": 40, "head_dim": 16}
# Of each model type the changes of its parts.
WRAPPERS: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "vision_config": {
            **{"codebook_size": 8, "embed_dim": 8, "latent_channels": 8, "base_channels": 32},
            **{"channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []},
        },
        "audio_config": {"codebook_size": 8, "codebook_dim": 8},
        **{"image_token_id": 3, "audio_token_id": 4, "image_token_offset": 50},
        "audio_token_offset": 58,
    },
    "aria": {"text_config": {"intermediate_size": 24, "moe_num_experts": 5}},
    "audioflamingo3": {},
    "aya_vision": {},
    "blip-2": {},
    "cohere2_vision": {},
    "cohere_compass": {
        "text_config": {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": None, "sliding_attention": MROPE},
        }
    },
    "cosmos3_edge": {
        "text_config": {"head_dim": 16, "rope_parameters": merged(MROPE, mrope_section=[4, 2, 2])},
        "projector_hidden_size": 8,
    },
    "cosmos3_omni": {"text_config": {"head_dim": 16, "rope_parameters": WIDE}},
    "deepseek_ocr2": {
        "vision_config": {"sam_config": SAM, "encoder_config": SMALL},
        "text_config": {
            **{"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3},
            "mlp_layer_types": ["dense", "sparse"],
        },
    },
    "deepseek_vl": {},
    "deepseek_vl_hybrid": {
        "vision_config": {"mlp_ratio": 1.0},
        "high_res_vision_config": {"mlp_ratio": 1.0},
    },
    "dots3_note": {
        "vision_config": {
            **{"mlp_layer_types": ["dense"], "num_hidden_layers": 1, "adapter_in_dim": 8},
            **{"adapter_out_dim": 32, "intermediate_size": 16, "patch_size": 4},
        },
        "audio_config": {
            **{"adapter_input_size": 8, "adapter_out_dim": 32, "downsample_hidden_size": 8},
            **{"feature_size": 16, "num_hidden_layers": 1},
        },
        "text_config": {
            **{"num_hidden_layers": 3, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8},
            "num_key_value_heads": 4,
            **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 16, "n_routed_experts": 2},
            **{"num_experts_per_tok": 1, "moe_intermediate_size": 8, "index_head_dim": 8},
            **{"index_n_heads": 2, "shared_experts_intermediate_size": 8, "sliding_window": 4},
            **{"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 8},
            **{"swa_kv_lora_rank": 8, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8},
            **{"swa_v_head_dim": 8},
        },
    },
    "emu3": {"text_config": TOKENS, "vocabulary_map": {"<image>": 95}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32}},
    "fuyu": {},
    "gemma3": {"text_config": {"head_dim": 16}},
    "glm46v": {"text_config": {"rope_parameters": PARTIAL}},
    "glm4v": {"text_config": {"rope_parameters": PARTIAL}, "vision_config": {"image_size": 28}},
    "glm4v_moe": {
        "text_config": {
            **{"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"n_shared_experts": 1, "rope_parameters": PARTIAL},
        }
    },
    "glm5_next": {
        "text_config": {
            **without(LATENT, "vocab_size", "hidden_size", "first_k_dense_replace"),
            **{"qk_rope_head_dim": 0, "q_lora_rank": 20, "n_routed_experts": 8, "index_topk": 16},
            **{"hc_mult": 2, "linear_num_heads": 2, "linear_head_dim": 8},
        },
        "vision_config": {**PATCHES, "projection_intermediate_size": 8},
    },
    "glm_ocr": {"text_config": {"rope_parameters": PARTIAL}},
    "glmasr": {},
    "got_ocr2": {},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
    },
    "granite_docling": {},
    "granite_speech": {},
    "granite_speech_plus": {},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 8,
            "rope_parameters": {
                **{"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 3.0, "factor": 1.0},
                "mrope_section": [1, 1, 1, 1],
            },
        }
    },
    "hy_v4_vl": {
        "text_config": {
            **without(LATENT, "vocab_size", "hidden_size", "first_k_dense_replace"),
            **{"q_lora_rank": 20, "n_routed_experts": 8, "hc_mult": 2, "index_topk": 8},
            "rope_parameters": merged(MROPE, mrope_section=[2, 1, 1]),
        },
        "vision_config": PATCHES,
    },
    "hyperclovax_vision_v2": {},
    "idefics2": {},
    "idefics3": {},
    "instructblip": {},
    "instructblipvideo": {},
    "internvl": {},
    "janus": {},
    "kimi_k25": {
        "text_config": {
            **without(LATENT, "vocab_size", "hidden_size"),
            **{"q_lora_rank": 20, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
            "head_dim": 8,
        }
    },
    "lfm2_vl": {},
    "lfm3_vl": {},
    "lighton_ocr": {},
    "llama4": {"text_config": LLAMA4_EXPERTS},
    "llava": {},
    "llava_next": {},
    "llava_next_video": {},
    "llava_onevision": {},
    "minicpm_ocr": {},
    "minicpmv4_6": {},
    "minicpmv4_7": {},
    "mistral3": {},
    "mllama": {
        "vision_config": {
            **{"hidden_size": 16, "attention_heads": 2, "vision_output_dim": 96},
            **{"num_global_layers": 1, "image_size": 28, "intermediate_layers_indices": [0]},
        },
        "text_config": {**TOKENS, "num_hidden_layers": 4, "cross_attention_layers": [1]},
    },
    "moss_transcribe_diarize": {},
    "muse_glimmer": {
        **{"vision_config": {"pos_emb_height": 2, "pos_emb_width": 2, "patch_size": 4}},
        **{"text_config": {"head_dim": 8}, "out_hidden_size": 32, "projector_hidden_size": 8},
    },
    "muse_spark": {
        **{"vision_config": {"pos_emb_height": 2, "pos_emb_width": 2, "patch_size": 4}},
        "audio_config": {
            **{"patch_sizes": [2, 2], "hidden_sizes": [4, 8], "depths": [1, 1]},
            **{"num_hidden_layers": 2, "out_hidden_size": 32},
        },
        "text_config": {
            **{"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
            **{"moe_intermediate_size": 16, "moe_hidden_size": 8},
        },
        **{"out_hidden_size": 32, "projector_hidden_size": 8},
    },
    "musicflamingo": {},
    "nemotron_h_omni": {
        "text_config": {**NEMOTRON_H, "hybrid_override_pattern": "M*-"},
        "vision_config": {"mlp_ratio": 1.0, "video_temporal_patch_size": 2},
    },
    "omniasr": {"audio_config": {"num_conv_pos_embedding_groups": 2, "conv_dim": [8] * 7}},
    "ovis2": {},
    "paddleocr_vl": {"text_config": {"head_dim": 8, "rope_parameters": MROPE}},
    "paligemma": {"text_config": {"head_dim": 8}},
    "qianfan_ocr": {"text_config": {"head_dim": 8}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_audio": {},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen3_asr": {"text_config": {"head_dim": 8}},
    "qwen3_omni_moe_thinker": {"text_config": QWEN_EXPERTS},
    "qwen3_vl": {"text_config": {"head_dim": 16, "rope_parameters": WIDE}},
    "qwen3_vl_moe": {"text_config": QWEN_EXPERTS},
    "smolvlm": {},
    "step3p7": {
        "text_config": {"pad_token_id": 0, "head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": PATCHES,
    },
    "vibevoice_asr": {},
    "video_llama_3": {},
    "video_llava": {},
    "vipllava": {},
    "voxtral": {},
}


def config_of(kind: str) -> transformers.PreTrainedConfig:
    """The default config with small sizes."""
    own, default = CONFIG_MAPPING[kind], CONFIG_MAPPING[kind]()
    changes, text, made = dict(WRAPPERS[kind]), default.get_text_config(), {}
    for name in own.sub_configs:
        if (part := getattr(default, name, None)) is None:
            continue
        sizes = BARE if part is text else SMALL
        known = {key: value for key, value in sizes.items() if key in part.to_dict()}
        if part is text:
            known |= NO_TOKENS
        made[name] = {"model_type": part.model_type, **known, **changes.pop(name, {})}
    return own(**made, **changes)


def saved(kind: str) -> tuple[str, dict[str, Any]]:
    """The architecture, and the config and shapes of what is saved."""
    of_sound = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    name = {**of_sound, **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}[kind]
    model = getattr(transformers, name)._from_config(config_of(kind))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    return name, {"config": config, "tensors": shapes}


def main() -> None:
    transformers.logging.set_verbosity_error()
    made = json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}
    for kind in sys.argv[1:] or WRAPPERS:
        name, own = saved(kind)
        made[name] = own
        print(name, len(own["tensors"]), flush=True)
        text = json.dumps(made, sort_keys=True, separators=(",", ":"))
        FILE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
