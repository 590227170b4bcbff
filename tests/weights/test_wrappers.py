"""Models of text and images, or sound, as transformers saves them: the text decoder is read whole.

``tests/golden/make_wrappers.py`` made configs and names; tests of golden files have values.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models import build_model
from jaxinfer.models.registry import may_stack_experts, text_config, wrapping_architectures
from jaxinfer.models.text_defaults import text_defaults
from jaxinfer.nn.decoder_config import AttentionConfig
from jaxinfer.weights.plan import canonical_name, plan_params
from jaxinfer.weights.stacked_experts import UnstackedExperts
from kit.published_index import zeros
from kit.tiny_models import tiny_config

DATA = Path(__file__).parents[1] / "golden" / "data" / "wrappers.json.gz"
SAVED: dict[str, dict[str, Any]] = json.loads(gzip.decompress(DATA.read_bytes()))
# with encoders of packages that make_wrappers.py lacks, around other wrappers, of published files
NOT_SAVED = {
    "FastVlmForConditionalGeneration",
    "InternVLChatModel",
    "KimiVLForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen3OmniMoeForConditionalGeneration",
}

LEFT_OUT = ("max_position_embeddings", "rms_norm_eps", "layer_norm_eps")


def tensors_of(architecture: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in SAVED[architecture]["tensors"].items()}


def planned(config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    own, files = text_config(config), zeros(tensors)
    plan_params(
        build_model(own, "float32"), UnstackedExperts(files) if may_stack_experts(own) else files
    )


def test_each_wrapper_has_names() -> None:
    assert {*wrapping_architectures()} - SAVED.keys() == NOT_SAVED


@pytest.mark.parametrize("architecture", SAVED)
def test_the_text_decoder_is_read_and_the_rest_is_known(architecture: str) -> None:
    config, tensors = SAVED[architecture]["config"], tensors_of(architecture)
    planned(config, tensors)
    model = build_model(text_config(config), "float32")
    with pytest.raises(CheckpointError, match="holds tensor .*model.other.weight"):
        planned(config, {**tensors, "model.other.weight": (1,)})
    names = {source.name for spec in model.param_specs for source in spec.sources}
    used = next(name for name in tensors if canonical_name(model.family, name) in names)
    with pytest.raises(CheckpointError, match="checkpoint has no tensor"):
        planned(config, {name: shape for name, shape in tensors.items() if name != used})


@pytest.mark.parametrize(
    ("published", "saved", "key", "names"),
    [
        (
            "InternVLChatModel",
            "InternVLForConditionalGeneration",
            "llm_config",
            {"vision_tower.": "vision_model.", "multi_modal_projector.": "mlp1."},
        ),
        (
            "KimiVLForConditionalGeneration",
            "Kimi_K25ForConditionalGeneration",
            "text_config",
            {"model.blocks.": "model.layers.", "mm_projector.": "multi_modal_projector."},
        ),
    ],
)
def test_published_names(published: str, saved: str, key: str, names: dict[str, str]) -> None:
    tensors = {}
    for name, shape in tensors_of(saved).items():
        for one, other in names.items():
            name = name.replace(one, other)
        tensors[name] = shape
    config = dict(SAVED[saved]["config"])
    planned({**config, "architectures": [published], key: config.pop("text_config")}, tensors)


def test_internvl_2_around_internlm_2() -> None:
    """Published names; transformers has no such text decoder."""
    text = {**tiny_config("internlm2"), "model_type": "internlm2"}
    sources = (one for spec in build_model(text, "float32").param_specs for one in spec.sources)
    tensors = {f"language_model.{one.name}": one.shape for one in sources}
    tensors |= {"mlp1.0.weight": (8,), "vision_model.embeddings.class_embedding": (1, 1, 8)}
    planned({"architectures": ["InternVLChatModel"], "llm_config": text}, tensors)


# The "text_config" of Gemma 3 4B, PaliGemma 3B, LLaVA 1.5 7B and Pixtral 12B, as published:
# transformers leaves out the values that are its defaults. Then width, layers, heads and their
# width, kv heads, vocabulary, context, epsilon.
SPARSE = [
    (
        "Gemma3ForConditionalGeneration",
        {
            **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"},
            **{"num_hidden_layers": 34, "sliding_window": 1024},
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        (2560, 34, 8, 256, 4, 262208, 131072, 1e-6),
    ),
    (
        "PaliGemmaForConditionalGeneration",
        {
            **{"hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma"},
            **{"num_attention_heads": 8, "num_hidden_layers": 18, "num_image_tokens": 256},
            **{"num_key_value_heads": 1, "torch_dtype": "float32", "vocab_size": 257216},
        },
        (2048, 18, 8, 256, 1, 257216, 8192, 1e-6),
    ),
    (
        "LlavaForConditionalGeneration",
        {
            **{"_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"]},
            **{"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05},
            **{"torch_dtype": "float16", "vocab_size": 32064},
        },
        (4096, 32, 32, 128, 32, 32064, 4096, 1e-5),
    ),
    (
        "LlavaForConditionalGeneration",
        {
            **{"head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336},
            **{"is_composition": True, "max_position_embeddings": 1024000, "model_type": "mistral"},
            **{"num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
            **{"rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072},
        },
        (5120, 40, 32, 128, 8, 131072, 1024000, 1e-5),
    ),
]


@pytest.mark.parametrize(("architecture", "text", "sizes"), SPARSE)
def test_sizes_that_a_text_config_leaves_out(
    architecture: str, text: dict[str, Any], sizes: tuple[float, ...]
) -> None:
    whole = {"architectures": [architecture], "text_config": text}
    made = build_model(text_config(whole), "bfloat16").config
    mixer = made.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    heads = (mixer.num_heads, mixer.head_dim, mixer.num_kv_heads)
    rest = (made.vocab_size, made.lengths[0], made.norm_eps)
    assert (made.hidden_size, len(made.layers), *heads, *rest) == sizes


def _has_defaults(config: dict[str, Any]) -> bool:
    """True for a decoder whose type has defaults; OPT's table of positions is a tensor."""
    kind = config.get("text_config", {}).get("model_type")
    return kind != "opt" and bool(text_defaults(kind))


