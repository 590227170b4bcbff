"""``jaxinfer export``: a Hugging Face folder of any model."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

import jaxinfer
from jaxinfer.cli.main import cli
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf


def export(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)], catch_exceptions=False)


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    config = tiny_llama_config()
    tensors = random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, metadata={"tokenizer.chat_template": "hello"}
    )
    made = tmp_path / "made"
    result = export(path, made)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(
        f"{made} holds chat_template.jinja, config.json, generation_config.json, tokenizer.json, "
        "tokenizer_config.json, made in "
    )
    written = json.loads((made / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"] and written["hidden_size"] == 64


def test_weights(model_folder: Path, tmp_path: Path) -> None:
    result = export(model_folder, tmp_path / "made", "--weights", "--dtype=bfloat16")
    assert result.exit_code == 0, result.stderr
    assert "model.safetensors" in result.stdout
    m = jaxinfer.load(str(tmp_path / "made"))
    assert m.model.hf_config["dtype"] == "bfloat16"
    assert m.tokenizer is not None and m.tokenizer.has_chat_template


def test_errors_are_one_line(model_folder: Path, tmp_path: Path) -> None:
    result = export(model_folder, model_folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (f"jaxinfer: error: {model_folder} exists already; name a new folder\n")
    assert export(model_folder, tmp_path / "made", "--dtype=float16").exit_code == 2
    assert export(tmp_path / "none", tmp_path / "made").exit_code == 1
    assert not (tmp_path / "made").exists()
