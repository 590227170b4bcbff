"""``TunixRollout`` against a stand-in of Tunix's classes, with its trainer's names and shapes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxinfer
from jaxinfer.core.errors import ArgumentError, ConfigError
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.served_weights import SMALL
from kit.tokenizers import TINY_VOCAB_SIZE

CONFIG = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE)
PAD, BOS = 0, 1
MAPPING = {  # the trainer's names, and those of another engine's arrays
    "embedder.input_embedding": ("model.embed.embedding", ("model", None)),
    "layers.*.input_layernorm.w": ("model.layers.*.input_layernorm.scale", (None,)),
    "layers.*.post_attention_layernorm.w": (
        "model.layers.*.post_attention_layernorm.scale",
        (None,),
    ),
    **{
        f"layers.*.attn.{name}.w": f"model.layers.*.self_attn.{name}.kernel"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    },
    **{
        f"layers.*.mlp.{name}.kernel": f"model.layers.*.mlp.{name}.weight"
        for name in ("gate_proj", "up_proj", "down_proj")
    },
    "final_norm.w": ("model.norm.scale", (None,)),
    "lm_head.w": ("model.lm_head", (None, "model")),
}


@dataclass
class RolloutConfig:
    """The fields of Tunix's class that are read."""

    max_tokens_to_generate: int = 12
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 8
    kv_cache_size: int = 64
    data_type: Any = jnp.float32
    eos_tokens: list[int] | None = None
    rollout_mapping_config: Any = None


@dataclass
class RolloutOutput:
    """Tunix's fields."""

    text: list[str]
    logits: Any
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


class Mapping:
    """Tunix's ``MappingConfig``, of a dict or the model's own."""

    def __init__(self, to_hf_mappings: Any) -> None:
        self.to_hf_mappings = to_hf_mappings

    @classmethod
    def build(cls, given: Any, model: Any, backend: str) -> Mapping:
        return cls(MAPPING if given is None else given["to_hf_mappings"])


class Letters:
    """A tokenizer with the methods of Tunix's adapter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 90 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return PAD


class Actor(nnx.Module):
    """The trainer's model: arrays by their dotted names."""

    def __init__(self, arrays: dict[str, jax.Array]) -> None:
        for name, array in arrays.items():
            *path, last = name.split(".")
            module: Any = self
            for part in path:
                if not hasattr(module, part):
                    setattr(module, part, nnx.Module())
                module = getattr(module, part)
            setattr(module, last, nnx.Param(array))


