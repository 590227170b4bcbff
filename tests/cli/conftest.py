"""A tiny model on disk, and the command line that runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli.main import cli
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.tokenizers import tiny_tokenizer_json, tiny_tokenizer_spec


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights, a byte-level tokenizer and a chat template."""
    config = tiny_llama_config(vocab_size=320, eos_token_id=319)
    tensors = random_hf_tensors(build_model(config, "float32"))
    folder = write_hf_folder(tmp_path_factory.mktemp("models") / "tiny", config, tensors)
    spec = tiny_tokenizer_spec()
    tokenizer_config = {**spec.tokenizer_config, "chat_template": spec.chat_template}
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 50, "temperature": 0.7}))
    return folder


@pytest.fixture(scope="session")
def tiny_arguments(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of ``generate`` for an engine with few buckets, compiled once for the session."""
    sizes = {"--max-num-seqs": 2, "--max-num-batched-tokens": 64, "--max-model-len": 128}
    arguments = [f"{name}={value}" for name, value in sizes.items()]
    return [
        f"--model={model_folder}",
        f"--cache-dir={tmp_path_factory.mktemp('cache')}",
        *arguments,
    ]


@pytest.fixture
def generate(tiny_arguments: list[str]) -> Callable[..., Result]:
    """Run ``jaxinfer generate`` on the tiny model."""

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        command = ["generate", *tiny_arguments, *arguments]
        return CliRunner().invoke(cli, command, input=stdin, catch_exceptions=False)

    return invoke