NESTED = [name for name, saved in SAVED.items() if _has_defaults(saved["config"])]


@pytest.mark.parametrize("architecture", NESTED)
def test_every_text_decoder_has_defaults(architecture: str) -> None:
    """Keys that are no sizes of tensors may be missing in each of them."""
    config = SAVED[architecture]["config"]
    text = {key: value for key, value in config["text_config"].items() if key not in LEFT_OUT}
    planned({**config, "text_config": text}, tensors_of(architecture))


def test_a_model_may_have_other_defaults_than_its_text_type() -> None:
    config = SAVED["OmniASRForConditionalGeneration"]["config"]
    text = {key: one for key, one in config["text_config"].items() if key != "rms_norm_eps"}
    found = build_model(text_config({**config, "text_config": text}), "float32").config
    assert (found.norm_eps, text_defaults("llama")["rms_norm_eps"]) == (1e-5, 1e-6)


@pytest.mark.parametrize("architecture", ["Cosmos3Edge", "Cosmos3Omni"])
def test_what_makes_images_in_cosmos_is_left_out(architecture: str) -> None:
    name = f"{architecture}ForConditionalGeneration"
    others = ("layers.0.mlp_moe_gen.up_proj.weight", "layers.0.self_attn.add_q_proj.weight")
    others += ("norm_moe_gen.weight", "proj_in.weight", "time_embedder.linear_1.weight")
    others += ("audio_proj_out.weight", "action_modality_embed")
    planned(SAVED[name]["config"], tensors_of(name) | dict.fromkeys(others, (8,)))


@pytest.mark.parametrize("whole", ["Qwen2_5Omni", "Qwen3OmniMoe"])
def test_the_text_of_a_model_that_also_speaks(whole: str) -> None:
    inner = f"{whole}ThinkerForConditionalGeneration"
    tensors = {f"thinker.{name}": shape for name, shape in tensors_of(inner).items()}
    tensors |= {"talker.model.norm.weight": (8,), "code2wav.norm.weight": (8,)}
    config = {
        "architectures": [f"{whole}ForConditionalGeneration"],
        "thinker_config": SAVED[inner]["config"],
        "talker_config": {"hidden_size": 8},
    }
    planned(config, tensors)
