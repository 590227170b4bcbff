"""GPUs and memory beside a measurement, with a stand-in of NVML."""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from jaxinfer.bench.monitor import Gpus, Sample, answers_bar, summary, watched


def nvml(error: bool = False) -> ModuleType:
    """A module with the functions of ``nvidia-ml-py`` that are used: two GPUs, one of them idle."""
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def init() -> None:
        if error:
            raise NVMLError("Driver Not Loaded")

    module.NVMLError, module.nvmlInit = NVMLError, init  # type: ignore[attr-defined]
    functions = {
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=0 if gpu else 80),
        "nvmlDeviceGetPowerUsage": lambda gpu: 70_000 if gpu else 500_000,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=2e9),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def test_gpus_are_watched_while_a_series_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    with watched(os.getpid()) as samples:
        time.sleep(0.1)
    facts = summary(samples)
    assert facts["server_rss_peak_mb"] > 10
    assert {name: facts[name] for name in facts if name.startswith("gpu")} == {
        "gpu0_percent": 80.0,
        "gpu0_watts": 500.0,
        "gpu0_peak_mb": 2000.0,
    }


def test_means_and_peaks() -> None:
    samples = [
        Sample(0, [10], [100.0], [5.0], 7.0),
        Sample(1, [30], [300.0], [9.0]),
    ]
    assert summary(samples) == {
        "server_rss_peak_mb": 7.0,
        "gpu0_percent": 20.0,
        "gpu0_watts": 200.0,
        "gpu0_peak_mb": 9.0,
    }
    assert summary([]) == {}


def test_gpus_that_do_not_tell_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A divided GPU has no use, and the rest is known nevertheless."""
    module = nvml()

    def unsupported(gpu: int) -> None:
        raise module.NVMLError("Not Supported")

    module.nvmlDeviceGetUtilizationRates = unsupported  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with watched(os.getpid()) as samples:
        time.sleep(0.05)
    facts = summary(samples)
    assert (facts["gpu0_watts"], facts["gpu1_watts"], facts["gpu1_peak_mb"]) == (500, 70, 2000)
    assert "gpu0_percent" not in facts
    assert Gpus().reason == "NVML does not tell use of these GPUs"


def test_without_nvml_only_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(error=True))
    assert Gpus().reason == "NVML does not answer (Driver Not Loaded)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().reason == "nvidia-ml-py is not installed"
    with watched(os.getpid()) as samples:
        time.sleep(0.05)
    assert set(summary(samples)) == {"server_rss_peak_mb"}
    with watched(None) as samples:
        pass
    assert samples == []


def test_a_bar_is_shown_on_terminals_only(capfd: pytest.CaptureFixture[str]) -> None:
    with answers_bar(3, shown=True) as on_answer:
        on_answer()
    assert capfd.readouterr().err == ""
