"""Each metadata key that changes a model's result is supported, or refused by its name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.core.errors import CheckpointError, JaxinferError, SourceError
from jaxinfer.core.progress import NoProgress
from jaxinfer.models import forward
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.nn.rope import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from jaxinfer.nn.rope import inverse_frequencies as frequencies
from jaxinfer.weights.gguf.config import hf_config_from_gguf
from jaxinfer.weights.gguf.header import GGUFHeader, read_header
from jaxinfer.weights.load import load_params
from kit.checkpoints import (
    DENSE_CONFIGS,
    random_hf_tensors,
    tiny_phi3_config,
    write_gguf,
)
from kit.gguf_hybrid import tiny_qwen3_5_config
from kit.gguf_rope import CASES, TOKEN_IDS, write_case
from kit.model_sources import resolve

CONFIGS = {
    **DENSE_CONFIGS,
    "phi3": tiny_phi3_config(rope_scaling=None),
    "qwen35": tiny_qwen3_5_config(),
}
READ_BY = {
    "qwen35": {"ssm.conv_kernel"},
    "granite": {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"},
}  # keys that an architecture reads, and others refuse


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFHeader]:
    folder = tmp_path_factory.mktemp("headers")
    return {
        arch: read_header(
            write_gguf(
                folder / f"{arch}.gguf", config, random_hf_tensors(build_model(config, "float32"))
            )
        )
        for arch, config in CONFIGS.items()
    }


def config_of(header: GGUFHeader, arch: str, **keys: Any) -> dict[str, Any]:
    """The config with more keys; a dot in a key is written as two underscores."""
    more = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return hf_config_from_gguf(replace(header, metadata={**header.metadata, **more}), {})


YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "olmo2"])
@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        pytest.param({"rope__scale_linear": 4.0}, LinearScaling(4.0), id="older name"),
        pytest.param({"rope__scaling__factor": 4.0}, LinearScaling(4.0), id="no type"),
        pytest.param({"rope__scale_linear": 1.0}, None, id="older name, one"),
        pytest.param({"rope__scale_linear": 0.0}, None, id="older name, not set"),
        pytest.param(
            {"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, LinearScaling(4.0), id="both"
        ),
        pytest.param(
            {"rope__scaling__type": "linear", "rope__scale_linear": 4.0},
            LinearScaling(4.0),
            id="older name with a type",
        ),
        pytest.param(
            {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None, id="switched off"
        ),
        pytest.param(YARN, YarnScaling(4.0, 256), id="yarn over the context"),
        pytest.param(
            YARN | {"rope__scaling__original_context_length": 64, "rope__scaling__finetuned": True},
            YarnScaling(4.0, 64),
            id="yarn",
        ),
        pytest.param(
            YARN | {"rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0},
            YarnScaling(4.0, 256, beta_fast=16.0, beta_slow=2.0),
            id="yarn's betas",
        ),
        pytest.param(
            YARN | {"rope__scaling__attn_factor": 2.0},
            YarnScaling(4.0, 256, attn_factor=2.0),
            id="attn_factor",
        ),
        pytest.param(  # the value in a converted DeepSeek-R1-0528-Qwen3-8B
            YARN | {"rope__scaling__yarn_attn_factor": 0.878},
            YarnScaling(4.0, 256, attn_factor=0.878),
            id="yarn_attn_factor",
        ),
        pytest.param(
            YARN | {"rope__scaling__yarn_ext_factor": 1.0}, YarnScaling(4.0, 256), id="ext_factor"
        ),
    ],
)
def test_rope_scaling(
    headers: dict[str, GGUFHeader], arch: str, keys: dict[str, Any], scaling: Any
) -> None:
    config = build_model(config_of(headers[arch], arch, **keys), "float32").config
    assert config.ropes == (RopeConfig(16, 10000.0, scaling),)


@pytest.mark.parametrize("name", CASES)
def test_rope_is_llama_cpps(tmp_path: Path, name: str) -> None:
    golden = load_file(Path(__file__).parents[1] / "golden" / "data" / "gguf_rope.safetensors")
    source = resolve(write_case(tmp_path, name))
    model = build_model(source.hf_config, "float32")
    params = load_params(
        model,
        source,
        placement=default_placement(),
        cache_dir=tmp_path,
        seed=0,
        progress=NoProgress(),
    )
    logits = np.asarray(forward(model, params, TOKEN_IDS))[-1]
    np.testing.assert_allclose(logits, golden[name], atol=2e-6)  # the cases differ by 5e-3


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_sliding_window(headers: dict[str, GGUFHeader], arch: str) -> None:
    for stored, window in ((64, 64), (0, None)):
        hf_config = config_of(headers[arch], arch, attention__sliding_window=stored)
        layers = build_model(hf_config, "float32").config.layers
        windows = [layer.mixer.window for layer in layers]  # type: ignore[attr-defined]
        assert windows == [window, window]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_lists_of_one_value_for_all_layers(headers: dict[str, GGUFHeader], arch: str) -> None:
    lists = {
        "attention__head_count": [4, 4],
        "attention__head_count_kv": [2, 2],
        "feed_forward_length": [128, 128],
    }
    assert config_of(headers[arch], arch, **lists) == config_of(headers[arch], arch)
    with pytest.raises(CheckpointError, match=r"head_count_kv must be the same in every layer"):
        config_of(headers[arch], arch, attention__head_count_kv=[2, 1])


def test_gpt2_without_a_feed_forward_length(headers: dict[str, GGUFHeader]) -> None:
    """The format's list of GPT-2's keys does not have it."""
    header = headers["gpt2"]
    metadata = {k: v for k, v in header.metadata.items() if k != "gpt2.feed_forward_length"}
    assert hf_config_from_gguf(replace(header, metadata=metadata), {})["n_inner"] == 4 * 64


# Keys in files of these architectures, with values that change nothing.
HARMLESS: dict[str, Any] = {
    "vocab_size": 96,
    "attention.causal": True,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.scale": 0.25,  # one over the root of 16
    "attention.sliding_window": 0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 0.0,
    "embedding_scale": 1.0,
    "use_parallel_residual": False,
    "pooling_type": 3,
    "expert_count": 0,
    "expert_used_count": 0,
}


def test_head_dim_as_ollama_writes_it(headers: dict[str, GGUFHeader]) -> None:
    config = config_of(headers["llama"], "llama", attention__head_dim=16)
    assert config == config_of(headers["llama"], "llama")
    with pytest.raises(CheckpointError, match=r"attention\.head_dim is supported only as 16"):
        config_of(headers["llama"], "llama", attention__head_dim=8)


@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_values(headers: dict[str, GGUFHeader], arch: str, key: str) -> None:
    if key in READ_BY.get(arch, ()):
        pytest.skip("it is read")
    same = config_of(headers[arch], arch, **{key: HARMLESS[key]})
    assert same == config_of(headers[arch], arch)


def test_layout_of_metas_weights(headers: dict[str, GGUFHeader]) -> None:
    layout = "Meta AI original pth"  # older converters wrote this into files of Llama
    config = config_of(headers["llama"], "llama", tensor_data_layout=layout)
    assert config == config_of(headers["llama"], "llama")
    with pytest.raises(CheckpointError, match=r"qwen2\.tensor_data_layout is supported only as"):
        config_of(headers["qwen2"], "qwen2", tensor_data_layout=layout)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 18),
        ("rope.dimension_sections", [4, 4, 0, 0]),
        ("rope.freq_base_swa", 1e4),
        ("rope.freq_base", 0.0),
        ("rope.scale", 4.0),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.scaling.alpha", 8.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.a_key_of_tomorrow", 1.0),
        ("attention.causal", False),
        ("attention.scale", 0.5),
        ("attention.value_length", 8),
        ("attention.max_alibi_bias", 8.0),
        ("attention.clamp_kqv", 6.0),
        ("attention.a_key_of_tomorrow", False),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.125),
        ("residual_scale", 0.22),
        ("embedding_scale", 12.0),
        ("hidden_activation", "relu"),
        ("use_parallel_residual", True),
        ("swin_norm", True),
        ("tensor_data_layout", "jploski"),
        ("leading_dense_block_count", 1),
        ("expert_used_count", 2),
        ("expert_weights_scale", 2.5),
        ("ssm.conv_kernel", 4),
    ],
)
@pytest.mark.parametrize("arch", CONFIGS)
def test_refused(headers: dict[str, GGUFHeader], arch: str, key: str, value: Any) -> None:
    if key in READ_BY.get(arch, ()):
        pytest.skip("it is read")
    with pytest.raises(CheckpointError) as raised:
        config_of(headers[arch], arch, **{key: value})
    assert f"metadata key {arch}.{key} " in str(raised.value)
    assert str(headers[arch].path) in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (YARN | {"rope__scaling__yarn_attn_factor": 1.14}, "yarn_attn_factor is supported up to 1"),
        (YARN | {"rope__scaling__yarn_ext_factor": 0.0}, "ext_factor is supported only as 1"),
        ({"rope__scaling__type": "yarn"}, r"lacks the metadata key llama\.rope\.scaling\.factor"),
        ({"rope__scaling__factor": -2.0}, "scaling.factor must be a positive number, got -2.0"),
        (
            {"attention__sliding_window": 64, "attention__sliding_window_pattern": 2},
            "sliding_window_pattern is not supported beside a window",
        ),
    ],
)
def test_refused_together(
    headers: dict[str, GGUFHeader], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(headers["llama"], "llama", **keys)


def published_keys() -> Iterator[str]:
    """Every key of an architecture that the format's own package knows, without the prefix."""
    classes = [gguf.constants.Keys]
    while classes:
        members = vars(classes.pop())
        classes += [value for value in members.values() if isinstance(value, type)]
        for value in members.values():
            if isinstance(value, str) and value.startswith("{arch}."):
                yield value.removeprefix("{arch}.").format(dense="dense_2", id=0)


