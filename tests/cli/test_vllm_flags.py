"""Flags of ``vllm serve`` that jaxinfer does not have: the tables of ``engine.api.vllm_names``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jaxinfer.cli import serve as module
from jaxinfer.cli.main import cli
from jaxinfer.cli.serve_options import SETTINGS
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.api.vllm_args import IGNORED, RENAMED, engine_config, notices
from jaxinfer.engine.api.vllm_names import SEVERAL, SHORT, SWITCHES, UNSUPPORTED, WITHOUT_EFFECT
from kit.model_sources import resolve
from kit.tiny_models import tiny_config

NAMES = {name: group for group in (*WITHOUT_EFFECT, *UNSUPPORTED) for name in group.each}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The settings of each engine that ``jaxinfer serve`` would have started."""
    configs: list[EngineConfig] = []
    monkeypatch.setattr(module, "_serve", lambda engine, _server: configs.append(engine))
    return configs


def test_each_name_is_one_flag() -> None:
    assert sum(len(group.each) for group in (*WITHOUT_EFFECT, *UNSUPPORTED)) == len(NAMES)
    flags = [flag for setting in SETTINGS for flag in setting.flags]
    assert len(flags) == len({*flags})
    assert SWITCHES | SEVERAL | SHORT.keys() <= NAMES.keys()
    assert not NAMES.keys() & {RENAMED.get(one.name, one.name) for one in SETTINGS if one.help}


@pytest.mark.parametrize("group", WITHOUT_EFFECT, ids=lambda group: group.each[0])
def test_arguments_without_effect(group: Any) -> None:
    for name in group.each:
        assert engine_config("m", {name: "value"}) == EngineConfig(model="m")
        assert notices({name: "value"}) == [f"{name} has no effect: {IGNORED[name]}"]


@pytest.mark.parametrize("group", UNSUPPORTED, ids=lambda group: group.each[0])
def test_arguments_that_are_refused(group: Any) -> None:
    for name in group.each:
        for value in (None, False, "", {}, *group.values):
            assert engine_config("m", {name: value}) == EngineConfig(model="m")
        with pytest.raises(ConfigError) as caught:
            engine_config("m", {name: True if name in SWITCHES else "other"})
        assert str(caught.value).endswith(f" is not supported: {group.advice}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--attention-backend FLASH_ATTN", "attention_backend has no effect: kernels follow from"),
        ("-ac.backend=FLASH_ATTN", "attention_config has no effect"),
        ("--cudagraph-capture-sizes 1 2 4 --enable-eplb", "enable_eplb has no effect: devices"),
        ("--language-model-only", "language_model_only has no effect: models read text alone"),
        ("--limit-mm-per-prompt.image 0", "limit_mm_per_prompt has no effect"),
        ("--nnodes 1 --tool-strict-level auto --prefix_caching_hash_algo sha256", "BLAKE2"),
        ("-cc.mode 3", "compilation_config has no effect"),
    ],
)
def test_flags_without_effect(given: list[EngineConfig], line: str, words: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "m", *line.split()])
    assert result.exit_code == 0, result.output
    assert words in result.stderr
    assert given == [EngineConfig(model="m")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes 2", "nnodes='2' is not supported: use num_hosts"),
        ("--structured-outputs-config.backend xgrammar", "llguidance is the only backend"),
        ('--kv-transfer-config {"kv_role":"kv_both"}', "KV is not passed between engines"),
        ("--logits-processors a b", "use logit_bias, bad_words"),
        ("--enable-return-routed-experts", "answers have no such data"),
        ("-sc.method mtp", "speculative decoding is not supported"),
        ("--rope-theta 1e6", "use hf_overrides"),
    ],
)
def test_flags_that_are_refused(given: list[EngineConfig], line: str, words: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "m", *line.split()])
    assert result.exit_code == 1 and not given
    assert words in result.stderr and result.stderr.count("\n") == 1


def test_entries_of_an_object_one_by_one(given: list[EngineConfig]) -> None:
    line = (
        "--hf-overrides.rope_scaling.factor 2 --hf-overrides.architectures=['A'] --hf-overrides.a x"
    )
    line += " --hf-overrides.rope_scaling.rope-type linear"
    assert CliRunner().invoke(cli, ["serve", "m", *line.split()]).exit_code == 0
    assert json.loads(given[0].hf_overrides or "") == {
        "rope_scaling": {"factor": 2, "rope_type": "linear"},
        "architectures": "['A']",  # no JSON
        "a": "x",
    }


@pytest.mark.parametrize("value", ["[1]", "{", 3, "7"])
def test_overrides_that_are_no_object(value: Any) -> None:
    with pytest.raises(ConfigError, match="hf_overrides must be a JSON object"):
        EngineConfig(hf_overrides=value)


def test_overrides_replace_entries_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    inner = {**tiny_config("qwen2"), "model_type": "qwen2"}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner}
    path.write_text(json.dumps(config, default=dict))
    text = EngineConfig(hf_overrides={"text_config": {"rope_theta": 5.0}}).hf_overrides  # type: ignore[arg-type]
    plain, other = (
        resolve(path, load_format="dummy", hf_overrides=given) for given in (None, text)
    )
    assert other.hf_config == {**plain.hf_config, "rope_theta": 5.0}
    assert other.fingerprint != plain.fingerprint  # of what is kept of its weights


def test_a_gguf_file_has_no_config_to_override(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="hf_overrides replace entries of config.json, and "):
        resolve(path, hf_overrides="{}")
