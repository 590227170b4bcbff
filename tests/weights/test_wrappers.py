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
from jaxinfer.weights.plan import canonical_name, plan_params
from jaxinfer.weights.stacked_experts import UnstackedExperts
from kit.published_index import zeros

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
