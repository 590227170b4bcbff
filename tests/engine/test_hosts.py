"""An engine on two hosts, which are two processes here, answers as on one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kit.hosts import answers, answers_of_two


def check(folder: Path, name: str, devices: int) -> None:
    expected = answers(folder, name)
    found = answers_of_two(folder, name, devices)
    refused, after = found.pop("refused"), found.pop("after")
    np.testing.assert_allclose(found.pop("logprobs"), expected.pop("logprobs"), atol=5e-3)
    assert found == expected
    assert after == expected["greedy"]
    assert min(expected["cached"][1:]) > 0, "no prefix was found again"
    assert expected["preemptions"] > 0, "no sequence was preempted"
    assert refused == [
        "weights are updated only in an engine of one host, and this one has 2",
        "an engine of several hosts cannot sleep; end it to free its memory",
        "parameters are read only in an engine of one host, and this one has 2",
    ]


def test_two_hosts(tmp_path: Path) -> None:
    check(tmp_path, "llama", 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "devices"),
    [("qwen3_moe", 2), ("mixtral", 1), ("deepseek_v2", 2), ("qwen3_5", 2), ("gemma4_all", 1)],
)
def test_two_hosts_nightly(tmp_path: Path, name: str, devices: int) -> None:
    check(tmp_path, name, devices)
