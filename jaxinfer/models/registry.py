"""The registry: the family of each architecture. A family's module is imported on first use."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError, UnknownArchitectureError
from jaxinfer.models.base import Model, ModelFamily
from jaxinfer.models.hf_config import MAX_ALL_EXPERTS, MAX_SIZE
from jaxinfer.models.hf_keys import WITHOUT_HEAD, KeysRead, refuse_unread
from jaxinfer.models.wrappers import (
    COSMOS,
    COSMOS_NAMES,
    COSMOS_OTHERS,
    OF_OTHER_KINDS,
    OTHER_LAYERS,
    PREFIXES,
    TEXT_MODELS,
    WITH_IMAGES,
    WITH_STACKS,
    WRAPPERS,
    own_config,
)
from jaxinfer.nn.decoder_config import DecoderSpec

_MODULES = (
    ("LlamaForCausalLM", "jaxinfer.models.llama"),
    ("LLaMAForCausalLM", "jaxinfer.models.llama"),  # of older files
    ("MistralForCausalLM", "jaxinfer.models.llama"),
    ("Qwen2ForCausalLM", "jaxinfer.models.qwen2"),
    ("MiMoForCausalLM", "jaxinfer.models.qwen2"),
    ("Qwen3ForCausalLM", "jaxinfer.models.qwen3"),
    ("GPT2LMHeadModel", "jaxinfer.models.gpt2"),
    ("Gemma3ForCausalLM", "jaxinfer.models.gemma3"),
    ("Rnj1ForCausalLM", "jaxinfer.models.rnj1"),
    ("Gemma3nForCausalLM", "jaxinfer.models.gemma3n"),
    ("Gemma3nForConditionalGeneration", "jaxinfer.models.gemma3n"),
    ("Gemma4ForCausalLM", "jaxinfer.models.gemma4"),
    ("Gemma4ForConditionalGeneration", "jaxinfer.models.gemma4"),
    ("Gemma4UnifiedForCausalLM", "jaxinfer.models.gemma4_unified"),
    ("Gemma4UnifiedForConditionalGeneration", "jaxinfer.models.gemma4_unified"),
    ("Olmo2ForCausalLM", "jaxinfer.models.olmo2"),
    ("Phi3ForCausalLM", "jaxinfer.models.phi3"),
    ("GlmForCausalLM", "jaxinfer.models.glm"),
    ("Glm4ForCausalLM", "jaxinfer.models.glm4"),
    ("StableLmForCausalLM", "jaxinfer.models.stablelm"),
    ("GraniteForCausalLM", "jaxinfer.models.granite"),
    ("GraniteMoeForCausalLM", "jaxinfer.models.granite"),
    ("SmolLM3ForCausalLM", "jaxinfer.models.smollm3"),
    ("CohereForCausalLM", "jaxinfer.models.cohere"),
    ("Cohere2ForCausalLM", "jaxinfer.models.cohere"),
    ("GemmaForCausalLM", "jaxinfer.models.gemma"),
    ("Gemma2ForCausalLM", "jaxinfer.models.gemma2"),
    ("MinistralForCausalLM", "jaxinfer.models.ministral"),
    ("Ministral3ForCausalLM", "jaxinfer.models.ministral"),
    ("HunYuanDenseV1ForCausalLM", "jaxinfer.models.hunyuan"),
    ("HunYuanMoEV1ForCausalLM", "jaxinfer.models.hunyuan"),
    ("ApertusForCausalLM", "jaxinfer.models.apertus"),
    ("Olmo3ForCausalLM", "jaxinfer.models.olmo3"),
    ("CwmForCausalLM", "jaxinfer.models.cwm"),
    ("Qwen2MoeForCausalLM", "jaxinfer.models.qwen2_moe"),
    ("OlmoeForCausalLM", "jaxinfer.models.olmoe"),
    ("Glm4MoeForCausalLM", "jaxinfer.models.glm4_moe"),
    ("SeedOssForCausalLM", "jaxinfer.models.seed_oss"),
    ("Ernie4_5ForCausalLM", "jaxinfer.models.ernie4_5"),
    ("Ernie4_5_ForCausalLM", "jaxinfer.models.ernie4_5"),  # of older files
    ("Ernie4_5_MoeForCausalLM", "jaxinfer.models.ernie4_5"),
    ("Exaone4ForCausalLM", "jaxinfer.models.exaone4"),
    ("Starcoder2ForCausalLM", "jaxinfer.models.starcoder2"),
    ("OlmoForCausalLM", "jaxinfer.models.olmo"),
    ("ArceeForCausalLM", "jaxinfer.models.arcee"),
    ("HeliumForCausalLM", "jaxinfer.models.helium"),
    ("NemotronForCausalLM", "jaxinfer.models.nemotron"),
    ("Jais2ForCausalLM", "jaxinfer.models.jais2"),
    ("GPTNeoXForCausalLM", "jaxinfer.models.gpt_neox"),
    ("PhiForCausalLM", "jaxinfer.models.phi"),
    ("FalconForCausalLM", "jaxinfer.models.falcon"),
    ("GPTJForCausalLM", "jaxinfer.models.gptj"),
    ("OPTForCausalLM", "jaxinfer.models.opt"),
    ("Qwen3MoeForCausalLM", "jaxinfer.models.qwen3_moe"),
    ("Qwen3_5ForCausalLM", "jaxinfer.models.qwen3_5"),
    ("Qwen3_5ForConditionalGeneration", "jaxinfer.models.qwen3_5"),
    ("Qwen3_5MoeForCausalLM", "jaxinfer.models.qwen3_5_moe"),
    ("Qwen3_5MoeForConditionalGeneration", "jaxinfer.models.qwen3_5_moe"),
    ("Qwen4ExpForCausalLM", "jaxinfer.models.qwen4_exp"),
    ("Qwen4ExpForConditionalGeneration", "jaxinfer.models.qwen4_exp"),
    ("Qwen3NextForCausalLM", "jaxinfer.models.qwen3_next"),
    ("MixtralForCausalLM", "jaxinfer.models.mixtral"),
    ("GptOssForCausalLM", "jaxinfer.models.gpt_oss"),
    ("DeepseekV2ForCausalLM", "jaxinfer.models.deepseek_v2"),
    ("DeepseekV3ForCausalLM", "jaxinfer.models.deepseek_v3"),
    ("DeepseekV32ForCausalLM", "jaxinfer.models.deepseek_v32"),
    ("GlmMoeDsaForCausalLM", "jaxinfer.models.glm_moe_dsa"),
    ("Glm5NextForCausalLM", "jaxinfer.models.glm5_next"),
    ("AXK2ForCausalLM", "jaxinfer.models.axk2"),
    ("MistralLarge4ForConditionalGeneration", "jaxinfer.models.mistral_large4"),
    ("KimiK25ForConditionalGeneration", "jaxinfer.models.deepseek_v3"),
    ("KimiLinearForCausalLM", "jaxinfer.models.kimi_linear"),
    ("DeepseekForCausalLM", "jaxinfer.models.deepseek"),
    ("Dots1ForCausalLM", "jaxinfer.models.dots1"),
    ("MiniMaxM2ForCausalLM", "jaxinfer.models.minimax_m2"),
    ("MiniMaxM3SparseForCausalLM", "jaxinfer.models.minimax_m3"),
    ("MiniMaxM3SparseForConditionalGeneration", "jaxinfer.models.minimax_m3"),
    ("MiniMaxM3VLForCausalLM", "jaxinfer.models.minimax_m3"),
    ("Glm4MoeLiteForCausalLM", "jaxinfer.models.glm4_moe_lite"),
    ("ExaoneMoeForCausalLM", "jaxinfer.models.exaone_moe"),
    ("ExaoneMoEForCausalLM", "jaxinfer.models.exaone_moe"),  # of the published files
    ("SolarOpenForCausalLM", "jaxinfer.models.solar_open"),
    ("AfmoeForCausalLM", "jaxinfer.models.afmoe"),
    ("FlexOlmoForCausalLM", "jaxinfer.models.flex_olmo"),
    ("Cohere2MoeForCausalLM", "jaxinfer.models.cohere2_moe"),
    ("HYV3ForCausalLM", "jaxinfer.models.hy_v3"),
    ("HYV4ForCausalLM", "jaxinfer.models.hy_v4"),
    ("DeepseekV4ForCausalLM", "jaxinfer.models.deepseek_v4"),
    ("GraniteMoeSharedForCausalLM", "jaxinfer.models.granite"),
    ("MistralLarge3ForCausalLM", "jaxinfer.models.mistral_large3"),
    ("Mistral4ForCausalLM", "jaxinfer.models.mistral4"),
    ("SarvamMoEForCausalLM", "jaxinfer.models.sarvam_moe"),
    ("SarvamMLAForCausalLM", "jaxinfer.models.sarvam_mla"),
    ("YoutuForCausalLM", "jaxinfer.models.youtu"),
    ("MellumForCausalLM", "jaxinfer.models.mellum"),
    ("PhimoeForCausalLM", "jaxinfer.models.phimoe"),
    ("PhiMoEForCausalLM", "jaxinfer.models.phimoe"),  # of published files
    ("Llama4ForCausalLM", "jaxinfer.models.llama4"),
    ("MiniCPM3ForCausalLM", "jaxinfer.models.minicpm3"),
    ("Lfm2ForCausalLM", "jaxinfer.models.lfm2"),
    ("Lfm2MoeForCausalLM", "jaxinfer.models.lfm2"),
    ("GraniteMoeHybridForCausalLM", "jaxinfer.models.granite_hybrid"),
    ("BambaForCausalLM", "jaxinfer.models.bamba"),
    ("FalconH1ForCausalLM", "jaxinfer.models.falcon_h1"),
    ("NemotronHForCausalLM", "jaxinfer.models.nemotron_h"),
    ("NemotronHPuzzleForCausalLM", "jaxinfer.models.nemotron_h"),
    ("Mamba2ForCausalLM", "jaxinfer.models.mamba2"),
    ("MambaForCausalLM", "jaxinfer.models.falcon_mamba"),
    ("FalconMambaForCausalLM", "jaxinfer.models.falcon_mamba"),
    ("JambaForCausalLM", "jaxinfer.models.jamba"),
    ("OlmoHybridForCausalLM", "jaxinfer.models.olmo_hybrid"),
    ("BloomForCausalLM", "jaxinfer.models.bloom"),
    ("MptForCausalLM", "jaxinfer.models.mpt"),
    ("MPTForCausalLM", "jaxinfer.models.mpt"),  # of the published files
    ("InternLM2ForCausalLM", "jaxinfer.models.internlm2"),
    ("InternLM3ForCausalLM", "jaxinfer.models.internlm3"),
    ("IQuestCoderForCausalLM", "jaxinfer.models.llama"),
    ("IQuestLoopCoderForCausalLM", "jaxinfer.models.iquest_loop"),
    ("NanoChatForCausalLM", "jaxinfer.models.nanochat"),
    ("ExaoneForCausalLM", "jaxinfer.models.exaone"),
    ("Exaone4_5_ForConditionalGeneration", "jaxinfer.models.exaone4"),
    ("GPTBigCodeForCausalLM", "jaxinfer.models.gpt_bigcode"),
    ("GPTNeoForCausalLM", "jaxinfer.models.gpt_neo"),
    ("CodeGenForCausalLM", "jaxinfer.models.codegen"),
    ("PersimmonForCausalLM", "jaxinfer.models.persimmon"),
    ("VaultGemmaForCausalLM", "jaxinfer.models.gemma2"),
    ("BitNetForCausalLM", "jaxinfer.models.bitnet"),
    ("HyperCLOVAXForCausalLM", "jaxinfer.models.hyperclovax"),
    ("GraniteSWAForCausalLM", "jaxinfer.models.granite"),
    ("GraniteMoeSWAForCausalLM", "jaxinfer.models.granite"),
    ("BioGptForCausalLM", "jaxinfer.models.biogpt"),
    ("XGLMForCausalLM", "jaxinfer.models.xglm"),
    ("CTRLLMHeadModel", "jaxinfer.models.ctrl"),
    ("MiniMaxForCausalLM", "jaxinfer.models.minimax"),
    ("MiniMaxText01ForCausalLM", "jaxinfer.models.minimax"),
    ("MiniMaxM1ForCausalLM", "jaxinfer.models.minimax"),
    ("BailingMoeForCausalLM", "jaxinfer.models.bailing"),
    ("BailingMoeV2ForCausalLM", "jaxinfer.models.bailing"),
    ("BailingMoeLinearV2ForCausalLM", "jaxinfer.models.bailing_linear"),
    ("BailingMoeV2_5ForCausalLM", "jaxinfer.models.bailing_linear"),
    ("BailingMoeV3ForCausalLM", "jaxinfer.models.bailing_hybrid"),
    ("BailingHybridForCausalLM", "jaxinfer.models.bailing_hybrid"),  # as transformers saves it
    ("AXK1ForCausalLM", "jaxinfer.models.axk1"),
    ("DbrxForCausalLM", "jaxinfer.models.dbrx"),
    ("DiffLlamaForCausalLM", "jaxinfer.models.diffllama"),
    ("LongcatFlashForCausalLM", "jaxinfer.models.longcat_flash"),
    ("LongcatFlashNgramForCausalLM", "jaxinfer.models.longcat_flash"),
    ("MiMoV2FlashForCausalLM", "jaxinfer.models.mimo_v2_flash"),
    ("LagunaForCausalLM", "jaxinfer.models.laguna"),
    ("ZayaForCausalLM", "jaxinfer.models.zaya"),
    ("ChameleonForConditionalGeneration", "jaxinfer.models.chameleon"),
    ("MuseGlimmerForConditionalGeneration", "jaxinfer.models.muse_glimmer"),
    ("MuseSparkForConditionalGeneration", "jaxinfer.models.muse_spark"),
    ("Dots3NoteForCausalLM", "jaxinfer.models.dots3_note"),
    ("Dots3NoteForConditionalGeneration", "jaxinfer.models.dots3_note"),
    ("MiniCPMForCausalLM", "jaxinfer.models.minicpm"),
    ("OrionForCausalLM", "jaxinfer.models.orion"),
    ("DeciLMForCausalLM", "jaxinfer.models.nemotron_nas"),
    ("Step3p5ForCausalLM", "jaxinfer.models.step3p5"),
    ("Step3p7ForConditionalGeneration", "jaxinfer.models.step3p5"),
    ("Lfm3ForCausalLM", "jaxinfer.models.lfm3"),
    ("FlintForCausalLM", "jaxinfer.models.flint"),
    ("DogeForCausalLM", "jaxinfer.models.doge"),
    ("JetMoeForCausalLM", "jaxinfer.models.jetmoe"),
    ("AriaTextForCausalLM", "jaxinfer.models.aria"),
    ("Emu3ForCausalLM", "jaxinfer.models.emu3"),
    ("MllamaForCausalLM", "jaxinfer.models.mllama"),
    ("PaddleOCRVLForConditionalGeneration", "jaxinfer.models.paddleocr_vl"),
    ("DeepseekOcr2ForConditionalGeneration", "jaxinfer.models.deepseek_ocr2"),
    ("Phi4MultimodalForCausalLM", "jaxinfer.models.phi3"),
    ("RecurrentGemmaForCausalLM", "jaxinfer.models.recurrent_gemma"),
    ("RwkvForCausalLM", "jaxinfer.models.rwkv"),
    ("xLSTMForCausalLM", "jaxinfer.models.xlstm"),
    ("ModernBertDecoderForCausalLM", "jaxinfer.models.modernbert_decoder"),
    ("Ernie4_5_VLMoeForConditionalGeneration", "jaxinfer.models.ernie4_5_vl"),
    ("CohereCompassForCausalLM", "jaxinfer.models.cohere_compass"),
    ("Apertus1p5TextForCausalLM", "jaxinfer.models.apertus"),
    ("OpenAIGPTLMHeadModel", "jaxinfer.models.openai_gpt"),
    ("GPTNeoXJapaneseForCausalLM", "jaxinfer.models.gpt_neox_japanese"),
    ("ZambaForCausalLM", "jaxinfer.models.zamba"),
    ("Zamba2ForCausalLM", "jaxinfer.models.zamba2"),
    ("Kolibri1ForCausalLM", "jaxinfer.models.kolibri1"),
    ("LaraMiniForCausalLM", "jaxinfer.models.lara_mini"),
    ("Molmo2ForConditionalGeneration", "jaxinfer.models.molmo2"),
    ("ChatGLMModel", "jaxinfer.models.chatglm"),
    ("ChatGLMForConditionalGeneration", "jaxinfer.models.chatglm"),
    ("TeleChat2ForCausalLM", "jaxinfer.models.telechat2"),
    ("TeleChat3ForCausalLM", "jaxinfer.models.llama"),
    ("TeleFLMForCausalLM", "jaxinfer.models.teleflm"),
    ("PanguEmbeddedForCausalLM", "jaxinfer.models.openpangu"),
    ("PanguProMoEV2ForCausalLM", "jaxinfer.models.openpangu_pro"),
    ("PanguUltraMoEForCausalLM", "jaxinfer.models.openpangu_ultra"),
    ("K2HorizonForCausalLM", "jaxinfer.models.k2_horizon"),
    ("Plamo3ForCausalLM", "jaxinfer.models.plamo3"),
    ("Param2MoEForCausalLM", "jaxinfer.models.param2moe"),
    ("SolarForCausalLM", "jaxinfer.models.solar"),
    ("DoryForCausalLM", "jaxinfer.models.dory"),
    ("Step1ForCausalLM", "jaxinfer.models.step1"),
    ("Step3TextForCausalLM", "jaxinfer.models.step3"),
    ("Step3VLForConditionalGeneration", "jaxinfer.models.step3"),
)

# Files that transformers saved again name the class whose modules it has for a model type, but have
# the tensors' names of the published architecture.
_OF_MODEL_TYPES = (
    (("LlamaForCausalLM", "exaone"), "ExaoneForCausalLM"),
    (("Glm4MoeForCausalLM", "sarvam_moe"), "SarvamMoEForCausalLM"),
    (("DeepseekV3ForCausalLM", "sarvam_mla"), "SarvamMLAForCausalLM"),
)


def known_architectures() -> tuple[str, ...]:
    """The names that ``architectures`` in a config.json may hold."""
    return (*(architecture for architecture, _ in _MODULES), *WRAPPERS)


def wrapping_architectures() -> tuple[str, ...]:
    """Those of models of text and images, whose family is that of their text decoder."""
    return WRAPPERS


def family_for(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family of the config's architecture; raises the errors of ``build_model``."""
    architecture = _architecture(hf_config)
    module_name = dict(_MODULES)[architecture]
    try:
        family = importlib.import_module(module_name).FAMILY
    except ImportError as error:
        error.add_note(f"while importing {module_name}, the model family of {architecture}")
        raise
    if not any(name in WRAPPERS for name in _names(hf_config)):
        return family
    is_cosmos = any(name in COSMOS for name in _names(hf_config))
    others, names = ((COSMOS_OTHERS,), COSMOS_NAMES) if is_cosmos else ((), ())
    return replace(
        family,
        ignored_tensors=(*family.ignored_tensors, OF_OTHER_KINDS, *others),
        optional_prefix=PREFIXES,
        other_names=(*family.other_names, *OTHER_LAYERS, *names),
        stacked_experts=family.stacked_experts or hf_config.get("model_type") in WITH_STACKS,
    )


