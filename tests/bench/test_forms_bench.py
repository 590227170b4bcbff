"""bench.forms fails where a form is slower than bf16; its file of Q4_K_M needs no data."""

from __future__ import annotations

import json
from pathlib import Path

from bench import forms
from jaxinfer.core.progress import NoProgress
from jaxinfer.weights.sources import resolve_source

CONFIG = json.loads((forms.SHAPES / "qwen2.5-1.5b" / "config.json").read_text())


def test_what_is_slower_is_named() -> None:
    rows = {"bf16": {"b1": 1.0, "b8": 2.0}, "int4": {"b1": 0.5, "b8": 2.01}}
    assert forms.slower(rows) == []
    rows["int8"] = {"b1": 1.1, "b8": 2.0}
    assert forms.slower(rows) == ["int8 b1: 1.100 ms, bf16 1.000"]


def test_the_file_of_q4_k_m_has_its_forms(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 2, "vocab_size": 256}
    given = forms.settings_of(forms.MIXED, config, tmp_path)["model"]
    source = resolve_source(given, cache_dir=tmp_path, progress=NoProgress(), load_format="dummy")
    assert source.hf_config["intermediate_size"] == config["intermediate_size"]
    found = {str(form) for form in source.forms.values()}
    assert found == {"int4 g32 offsets supers", "int8 g16 supers"}


def test_a_config_of_bf16_names_no_form(tmp_path: Path) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    for form, kept in ((forms.BASE, False), (forms.OWN, True)):
        (folder := tmp_path / form).mkdir()
        given = forms.settings_of(form, config, folder)["model"]
        own = json.loads((Path(given) / "config.json").read_text())
        assert ("quantization_config" in own) == kept
    assert forms.settings_of("int4", config, tmp_path)["quantization"] == "int4"
