"""An engine on two hosts, which are two processes here, answers as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.cli.serve import check_settings
from jaxinfer.cli.settings import Value
from jaxinfer.core.errors import ArgumentError, ConfigError
from jaxinfer.engine.api.load import load
from kit.hosts import answers, answers_of_two


def check(folder: Path, name: str, rows: int, devices: int) -> None:
    expected = answers(folder, name, rows)
    found = answers_of_two(folder, name, rows, devices)
    refused, after = found.pop("refused"), found.pop("after")
    np.testing.assert_allclose(found.pop("logprobs"), expected.pop("logprobs"), atol=5e-3)
    assert found == expected
    assert after == expected["greedy"]
    if name != "qwen3_5":  # whose prompts are too short for a snapshot
        assert min(expected["cached"][1:]) > 0, "no prefix was found again"
    assert rows == 1 or expected["preemptions"] > 0, "no sequence was preempted"
    assert refused == [
        "weights are updated only in an engine of one host, and this one has 2",
        "an engine of several hosts cannot sleep; end it to free its memory",
        "parameters are read only in an engine of one host, and this one has 2",
    ]


def test_two_hosts(tmp_path: Path) -> None:
    check(tmp_path, "llama", 1, 1)


def test_what_only_one_host_can_do() -> None:
    given: dict[str, Any] = {"num_hosts": 2, "tensor_parallel_size": 2, "coordinator": "a:1"}
    with pytest.raises(ConfigError, match="host_rank is 1, and host 0 alone answers"):
        LLM("none", host_rank=1, **given)
    with pytest.raises(ArgumentError, match="keeps parameters on one host"):
        load("none", **given)
    values = {"model": "none", "data_parallel_size": 2, **given}
    with pytest.raises(ConfigError, match="data_parallel_size is of one host; leave it out"):
        check_settings({name: Value(value, "flag") for name, value in values.items()})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "devices"),
    [("llama", 2), ("qwen3_moe", 2), ("mixtral", 1), ("deepseek_v2", 2), ("qwen3_5", 2)],
)
def test_two_hosts_nightly(tmp_path: Path, name: str, devices: int) -> None:
    check(tmp_path, name, 3, devices)