def decoder_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a decoder that was saved without its head (``Qwen3Model``), under the name of
    the architecture with one; any other config as it is.
    """
    names = _names(hf_config)
    heads = {re.sub("(ForCausalLM|LMHeadModel)$", "Model", name): name for name, _ in _MODULES}
    if not any(name in heads for name in names):
        return hf_config
    return {**hf_config, "architectures": [heads.get(name, name) for name in names]}


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model's text decoder, with the model's architectures and token ids, and with
    what a file says of the whole model: see ``own_config``.

    For a model of text alone, and an architecture that is not known, it is the config itself.
    Raises ``ConfigError`` for a quantisation of both whose values differ.
    """
    names = _names(hf_config)
    is_wrapper = not any(name in dict(_MODULES) for name in names)
    if is_wrapper and any(name in WRAPPERS for name in names):
        own = own_config(hf_config)
        return {**own, "architectures": [_text_model(own, names[0]), *names]}
    if any(name in WITH_IMAGES for name in names):
        return {**own_config(hf_config), "architectures": hf_config["architectures"]}
    return hf_config


def _text_model(config: Mapping[str, Any], wrapper: str) -> str:
    """The architecture of the text decoder with this config."""
    kind, known = config.get("model_type"), dict(TEXT_MODELS)
    if kind not in known:
        raise UnknownArchitectureError(
            f"the text decoder of {wrapper} is {short(kind)} ('model_type' of 'text_config'), "
            "which no family has; use a model whose text decoder is of one in docs/models.md"
        )
    return known[kind]


