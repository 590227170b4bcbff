"""``jaxinfer inspect`` on tiny models: the numbers are right and no weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from jaxinfer.cli.main import cli
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from kit.checkpoints import tiny_llama_config, write_hf_folder

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
    assert "sampling         temperature 0.7, top_k 50" in lines
    folder = write_hf_folder(tmp_path / "bare", tiny_llama_config())
    assert report(folder, "--load-format=dummy")["sampling"] == {}
    assert "no defaults of its own" in inspect(folder, "--load-format=dummy").stdout


def test_config_alone(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "bare", tiny_llama_config())
    assert report(folder, "--load-format=dummy")["checkpoint_bytes"] == {}
    assert "random weights" in inspect(folder, "--load-format=dummy").stdout


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
    config = tiny_llama_config(architectures=["MambaForCausalLM"])
    result = inspect(write_hf_folder(tmp_path / "mamba", config), "--load-format=dummy")
    assert result.exit_code == 1
    assert "MambaForCausalLM is unknown; known are LlamaForCausalLM" in result.stderr
