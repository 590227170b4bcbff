"""``bench offload`` over a stand-in for the engine, in simulated time."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.bench import link, offload, verify
from jaxinfer.core.errors import BenchError
from jaxinfer.core.tiers import TierStats

MS = {"cold": 4.0, "device": 1.0, "host": 2.0}
STEP = 5e-4  # seconds of a decode step; twice as many while a prompt is restored


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(selectors.DefaultSelector())
        inner = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return inner(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Engine:
    """Keeps the latest prompts up to ``capacity`` tokens, and evicted ones in the host tier."""

    def __init__(self, capacity: int, *, loses: bool = False) -> None:
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=50))
        self._capacity, self._loses = capacity, loses
        self._device: list[tuple[int, ...]] = []
        self._host: set[tuple[int, ...]] = set()
        self._restored, self._looks, self._restores = 0, 0, 0
        self.num_decoding = self.most_decoding = 0

    def stats(self) -> Any:
        self._looks += 1
        size = 2**30 if self._looks > 1 else 0  # the memory is not locked at once
        seconds = self._restored / 4e9
        tiers = TierStats(host_size=size, restored_bytes=self._restored, restore_seconds=seconds)
        return SimpleNamespace(tiers=tiers)

    async def generate(self, given: Any, sampling: Any) -> AsyncGenerator[Any]:
        prompt = tuple(given["prompt_token_ids"])
        assert sampling.ignore_eos and sampling.temperature == 0
        if sampling.max_tokens > 1:
            async for output in self._decode(sampling.max_tokens):
                yield output
            return
        kind = "device" if prompt in self._device else "host" if prompt in self._host else "cold"
        self._restores += kind == "host"
        await asyncio.sleep(1e-3 * MS[kind])
        self._restores -= kind == "host"
        if kind == "host":
            self._restored += 4 * len(prompt)
        self._device = [*(one for one in self._device if one != prompt), prompt]
        while self._loses or sum(map(len, self._device)) > self._capacity:
            self._host.add(self._device.pop(0))
            if self._loses:
                break
        yield SimpleNamespace(num_cached_tokens=0 if kind == "cold" else len(prompt) - 1)

    async def _decode(self, count: int) -> AsyncGenerator[Any]:
        self.num_decoding += 1
        self.most_decoding = max(self.most_decoding, self.num_decoding)
        try:
            for _ in range(count):
                await asyncio.sleep(STEP * (2 if self._restores else 1))
                yield SimpleNamespace(num_cached_tokens=0)
        finally:
            self.num_decoding -= 1

    async def shutdown(self) -> None:
        assert not self.num_decoding


def run(
    path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
    own: dict[str, Any] | None = None,
) -> tuple[int, dict[str, Any]]:
    """The exit code and the engine's settings."""
    asked: dict[str, Any] = {}
    loop = Loop()

    async def made(settings: dict[str, Any]) -> Engine:
        asked.update(settings)
        return engine

    async def at_once(function: Callable[..., Any], *given: Any) -> Any:
        return function(*given)

    def ran(main: Any) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main)

    functions = {"run": ran, "sleep": asyncio.sleep, "to_thread": at_once}
    functions |= {"create_task": asyncio.create_task, "gather": asyncio.gather}
    monkeypatch.setattr(offload, "asyncio", SimpleNamespace(**functions))
    clock = SimpleNamespace(perf_counter_ns=lambda: round(1e9 * loop.now))
    monkeypatch.setattr(offload, "time", clock)
    monkeypatch.setattr(offload, "engine_of", made)
    monkeypatch.setattr(offload, "device_of", lambda _: {"device": "none"})
    monkeypatch.setattr(offload, "link_bytes_per_second", lambda _: 8e9)
    words = ["--lengths=16,64", "--num-iters=3", "--kv-offloading-size=1", f"--output={path}"]
    flags = {"max_num_seqs": 2, **({} if own is None else own)}
    return offload.main([*words, *more], lambda _: flags), asked


def test_a_prompt_is_cold_then_on_the_device_then_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, settings = run(tmp_path / "run", Engine(12 * 16), monkeypatch, "--hits=2")
    assert code == 0
    assert settings["num_pages"] == 12 and settings["max_num_seqs"] == 2
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [row["length"] for row in result["tiers"]] == [16, 64]
    for row in result["tiers"]:
        assert {kind: row[kind] for kind in MS} == pytest.approx(MS)
        assert (row["cold_over_host"], row["cold_over_device"]) == pytest.approx((2, 4))
        assert row["device_p99"] == pytest.approx(1)
        assert row["restored_gb_per_s"] == pytest.approx(4) and row["link_gb_per_s"] == 8
        assert row["restored_prompts"] == 3 and "others_tpot_ms" not in row
    series = json.loads((tmp_path / "run" / "run.json").read_text())["series"]
    facts = {one["name"]: one["facts"] for one in series}
    assert facts["host-64"]["restored_prompts"] == 3 and facts["host-64"]["reused_tokens"] == 63
    assert facts["cold-16"] == {"reused_tokens": 0}
    assert {one["name"]: one["requests"] for one in series}["device-16"] == 6
    assert "## First tokens" in (tmp_path / "run" / "report.md").read_text()
    assert verify.main([str(tmp_path / "run")]) == 0
    assert "cold / host" in capsys.readouterr().out


def test_others_decode_while_a_prompt_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens take twice as long while one is restored, and are compared with those before."""
    engine = Engine(200 * 16)
    more = "--others=3", "--pause=0.1"
    code, settings = run(tmp_path / "run", engine, monkeypatch, *more)
    assert code == 0 and engine.most_decoding == 3
    assert settings["num_pages"] == 4 + 8 + 3 * (64 + 2)
    for row in json.loads((tmp_path / "run" / "result.json").read_text())["tiers"]:
        assert row["others_alone_tpot_ms"] == pytest.approx(0.5, rel=0.02)
        assert row["others_tpot_ms"] == pytest.approx(1.0, rel=0.35)
        assert row["cold"] == pytest.approx(4)
    report = (tmp_path / "run" / "report.md").read_text()
    assert "TPOT of others" in report and "link, GB/s" in report
    assert verify.main([str(tmp_path / "run")]) == 0


def test_the_pool_has_the_pages_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names are vLLM's; so many other prompts are sent that all pages are evicted."""
    own = {"num_gpu_blocks_override": 20, "block_size": 32}
    _, settings = run(tmp_path / "run", Engine(20 * 32), monkeypatch, own=own)
    assert settings["num_pages"] == 20 and settings["page_size"] == 32
    assert not {*own} & {*settings}
    rows = json.loads((tmp_path / "run" / "result.json").read_text())["tiers"]
    assert all(row["restored_prompts"] == 3 for row in rows)


def test_a_prompt_that_left_the_device_at_once_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match=r"device at 16 tokens: 15 were reused and 64 bytes rest"):
        run(tmp_path / "run", Engine(12 * 16, loses=True), monkeypatch)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "partial"


def test_the_link_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by copies of memory."""
    import jax.numpy as jnp

    monkeypatch.setattr(link, "NUM_BYTES", 1 << 20)
    llm: Any = SimpleNamespace(model=SimpleNamespace(params=(jnp.zeros(1),)))
    assert 1e7 < link.link_bytes_per_second(llm) < 1e13