def may_stack_experts(hf_config: Mapping[str, Any]) -> bool:
    """See ``ModelFamily.stacked_experts``; False for an architecture without a family."""
    known = known_architectures()
    return (
        any(name in known for name in _names(hf_config)) and family_for(hf_config).stacked_experts
    )


def build_model(
    hf_config: Mapping[str, Any], dtype: jnp.dtype | str, max_model_len: int | None = None
) -> Model:
    """The model that a ``config.json`` describes, without weights.

    ``dtype`` is the dtype of weights and activations. ``max_model_len`` is the engine's context
    length (None: the model's default), on which a few rope scalings depend: see ``nn.rope``. Raises
    ``ConfigError`` for a missing or unsupported key, and ``UnknownArchitectureError`` for an
    architecture without a family.
    """
    family, architecture = family_for(hf_config), _architecture(hf_config)
    keys = KeysRead(hf_config)
    config = family.config_from_hf(keys, jnp.dtype(dtype))
    if keys.get(WITHOUT_HEAD):  # as if the embedding were the head, which is not used
        config = replace(config, tie_word_embeddings=True)
    refuse_unread(keys, architecture)
    _check_sizes(config)
    context = max_model_len or config.lengths[0]
    own = config.for_context(context)
    return Model(family, architecture, own, hf_config=hf_config, context=context)


