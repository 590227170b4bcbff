"""``jaxinfer convert``: one line about what was made, one about what is wrong."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from jaxinfer.cli.main import cli


def convert(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["convert", *map(str, arguments)], catch_exceptions=False)


def test_folder(model_folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    ignore = "--ignore=re:.*layers.1.mlp"
    result = convert(model_folder, "--quantization", "int4", "-o", made, ignore)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{made} holds 11 matrices in int4, made in ")
    assert result.stderr.startswith("write weights: ")
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert all((made / name).read_bytes() == (model_folder / name).read_bytes() for name in names)


def test_unknown_scheme(model_folder: Path, tmp_path: Path) -> None:
    result = convert(model_folder, "--quantization=int3", "-o", tmp_path / "made")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "jaxinfer: error: quantization is 'int3'; it must be one of fp8, int8, int4\n"
    )
    assert not (tmp_path / "made").exists()


def test_missing_options(model_folder: Path) -> None:
    assert convert(model_folder).exit_code == 2
