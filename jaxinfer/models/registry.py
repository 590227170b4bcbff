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
from jaxinfer.models.hf_keys import QUANTIZATION_KEYS, KeysRead, refuse_unread
from jaxinfer.nn.decoder_config import DecoderSpec

_MODULES = (
    ("LlamaForCausalLM", "jaxinfer.models.llama"),
    ("MistralForCausalLM", "jaxinfer.models.llama"),
    ("Qwen2ForCausalLM", "jaxinfer.models.qwen2"),
    ("Qwen3ForCausalLM", "jaxinfer.models.qwen3"),
    ("GPT2LMHeadModel", "jaxinfer.models.gpt2"),
    ("Gemma3ForCausalLM", "jaxinfer.models.gemma3"),
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
    ("Qwen3NextForCausalLM", "jaxinfer.models.qwen3_next"),
    ("MixtralForCausalLM", "jaxinfer.models.mixtral"),
    ("GptOssForCausalLM", "jaxinfer.models.gpt_oss"),
    ("DeepseekV2ForCausalLM", "jaxinfer.models.deepseek_v2"),
    ("DeepseekV3ForCausalLM", "jaxinfer.models.deepseek_v3"),
    ("KimiK25ForConditionalGeneration", "jaxinfer.models.deepseek_v3"),
    ("KimiLinearForCausalLM", "jaxinfer.models.kimi_linear"),
    ("Dots1ForCausalLM", "jaxinfer.models.dots1"),
    ("MiniMaxM2ForCausalLM", "jaxinfer.models.minimax_m2"),
    ("Glm4MoeLiteForCausalLM", "jaxinfer.models.glm4_moe_lite"),
    ("ExaoneMoeForCausalLM", "jaxinfer.models.exaone_moe"),
    ("SolarOpenForCausalLM", "jaxinfer.models.solar_open"),
    ("AfmoeForCausalLM", "jaxinfer.models.afmoe"),
    ("FlexOlmoForCausalLM", "jaxinfer.models.flex_olmo"),
    ("Cohere2MoeForCausalLM", "jaxinfer.models.cohere2_moe"),
    ("HYV3ForCausalLM", "jaxinfer.models.hy_v3"),
    ("GraniteMoeSharedForCausalLM", "jaxinfer.models.granite"),
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
    ("Mamba2ForCausalLM", "jaxinfer.models.mamba2"),
    ("MambaForCausalLM", "jaxinfer.models.falcon_mamba"),
    ("FalconMambaForCausalLM", "jaxinfer.models.falcon_mamba"),
    ("JambaForCausalLM", "jaxinfer.models.jamba"),
    ("OlmoHybridForCausalLM", "jaxinfer.models.olmo_hybrid"),
    ("BloomForCausalLM", "jaxinfer.models.bloom"),
    ("MptForCausalLM", "jaxinfer.models.mpt"),
    ("MPTForCausalLM", "jaxinfer.models.mpt"),  # of the published files
    ("InternLM3ForCausalLM", "jaxinfer.models.internlm3"),
    ("IQuestCoderForCausalLM", "jaxinfer.models.llama"),
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
    ("MiMoV2FlashForCausalLM", "jaxinfer.models.mimo_v2_flash"),
    ("LagunaForCausalLM", "jaxinfer.models.laguna"),
    ("Lfm3ForCausalLM", "jaxinfer.models.lfm3"),
    ("FlintForCausalLM", "jaxinfer.models.flint"),
    ("DogeForCausalLM", "jaxinfer.models.doge"),
    ("JetMoeForCausalLM", "jaxinfer.models.jetmoe"),
)

