"""``jaxinfer inspect`` on tiny models: the numbers are right and no weights are read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from jaxinfer.cli.main import cli
from jaxinfer.exec.run import device_memory
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit.checkpoints import tiny_llama_config, write_hf_folder
from kit.quantised_models import write_gpt_oss

SIZES = ("--max-num-seqs=2", "--max-num-batched-tokens=64", "--max-model-len=128")


def inspect(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["inspect", *map(str, arguments)], catch_exceptions=False)


def report(*arguments: str | Path) -> dict[str, Any]:
    result = inspect("--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_numbers(model_folder: Path) -> None:
    facts = report(model_folder, *SIZES)
    tensors = load_file(model_folder / "model.safetensors")
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["parameters"] == sum(tensor.size for tensor in tensors.values())
    assert facts["parameter_bytes"] == {"float32": 4 * facts["parameters"]}
    assert facts["checkpoint_bytes"] == {"F32": 4 * facts["parameters"]}
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim
    assert facts["num_pages"] == 1 + 2 * 128 // 16
    assert facts["kv_cache_bytes"] == facts["num_pages"] * 16 * facts["kv_bytes_per_token"]
    assert {"d1", "d2", "p64x2"} <= set(facts["buckets"])


def test_dtype_and_memory_budget(model_folder: Path) -> None:
    sizes = ("--max-num-seqs=16", "--kv-cache-memory-bytes=100000")
    facts = report(model_folder, "--dtype=bfloat16", *sizes)
    assert facts["parameter_bytes"] == {"bfloat16": 2 * facts["parameters"]}
    assert facts["kv_cache_bytes"] <= 100_000 < facts["kv_cache_bytes"] * 1.2
    assert facts["max_model_len"] == 256


def test_sizes_have_units_and_may_come_from_a_file(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max-num-seqs: 2\nport: 1\n")
    flags = (
        "--config",
        file,
        "--max-model-len=0.1k",
        "--page-size=8",
        "--kv-cache-memory-bytes=1m",
    )
    facts = report("--model", model_folder, *flags)
    assert (facts["max_model_len"], facts["max_num_seqs"], facts["page_size"]) == (100, 2, 8)


def test_text(model_folder: Path) -> None:
    lines = inspect(model_folder, *SIZES).stdout.splitlines()
    assert "model            tiny" in lines
    assert "architecture     LlamaForCausalLM (family llama)" in lines
    assert "context          256 tokens; 128 served" in lines


def test_sampling_defaults(model_folder: Path, tmp_path: Path) -> None:
    assert report(model_folder, *SIZES)["sampling"] == {"top_k": 50, "temperature": 0.7}
    lines = inspect(model_folder, *SIZES).stdout.splitlines()
    assert "sampling         temperature 0.7, top_k 50 (generation_config.json)" in lines
    folder = write_hf_folder(tmp_path / "bare", tiny_llama_config())
    assert report(folder, "--load-format=dummy")["sampling"] == {}
    assert "no defaults of its own" in inspect(folder, "--load-format=dummy").stdout


def test_config_alone(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "bare", tiny_llama_config())
    assert report(folder, "--load-format=dummy")["checkpoint_bytes"] == {}
    assert "random weights" in inspect(folder, "--load-format=dummy").stdout


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss(tmp_path_factory.mktemp("mixture"))


def test_a_quantised_mixture(mixture: Path) -> None:
    """Seven experts of three; each weight with the bytes of its form."""
    facts = report(mixture, *SIZES)
    config = json.loads((mixture / "config.json").read_text())
    layers, width, inner = (
        config[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    assert facts["experts"]["count"] == 7 and facts["experts"]["chosen"] == 3
    assert facts["experts"]["layers"] == layers
    of_expert = 3 * width * inner + 2 * inner + width  # with the biases
    assert facts["experts"]["unused_parameters"] == layers * 4 * of_expert
    for name, count in (("gate_up", 2 * inner * width), ("down", width * inner)):
        (form, nbytes), *others = facts["weights"][f"layers_0/{name}"].items()
        assert form.startswith("fp4") and not others
        assert nbytes == 7 * (count // 2 + count // 32 * 2)  # halves of bytes, scales in bfloat16
    assert facts["weights"]["layers_0/router"] == {"float32": 4 * 7 * width}
    total = sum(nbytes for forms in facts["weights"].values() for nbytes in forms.values())
    assert total == facts["weight_bytes"] == sum(facts["parameter_bytes"].values())
    assert facts["memory_bytes"] > total and facts["misfit"] is None
    stack = "model.layers.0.mlp.experts.down_proj"
    assert facts["quantised_tensors"][stack].startswith("fp4")
    lines = inspect(mixture, *SIZES).stdout.splitlines()
    assert any(
        re.match(r"experts +7 in each of \d layers; a token uses 3 of them", x) for x in lines
    )
    assert any(re.match(r"in memory .*fp4", line) for line in lines)


def test_a_model_that_the_machine_cannot_hold(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is described all the same."""
    monkeypatch.setattr(device_memory.os, "sysconf", lambda name: 16)  # 256 bytes
    result = inspect(mixture, *SIZES)
    assert result.exit_code == 0
    assert re.search(r"^weights +[\d.]+ kB; the memory has 256 B$", result.stdout, re.MULTILINE)
    sentence = r"the model does not fit: its weights take .* and this machine has .*; use a smaller"
    assert re.search(rf"^note +{sentence}", result.stdout, re.MULTILINE)
    assert re.match(sentence, report(mixture, *SIZES)["misfit"])


def test_no_weights_are_read(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SafetensorsCheckpoint, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(SafetensorsCheckpoint, "read", refuse)
    report(model_folder, *SIZES)


def test_weights_of_another_model(model_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(model_folder / "model.safetensors")
    del tensors["model.norm.weight"]
    folder = write_hf_folder(tmp_path / "broken", tiny_llama_config(vocab_size=320))
    save_file(tensors, folder / "model.safetensors")
    result = inspect(folder)
    assert result.exit_code == 1
    assert "model.norm.weight" in result.stderr


def test_unknown_architecture(tmp_path: Path) -> None:
    config = tiny_llama_config(architectures=["ReformerForCausalLM"])
    result = inspect(write_hf_folder(tmp_path / "mamba", config), "--load-format=dummy")
    assert result.exit_code == 1
    assert "ReformerForCausalLM is unknown; known are " in result.stderr
