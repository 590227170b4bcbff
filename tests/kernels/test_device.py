"""The device that kernels are compiled for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.harness.registry import current_platform
from pallas_kernels.harness.tuned import lookup
from pallas_kernels.lib.checks import not_hopper
from pallas_kernels.lib.device import Device, compiling_for, current_device
from pallas_kernels.swiglu_gemm import launch as swiglu_gemm

H200 = Device("gpu", "NVIDIA H200", "9.0")


def test_it_is_jaxs_device_unless_another_is_set() -> None:
    assert current_device() == Device("cpu", jax.devices()[0].device_kind, "none")
    with compiling_for(H200):
        assert current_device() == H200
        there: list[Device] = []
        other = threading.Thread(target=lambda: there.append(current_device()))
        other.start()
        other.join()
        assert there[0].platform == "cpu"
    assert current_device().platform == "cpu"


def test_num_sms_is_the_devices_core_count(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = swiglu_gemm.SwigluSizes(8192, 2560, 9728)
    assert swiglu_gemm.heuristic_config(sizes).group == 16
    device = SimpleNamespace(platform="gpu", device_kind="small", core_count=24)
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert current_device() == Device("gpu", "small", "none", 24)
    assert swiglu_gemm.heuristic_config(sizes).group == 8  # tiles side by side, of fewer at a time


@pytest.mark.parametrize("chosen", ["cpu", jax.devices("cpu")[0]], ids=["name", "device"])
def test_it_follows_jaxs_setting(chosen: str | jax.Device) -> None:
    with jax.default_device(chosen):
        assert current_device().platform == "cpu"


def test_every_device_dependent_function_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    monkeypatch.setattr(
        "pallas_kernels.harness.tuned.read_choices", lambda file: files.append(str(file)) or {}
    )
    assert not_hopper() == "cpu has compute capability none, not 9.x"
    with compiling_for(H200):
        assert current_platform() == "gpu"
        assert not_hopper() is None
        lookup("append_decode", (), lambda case: case, ())
    assert files[0].endswith("append_decode/tuned/nvidia_h200.json")
