"""``bench offload`` over a stand-in for the engine: lists of prompts and a clock of its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.bench import offload, verify
from jaxinfer.core.errors import BenchError
from jaxinfer.core.tiers import TierStats

MS = {"cold": 4.0, "device": 1.0, "host": 2.0}


class Engine:
    """Keeps the latest prompts up to ``capacity`` tokens, and evicted ones in the host tier."""

    def __init__(self, capacity: int, *, loses: bool = False) -> None:
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=50))
        self._capacity, self._loses = capacity, loses
        self._device: list[tuple[int, ...]] = []
        self._host: set[tuple[int, ...]] = set()
        self._restored, self._looks, self._now = 0, 0, 0

    def perf_counter_ns(self) -> int:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += round(1e9 * seconds)

    def stats(self) -> Any:
        self._looks += 1
        size = 2**30 if self._looks > 1 else 0  # the memory is not locked at once
        tiers = TierStats(host_size=size, restored_bytes=self._restored, restore_seconds=1.0)
        return SimpleNamespace(tiers=tiers)

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        prompt = tuple(prompts[0]["prompt_token_ids"])
        assert sampling.max_tokens == 1 and sampling.ignore_eos and not use_tqdm
        kind = "device" if prompt in self._device else "host" if prompt in self._host else "cold"
        self._now += round(1e6 * MS[kind])
        if kind == "host":
            self._restored += 4 * len(prompt)
        self._device = [*(one for one in self._device if one != prompt), prompt]
        while self._loses or sum(map(len, self._device)) > self._capacity:
            self._host.add(self._device.pop(0))
            if self._loses:
                break
        return [SimpleNamespace(num_cached_tokens=0 if kind == "cold" else len(prompt) - 1)]


def run(path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """The exit code and the engine's settings."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(offload, "engine_of", lambda settings: asked.update(settings) or engine)
    monkeypatch.setattr(offload, "time", engine)
    monkeypatch.setattr(offload, "device_of", lambda _: {"device": "none"})
    words = ["--lengths=16,64", "--num-iters=3", "--kv-offloading-size=1", f"--output={path}"]
    return offload.main(words, lambda _: {"max_num_seqs": 2}), asked


def test_a_prompt_is_cold_then_on_the_device_then_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, settings = run(tmp_path / "run", Engine(12 * 16), monkeypatch)
    assert code == 0
    assert settings["num_pages"] == 12 and settings["max_num_seqs"] == 2
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [row["length"] for row in result["tiers"]] == [16, 64]
    for row in result["tiers"]:
        assert {kind: row[kind] for kind in MS} == MS
        assert (row["cold_over_host"], row["cold_over_device"]) == (2, 4)
    series = json.loads((tmp_path / "run" / "run.json").read_text())["series"]
    facts = {one["name"]: one["facts"] for one in series}
    assert facts["host-64"]["restored_prompts"] == 3 and facts["host-64"]["reused_tokens"] == 63
    assert facts["cold-16"] == {"reused_tokens": 0}
    assert all(one["requests"] == 3 for one in series)
    assert "## First tokens" in (tmp_path / "run" / "report.md").read_text()
    assert verify.main([str(tmp_path / "run")]) == 0
    assert "cold / host" in capsys.readouterr().out


def test_a_prompt_that_left_the_device_at_once_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match=r"device at 16 tokens: 15 were reused and 64 bytes rest"):
        run(tmp_path / "run", Engine(12 * 16, loses=True), monkeypatch)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "partial"