def trained(tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A checkpoint's tensors as Tunix's Llama has them: kernels are [inputs..., outputs...]."""
    heads = {"q_proj": (4, 16), "k_proj": (2, 16), "v_proj": (2, 16)}
    found: dict[str, jax.Array] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").removesuffix(".weight")
        module, last = name.replace("self_attn", "attn"), name.rpartition(".")[2]
        if last in heads:
            found[f"{module}.w"] = tensor.T.reshape(-1, *heads[last])
        elif last == "o_proj":
            found[f"{module}.w"] = tensor.T.reshape(4, 16, -1)
        elif last.endswith("_proj"):
            found[f"{module}.kernel"] = tensor.T
        elif last == "embed_tokens":
            found["embedder.input_embedding"] = tensor
        elif last == "lm_head":
            found["lm_head.w"] = tensor.T
        else:
            found[f"{'final_norm' if name == 'norm' else module}.w"] = tensor
    return {name: jnp.asarray(array) for name, array in found.items()}


def tensors_of(seed: int) -> dict[str, np.ndarray]:
    return random_hf_tensors(build_model(CONFIG, "float32"), seed=seed)


@pytest.fixture(scope="module")
def rollout_class() -> Iterator[Any]:
    names = ("tunix", "tunix.generate", "tunix.generate.mappings", "tunix.rl", "tunix.rl.rollout")
    modules = {name: ModuleType(name) for name in (*names, "tunix.rl.rollout.base_rollout")}
    base: Any = modules["tunix.rl.rollout.base_rollout"]
    base.BaseRollout, base.RolloutConfig, base.RolloutOutput = object, RolloutConfig, RolloutOutput
    mappings: Any = modules["tunix.generate.mappings"]
    mappings.MappingConfig = Mapping
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        from jaxinfer.rl import TunixRollout

        yield TunixRollout
        sys.modules.pop("jaxinfer.rl.tunix_rollout", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("model"), CONFIG, tensors_of(1))


@pytest.fixture(scope="module")
def rollout(rollout_class: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"))
    settings = {**SMALL, "cache_dir": str(tmp_path_factory.mktemp("cache"))}
    del settings["max_model_len"]
    config = RolloutConfig()
    actor = Actor(trained(tensors_of(0)))
    return rollout_class(actor, Letters(), mesh, config, model=str(folder), **settings)


def test_the_trainers_weights_are_those_of_a_checkpoint(
    rollout: Any, folder: Path, tmp_path: Path
) -> None:
    """The engine begins with the actor's weights, not the folder's, and takes new ones."""
    loaded = jaxinfer.load(
        str(folder), dtype="float32", cache_dir=str(tmp_path), skip_tokenizer_init=True
    )
    first = by_path(rollout.llm.model.params)
    rollout.update_params(nnx.state(Actor(trained(tensors_of(1))), nnx.Param))
    assert rollout.llm.stats().weight_version == 1
    for path, array in by_path(rollout.llm.model.params).items():
        np.testing.assert_array_equal(array, by_path(loaded.params)[path])
        assert "norm" in path or not np.array_equal(array, first[path])
    state = nnx.to_pure_dict(nnx.state(Actor(trained(tensors_of(0)))))
    rollout.update_params(state)
    for array in jax.tree.leaves(state):
        array.delete()  # as a trainer does that donates them to its next step
    for path, array in by_path(rollout.llm.model.params).items():
        np.testing.assert_array_equal(array, first[path])
    assert rollout.model() is None  # else the trainer takes the weights for its own


def test_answers_have_what_the_trainer_reads(rollout: Any) -> None:
    prompts = ["abc", "defgh", "abc", "abc"]
    config = RolloutConfig(seed=jax.random.key(3), eos_tokens=list(range(3, 20)))
    output = rollout.generate(prompts, config)
    lengths = [len(tokens) for tokens in output.tokens]
    assert output.logits is None and min(lengths) < 12
    for tokens, text, logprobs in zip(output.tokens, output.text, output.logprobs, strict=True):
        assert text == " ".join(map(str, tokens)) and len(logprobs) == len(tokens)
        ends = [3 <= token < 20 for token in tokens]
        assert not any(ends[:-1]) and (ends[-1] or len(tokens) == 12)  # the end token is kept
    padded = output.left_padded_prompt_tokens
    assert padded.shape == (4, 8)
    assert padded[0].tolist() == [PAD] * 4 + [BOS, 7, 8, 9]
    assert (
        len({text for text, prompt in zip(output.text, prompts, strict=True) if prompt == "abc"})
        > 1
    )
    completions = np.full((4, 12), PAD, np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    scores = rollout.get_per_token_logps(jnp.asarray(padded), jnp.asarray(completions))
    for row, tokens, logprobs in zip(scores, output.tokens, output.logprobs, strict=True):
        np.testing.assert_allclose(
            row[: len(tokens)], np.where(tokens == PAD, 0, logprobs), atol=1e-5
        )
        assert not row[len(tokens) :].any()


def test_logprobs_are_scaled_and_not_truncated(rollout: Any) -> None:
    """Greedy, and at a temperature with top_k 1, the same tokens; of log_softmax(logits / 0.5)."""
    config = RolloutConfig(temperature=0.5, top_k=1, seed=5, max_tokens_to_generate=4)
    output = rollout.generate(["abc"], config)
    greedy = rollout.generate(["abc"], replace(config, temperature=0.0))
    assert output.tokens[0].tolist() == greedy.tokens[0].tolist()
    ids = [BOS, 7, 8, 9, *output.tokens[0].tolist()]
    logits = rollout.llm.model.forward(ids)[3:-1]
    for scale, found in ((0.5, output), (1.0, greedy)):
        expected = jax.nn.log_softmax(logits / scale)[jnp.arange(len(ids) - 4), output.tokens[0]]
        np.testing.assert_allclose(found.logprobs[0], expected, atol=1e-5)
    assert output.logprobs[0].max() < 0  # after top_k they would all be 0


def test_a_run_can_be_repeated(rollout: Any) -> None:
    config = RolloutConfig(seed=7)
    runs = []
    for _ in range(2):
        rollout._num_requests = 0
        runs.append(rollout.generate(["ab", "ab"], config).text)
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
    assert rollout.generate(["ab"], config).text[0] not in runs[0]


def test_a_long_prompt_widens_the_padding(rollout: Any) -> None:
    output = rollout.generate(["abcdefghij"], RolloutConfig(max_tokens_to_generate=1))
    assert output.left_padded_prompt_tokens.shape == (1, 16)


def test_weights_that_do_not_fit_are_named(rollout: Any) -> None:
    before, good = rollout.llm.model.params, trained(tensors_of(0))
    wrong = [
        ({"final_norm.w": None}, "the trainer has no model.norm.weight"),
        (
            {"layers.1.attn.q_proj.w": good["final_norm.w"]},
            r"q_proj.w has shape \(64,\), and model",
        ),
        (
            {"layers.9.mlp.up_proj.kernel": good["embedder.input_embedding"]},
            "layers.9.mlp.up_proj.kernel is not one",
        ),
        ({"rope.w": good["final_norm.w"]}, "array rope.w has no tensor in to_hf_mappings"),
        ({"layers.0.attn.q_proj.w_lora_a": good["embedder.input_embedding"]}, "is a LoRA adapter"),
        ({"final_norm.w": jnp.full(64, jnp.nan)}, "final_norm holds NaN or infinity"),
    ]
    for changes, message in wrong:
        arrays = {name: array for name, array in {**good, **changes}.items() if array is not None}
        with pytest.raises(ArgumentError, match=message):
            rollout.update_params(nnx.state(Actor(arrays), nnx.Param))
    assert rollout.llm.model.params is before


def test_without_tunix_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import jaxinfer.rl

    monkeypatch.delitem(sys.modules, "jaxinfer.rl.tunix_rollout", raising=False)
    monkeypatch.setitem(sys.modules, "tunix", None)
    monkeypatch.setitem(sys.modules, "tunix.generate.mappings", None)
    with pytest.raises(ConfigError, match="TunixRollout needs google-tunix; install it with pip"):
        _ = jaxinfer.rl.TunixRollout
    with pytest.raises(AttributeError, match="no attribute 'Rollout'"):
        _ = jaxinfer.rl.Rollout  # type: ignore[attr-defined]