# Models of text and images whose text decoder is a model of its own: the one that the model type of
# "text_config", or of a flat config, names. Their tensors have a prefix or those for images have.
_WRAPPERS = (
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
_TEXT_MODELS = (
    ("cohere", "CohereForCausalLM"),
    ("cohere2", "Cohere2ForCausalLM"),
    ("gemma3_text", "Gemma3ForCausalLM"),
    ("glm4v_text", "Glm4ForCausalLM"),
    ("glm4v_moe_text", "Glm4MoeForCausalLM"),
    ("llama", "LlamaForCausalLM"),
    ("llama4_text", "Llama4ForCausalLM"),
    ("ministral3", "Ministral3ForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("mistral4", "Mistral4ForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen2_vl", "Qwen2ForCausalLM"),
    ("qwen2_vl_text", "Qwen2ForCausalLM"),
    ("qwen2_5_vl", "Qwen2ForCausalLM"),
    ("qwen2_5_vl_text", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3_vl_text", "Qwen3ForCausalLM"),
)
_PREFIXES = ("model.language_model.", "language_model.")
_OF_IMAGES = (
    r"(model\.)?(image_newline|(visual|vision_tower|vision_model|multi_modal_projector)\..*)"
)

# Models of text and images, of which the text decoder is read.
_WITH_IMAGES = (
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Keys that transformers writes beside "text_config", as they are of the whole model.
_OF_THE_WHOLE = (*QUANTIZATION_KEYS, "tie_word_embeddings")


def known_architectures() -> tuple[str, ...]:
    """The names that ``architectures`` in a config.json may hold."""
    return (*(architecture for architecture, _ in _MODULES), *_WRAPPERS)


def wrapping_architectures() -> tuple[str, ...]:
    """Those of models of text and images, whose family is that of their text decoder."""
    return _WRAPPERS


def family_for(hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family of the config's architecture; raises the errors of ``build_model``."""
    architecture = _architecture(hf_config)
    module_name = dict(_MODULES)[architecture]
    try:
        family = importlib.import_module(module_name).FAMILY
    except ImportError as error:
        error.add_note(f"while importing {module_name}, the model family of {architecture}")
        raise
    if not any(name in _WRAPPERS for name in _names(hf_config)):
        return family
    ignored = (*family.ignored_tensors, _OF_IMAGES)
    return replace(family, ignored_tensors=ignored, optional_prefix=_PREFIXES)


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
    what a file says of the whole model: how it is quantised, and whether its head is tied. As in
    transformers, token ids of the whole win: Gemma's have the one that ends a turn, too.

    For a model of text alone, and an architecture that is not known, it is the config itself.
    Raises ``ConfigError`` for a key of both whose values differ.
    """
    own, names = hf_config.get("text_config"), _names(hf_config)
    if any(name in _WRAPPERS for name in names) and not any(n in dict(_MODULES) for n in names):
        own = own if isinstance(own, Mapping) else {k: hf_config[k] for k in hf_config}
        names = [_text_model(own, names[0]), *names]
    elif not isinstance(own, Mapping) or not any(name in _WITH_IMAGES for name in names):
        return hf_config
    ids = {k: v for k, v in hf_config.items() if k.endswith("_token_id") and v is not None}
    whole: dict[str, Any] = {}
    for key in _OF_THE_WHOLE:
        value, of_text = hf_config.get(key), own.get(key)
        if of_text is not None and value not in (None, of_text):
            raise ConfigError(
                f"config key {key!r} is {short(value)}, and {short(of_text)} in 'text_config'; "
                "make them equal or remove one"
            )
        whole[key] = value
    added = {k: v for k, v in whole.items() if v is not None and own.get(k) is None}
    return {**own, **added, **ids, "architectures": names}


def _text_model(config: Mapping[str, Any], wrapper: str) -> str:
    """The architecture of the text decoder with this config."""
    kind, known = config.get("model_type"), dict(_TEXT_MODELS)
    if kind not in known:
        raise UnknownArchitectureError(
            f"the text decoder of {wrapper} is {short(kind)} ('model_type' of 'text_config'); "
            f"known are {', '.join(known)}"
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
    refuse_unread(keys, architecture)
    _check_sizes(config)
    config = config.for_context(max_model_len or config.lengths[0])
    return Model(family, architecture, config, hf_config=hf_config)


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
            return name
    for name in names:
        if name in _WRAPPERS:
            return _text_model(hf_config, name)
    given = ", ".join(names)[:200]
    near = get_close_matches(given, known, cutoff=0.0)  # three of them
    raise UnknownArchitectureError(
        f"architecture {given} is unknown; known are {', '.join(near)} and "
        f"{len(known) - len(near)} others, which docs/models.md lists"
    )