# No logit of our models depends on these: sizes that are also in the tensors' shapes, remarks, the
# epsilon of the other kind of norm, and keys that have a meaning only together with another key.
WITHOUT_EFFECT = {
    *("vocab_size", "pooling_type", "rope.scaling.finetuned"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    *("attention.sliding_window_pattern", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}


@pytest.mark.parametrize("arch", CONFIGS)
def test_no_published_key_is_ignored(headers: dict[str, GGUFHeader], arch: str) -> None:
    """A nonsense value of each key changes the config, or is refused by name."""
    before, ignored = config_of(headers[arch], arch), set()
    for key in published_keys():
        try:
            if config_of(headers[arch], arch, **{key: 7}) == before:
                ignored.add(key)
        except JaxinferError as error:
            words = {"block_count": ["blocks"], "attention.key_length": ["attention.value_length"]}
            # in a file of Llama seven experts make it a Mixtral
            words["expert_count"] = ["mixture of experts", "llama.expert_used_count"]
            assert any(word in str(error) for word in (key, *words.get(key, ()))), key
    assert ignored <= WITHOUT_EFFECT


def test_both_rope_scalings(tmp_path: Path) -> None:
    scaled = frequencies(RopeConfig(16, 10000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)))
    factors = (frequencies(RopeConfig(16, 10000.0)) / scaled).astype(np.float32)
    for arch, message in (("llama", "scales rope twice"), ("gpt2", "has no rope")):
        config = CONFIGS[arch]
        path = write_gguf(
            tmp_path / f"{arch}.gguf",
            config,
            random_hf_tensors(build_model(config, "float32")),
            extra={"rope_freqs.weight": factors},
            metadata={"llama.rope.scale_linear": 2.0},
        )
        with pytest.raises(CheckpointError, match=message):
            resolve(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "adapter"}, "holds no model: its general.type is 'adapter'"),
        ({"general.type": "imatrix"}, "holds no model: its general.type is 'imatrix'"),
        ({"adapter.lora.alpha": 16.0}, r"has the metadata key adapter\.lora\.alpha"),
        ({"xielu.beta": 0.5}, r"has the metadata key xielu\.beta"),
        ({"split.count": 3, "split.no": 1}, "one part of a GGUF file that is split into 3"),
    ],
)
def test_file_that_is_not_a_whole_model(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    config = CONFIGS["llama"]
    tensors = random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    with pytest.raises(SourceError, match=message):
        resolve(path)


def test_remarks_and_sampling_defaults(tmp_path: Path) -> None:
    """Keys that describe the file change nothing; sampling defaults are the model's own."""
    config = CONFIGS["llama"]
    remarks = {
        "general.type": "model",
        "general.author": "the authors",
        "general.file_type": 7,
        "quantize.imatrix.file": "imatrix.dat",
        "split.count": 0,
        "some.tool": "1.0",
    }
    sampling = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.05}
    metadata = remarks | {f"general.sampling.{key}": value for key, value in sampling.items()}
    tensors = random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    generation = resolve(path).generation_config
    assert {key: value for key, value in generation.items() if not key.endswith("_id")} == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }


def test_another_quantisation(headers: dict[str, GGUFHeader]) -> None:
    header = headers["llama"]
    metadata = {**header.metadata, "general.quantization_version": 1}
    with pytest.raises(CheckpointError, match=r"general\.quantization_version is 1; only 2"):
        hf_config_from_gguf(replace(header, metadata=metadata), {})
