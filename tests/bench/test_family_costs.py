"""The costs of each family, from a report of tests."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from bench.family_costs import costs, family_of, options_of, table
from jaxinfer.models import build_model
from kit.tiny_models import tiny_config

REPORT = """<testsuites><testsuite>
<testcase name="test_logits[gemma3n_active]" time="1.5"/>
<testcase name="test_logits[falcon_7b-float32]" time="0.25"/>
<testcase name="test_architecture[Gemma3nForCausalLM]" time="0.5"/>
<testcase name="test_of_no_family[sampled-2]" time="9"/>
<testcase name="test_without_parameters" time="9"/>
</testsuite></testsuites>"""


def test_the_table_has_lines_options_and_seconds(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    found = costs(report)
    assert found["gemma3n"].seconds == 2.0 and found["falcon"].seconds == 0.25
    assert found["llama"].seconds == 0.0 and found["llama"].lines > 30
    assert {"residual", "gate_cutoff", "end"} <= {*found["gemma3n"].options}
    assert table(found).splitlines()[-1].endswith("| 2 |")


def test_a_test_belongs_to_the_longest_name() -> None:
    names = {"GemmaForCausalLM": "gemma", "gemma3n_active": "gemma3n", "x": "gemma3"}
    assert family_of("gemma3_window-float32", names) == "gemma3"
    assert family_of("float32-gemma3n_active", names) == "gemma3n"
    assert family_of("GemmaForCausalLM", names) == "gemma"
    assert family_of("sampled-2", names) == ""


def test_options_are_fields_that_differ_from_their_defaults() -> None:
    config = build_model(tiny_config("qwen3"), jnp.float32).config
    assert "qk_norm" in {*options_of(config)}
    assert "window" not in {*options_of(config)}