def _check_sizes(config: DecoderSpec) -> None:
    """Raise ``ConfigError`` for sizes that are too large together, whatever each of them is."""
    experts = sum(ffn.count for ffn in config.experts.values())
    if experts > MAX_ALL_EXPERTS:
        raise ConfigError(
            f"the layers of config.json have {experts} experts together, and at most "
            f"{MAX_ALL_EXPERTS} are supported; check that it is the model's own"
        )
    if config.lengths[1] > MAX_SIZE:
        raise ConfigError(
            f"config.json describes a context of {short(config.lengths[1])} tokens, and at most "
            f"{MAX_SIZE} are supported; correct its rope scaling"
        )


def _names(hf_config: Mapping[str, Any]) -> list[str]:
    """The names of the config's architectures; none if the key is absent or something else."""
    names = hf_config.get("architectures")
    if not isinstance(names, list | tuple):
        return []
    return [name for name in names if isinstance(name, str)]


def _architecture(hf_config: Mapping[str, Any]) -> str:
    """The first of the config's architectures that has a family."""
    given, names, known = hf_config.get("architectures"), _names(hf_config), known_architectures()
    if not given:
        raise ConfigError("config key 'architectures' is missing; add it to config.json")
    if not isinstance(given, list | tuple) or len(names) < len(given):
        raise ConfigError(f"config key 'architectures' must be a list of names, got {short(given)}")
    modules = dict(_MODULES)
    for name in names:
        if name in modules:
            return dict(_OF_MODEL_TYPES).get((name, str(hf_config.get("model_type"))), name)
    for name in names:
        if name in WRAPPERS:
            return _text_model(hf_config, name)
    given = ", ".join(names)[:200]
    near = get_close_matches(given, known, cutoff=0.0)  # three of them
    raise UnknownArchitectureError(
        f"architecture {given} is unknown; known are {', '.join(near)} and "
        f"{len(known) - len(near)} others, which docs/models.md lists"
    )
