"""Models of text and images, or of text and sound, whose text decoder is a model of its own.

The decoder is the one that the model type of "text_config", or of a flat config, names. Its tensors
have a prefix, or those of the encoders have names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models.hf_keys import QUANTIZATION_KEYS
from jaxinfer.models.text_defaults import text_defaults

WRAPPERS = (
    "Apertus1p5ForConditionalGeneration",
    "AriaForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "Blip2ForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "CohereCompassForConditionalGeneration",
    "Cosmos3EdgeForConditionalGeneration",
    "Cosmos3OmniForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "Emu3ForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "FunAsrNanoForConditionalGeneration",
    "FuyuForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "HYV4VLForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoForConditionalGeneration",
    "InternVLChatModel",  # of published files, as are Kimi-VL and the name Qwen2_5OmniModel
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",  # as transformers names it
    "Lfm2VlForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "OmniASRForConditionalGeneration",
    "Ovis2ForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
TEXT_MODELS = (
    ("apertus1p5_text", "Apertus1p5TextForCausalLM"),
    ("aria_text", "AriaTextForCausalLM"),
    ("cohere", "CohereForCausalLM"),
    ("cohere2", "Cohere2ForCausalLM"),
    ("cohere_compass_text", "CohereCompassForCausalLM"),
    ("cosmos3_edge_text", "ArceeForCausalLM"),
    ("deepseek_v2", "DeepseekV2ForCausalLM"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("emu3_text_model", "Emu3ForCausalLM"),
    ("gemma", "GemmaForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3_text", "Gemma3ForCausalLM"),
    ("glm4v_text", "Glm4ForCausalLM"),
    ("glm4v_moe_text", "Glm4MoeForCausalLM"),
    ("glm5_next", "Glm5NextForCausalLM"),  # of a flat config
    ("glm5_next_text", "Glm5NextForCausalLM"),
    ("glm_ocr_text", "Glm4ForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"),
    ("granite", "GraniteForCausalLM"),
    ("granite4_vision_text", "GraniteForCausalLM"),
    ("granite_docling_text", "GraniteForCausalLM"),
    ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    ("hunyuan_vl_text", "HunYuanDenseV1ForCausalLM"),
    ("hy_v4_vl_text", "HYV4ForCausalLM"),
    ("hyperclovax", "HyperCLOVAXForCausalLM"),
    ("internlm2", "InternLM2ForCausalLM"),  # of InternVL 1.5 and 2
    ("lfm2", "Lfm2ForCausalLM"),
    ("lfm2_moe", "Lfm2MoeForCausalLM"),
    ("lfm3", "Lfm3ForCausalLM"),
    ("llama", "LlamaForCausalLM"),
    ("llama4_text", "Llama4ForCausalLM"),
    ("ministral3", "Ministral3ForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("mistral4", "Mistral4ForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("mllama_text_model", "MllamaForCausalLM"),
    ("nemotron_h", "NemotronHForCausalLM"),
    ("opt", "OPTForCausalLM"),
    ("persimmon", "PersimmonForCausalLM"),
    ("phi", "PhiForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen2_5_omni_text", "Qwen2ForCausalLM"),
    ("qwen2_vl", "Qwen2ForCausalLM"),
    ("qwen2_vl_text", "Qwen2ForCausalLM"),
    ("qwen2_5_vl", "Qwen2ForCausalLM"),
    ("qwen2_5_vl_text", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("qwen3_omni_moe_text", "Qwen3MoeForCausalLM"),
    ("qwen3_vl_text", "Qwen3ForCausalLM"),
    ("qwen3_vl_moe_text", "Qwen3MoeForCausalLM"),
    ("smollm3", "SmolLM3ForCausalLM"),
    ("stablelm", "StableLmForCausalLM"),
)
# Values that transformers does not read from a text decoder's config, or replaces.
_FIXED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm_ocr_text": {"attention_bias": False},
        "qwen3_vl_moe_text": {"norm_topk_prob": True},
    }
)
# Text models of which the token that ends a text, as their part of the config has it, is a part of
# the computation, and the key under which they find it.
_OWN_END, OWN_END = ("qwen4_exp_text",), "text_eos_token_id"
# Text models whose files stack the experts of a layer, which others of the family have apart.
WITH_STACKS = ("qwen3_vl_moe_text",)
_PARTS = ("text_config", "llm_config")  # the keys of the text decoder's config
PREFIXES = (
    *("model.language_model.", "language_model.", "model.text_model.", "text_model."),
    "thinker.",
)
# Names that transformers gives to the layers of two wrappers when it saves them.
OTHER_LAYERS = ((r"model\.(?:blocks|encoder\.layers)\.(\d+)\.", r"model.layers.\1."),)
# Encoders of images and of sound, what joins them to the decoder, and decoders of images and sound.
OF_OTHER_KINDS = (
    r"(model\.)?(image_newline|query_tokens|high_res_vision_alpha"
    r"|(visual|vision_\w+|visual_\w+|high_res_vision_\w+|(image|video|audio)_tower|encoder"
    r"|multi_modal_projector|mm_projector|projector|language_projection|connector|qformer|merger"
    r"|(generation_)?aligner|generation_\w+|vqmodel|mlp1|(acoustic|semantic)_tokenizer_encoder"
    r"|audio_adaptor|vit|\w+_projectors|talker|token2wav|code2wav)\..*)"
)

# Published names of Cosmos 3's decoder, and its tensors of other kinds: the encoder of images, and
# what makes images, sound and actions, which transformers does not read either.
COSMOS = ("Cosmos3EdgeForConditionalGeneration", "Cosmos3OmniForConditionalGeneration")
COSMOS_NAMES = (
    (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
    (r"\.self_attn\.norm_([qk])\.", r".self_attn.\1_norm."),
)
COSMOS_OTHERS = (
    r"(blocks|patch_embed|pos_embed|deepstack_merger_list)\..*|.*moe_gen.*"
    r"|.*\.self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|k_norm_und_for_gen)\..*"
    r"|((action_|audio_)?proj_(in|out)|time_embedder)\..*|(action|audio)_modality_embed"
)
# Models of text and images that are named in a family's own lines: its text decoder is read.
WITH_IMAGES = (
    "DeepseekOcr2ForConditionalGeneration",
    "Dots3NoteForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration",
    "Molmo2ForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "Step3VLForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
)


def own_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text decoder's part of a config, with the defaults of its type for sizes that it lacks,
    and with what the file says of the whole model: how it is quantised, whether its head is tied,
    and its token ids. As in transformers, the latter two win over those of the part: Gemma's ids
    have the one that ends a turn, too, and transformers ties the heads of some models whose
    "text_config" has another default.

    Raises ``ConfigError`` for a quantisation of both whose values differ.
    """
    whole = hf_config.get("thinker_config")  # Qwen's Omni models, next to the parts that speak
    whole = {**hf_config, **whole} if isinstance(whole, Mapping) else hf_config
    own = next((whole[key] for key in _PARTS if isinstance(whole.get(key), Mapping)), None)
    if own is None:
        return whole
    added = {k: v for k, v in whole.items() if k.endswith("_token_id") and v is not None}
    if whole.get("tie_word_embeddings") is not None:
        added["tie_word_embeddings"] = whole["tie_word_embeddings"]
    for key in QUANTIZATION_KEYS:
        value, of_text = whole.get(key), own.get(key)
        if of_text is not None and value not in (None, of_text):
            raise ConfigError(
                f"config key {key!r} is {short(value)}, and {short(of_text)} in 'text_config'; "
                "make them equal or remove one"
            )
        if value is not None:
            added[key] = value
    if whole.get("architectures") == ["PaliGemmaForConditionalGeneration"]:
        added["use_bidirectional_attention"] = False  # that of prompts with images
    kind = own.get("model_type")
    if kind in _OWN_END:
        added[OWN_END] = own.get("eos_token_id")
    defaults = text_defaults(kind, whole.get("model_type"))
    return {**defaults, **own, **added, **_FIXED.get(str(kind), {})}
