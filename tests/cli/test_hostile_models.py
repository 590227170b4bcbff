"""A damaged or hostile model is one sentence on stderr and exit code 1, whatever the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jaxinfer.cli.main import cli

SIZES = ("--max-num-seqs=2", "--max-num-batched-tokens=64", "--max-model-len=128")


def _config(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _text(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def _index(weight_map: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "weights.safetensors")
        index = f'{{"weight_map": {weight_map}}}'
        (folder / "model.safetensors.index.json").write_text(index)

    return change


def _header(folder: Path) -> None:
    header = b"[" * 100_000
    content = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(content)


DEEP = "[" * 100_000
# the damage, words of the sentence, and the commands that read the file
MODELS: dict[str, tuple[Callable[[Path], Any], str, tuple[str, ...]]] = {
    "layers": (
        _config(num_hidden_layers=10**9),
        "'num_hidden_layers' is 1000000000, and at most 10000",
        ("inspect", "generate", "convert"),
    ),
    "nested config": (
        _text("config.json", DEEP),
        "config.json is not JSON (its values are nested too deep)",
        ("inspect", "generate", "convert", "export"),
    ),
    "nested header": (
        _header,
        "model.safetensors has a corrupt header (",
        ("inspect", "generate", "convert", "export"),
    ),
    "index": (_index('{"a": 1}'), "is not a safetensors index", ("inspect", "convert")),
    "index outside": (
        _index('{"a": "../x.safetensors"}'),
        "which is outside its folder",
        ("inspect", "convert"),
    ),
    "generation_config": (
        _text("generation_config.json", '{"a": ' + DEEP),
        "generation_config.json is not JSON",
        ("inspect", "generate"),
    ),
    "group size": (
        _config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 0}),
        "group_size' must be a positive number or -1",
        ("inspect",),
    ),
    "modules": (_text("modules.json", DEEP), "modules.json cannot be read", ("inspect",)),
    "nested tokenizer": (
        _text("tokenizer.json", '{"model": ' + DEEP),
        "tokenizer.json cannot be read",
        ("generate", "export"),
    ),
    "length": (
        _text("tokenizer_config.json", '{"model_max_length": Infinity}'),
        "model_max_length of tokenizer_config.json is inf",
        ("generate", "export"),
    ),
}


@pytest.mark.parametrize(
    ("name", "command"), [(name, one) for name, (_, _, used) in MODELS.items() for one in used]
)
def test_one_sentence(model_folder: Path, tmp_path: Path, name: str, command: str) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    damage, words, _ = MODELS[name]
    damage(folder)
    cache = f"--cache-dir={tmp_path / 'cache'}"
    arguments = {
        "inspect": (str(folder), *SIZES),
        "generate": (f"--model={folder}", cache, *SIZES, "hello"),
        "convert": (str(folder), "--quantization=int8", f"--output={tmp_path / 'out'}"),
        "export": (str(folder), str(tmp_path / "out")),
    }[command]
    result = CliRunner().invoke(cli, [command, *arguments], catch_exceptions=False)
    lines = [line for line in result.stderr.splitlines() if line]
    assert result.exit_code == 1, result.stderr
    assert words in lines[-1] and lines[-1].startswith("jaxinfer: error: ")
    assert "Traceback" not in result.stderr and len(lines[-1]) < 600
    assert not (tmp_path / "out").exists()
