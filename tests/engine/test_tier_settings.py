"""Settings of tiers: what does not fit is refused in one sentence, before weights are read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace as struct_replace

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.start.tiers import CPU_BYTES, check_tiers, free_host_bytes, saved_ahead
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.tier_memory import NUM_TIER_BLOCKS, block_bytes, tier_memory
from jaxinfer.exec.tiers.mover import forms_of
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model

GIB = 1 << 30
OFFLOADS = {"kv_offloading_size": 1.0}
DISK = {**OFFLOADS, "kv_offloading_disk": "DIR/tier", "kv_offloading_disk_size": 1.0}


def program() -> Program:
    return Program(tiny_model("llama")[0], tiny_limits(), "cpu")


def check(changes: dict[str, Any], folder: Path, own: Program | None = None) -> None:
    values = {
        name: value.replace("DIR", str(folder)) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    check_tiers(EngineConfig(**values), own or program(), 8 * GIB)


@pytest.mark.parametrize("name", ["kv_offloading_size", "kv_offloading_disk_size"])
@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan"), "many", True])
def test_sizes_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_offloading_disk": "DIR"}, "give both"),
        ({"kv_offloading_disk_size": 1.0}, "give both"),
        ({"kv_offloading_disk": "DIR", "kv_offloading_disk_size": 1.0}, "give kv_offloading_size"),
        ({"kv_connector": "DIR/own.py:f"}, "give kv_offloading_size"),
        ({"preemption": "offload"}, "preemption offload.*give kv_offloading_size"),
        (DISK | {"kv_connector": "DIR/own.py:f"}, "exclude each other"),
        (OFFLOADS | {"kv_connector": "DIR/none.py:f"}, "cannot be run.*FILE.py:FUNCTION"),
        (OFFLOADS | {"kv_connector": "DIR/own.py:f"}, "defines no function 'f'"),
        ({"kv_offloading_size": 1e-9}, "holds not one page"),
        ({"kv_offloading_size": 9.0}, "8.00 GiB are left"),
        (DISK | {"kv_offloading_disk": "DIR/own.py"}, "is no folder"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("g = 1")
    with pytest.raises(ConfigError, match=message):
        check(changes, tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="cannot be written by this user"):
        check(DISK, tmp_path)


def test_settings_that_fit(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(forms): pass")
    offload = OFFLOADS | {"preemption": "offload"}
    for changes in ({}, OFFLOADS, offload, DISK, OFFLOADS | {"kv_connector": "DIR/own.py:f"}):
        check(changes, tmp_path)


def test_engines_that_have_no_tiers(tmp_path: Path) -> None:
    """Engines of several devices, those that reuse no prefix, and those without pages."""
    own = program()
    cold = struct_replace(own.limits, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="reuses none"):
        check(OFFLOADS, tmp_path, replace(own, limits=cold))
    with pytest.raises(ConfigError, match="a model without attention has none; leave it out"):
        aligned = struct_replace(tiny_limits(max_num_batched_tokens=128), align=64, num_snapshots=4)
        check(OFFLOADS, tmp_path, Program(tiny_model("mamba2")[0], aligned, "cpu"))
    for num_hosts, platform in ((1, "gpu"), (2, "cpu")):
        sizes = {"num_devices": 2, "num_hosts": num_hosts}
        two = replace(own)
        object.__setattr__(two, "placement", cast("Any", type("Several", (), sizes)))
        object.__setattr__(two, "platform", platform)
        with pytest.raises(ConfigError, match="one GPU, or one host's CPU devices"):
            check(OFFLOADS, tmp_path, two)


def test_free_memory_of_the_host(tmp_path: Path) -> None:
    assert free_host_bytes() > 1 << 20
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\nMemAvailable:      3 kB\n")
    assert free_host_bytes(tmp_path / "meminfo") == 3 << 10
    assert free_host_bytes(tmp_path / "none") > 1 << 60


def test_memory_for_what_steps_overwrite() -> None:
    """Two steps are in flight, and each saves the pages that it writes to."""
    own = program()
    limits, page_bytes = own.limits, own.limits.page_size * own.model.state.bytes_per_entry[0]
    pages = limits.max_num_batched_tokens // limits.page_size + limits.max_num_seqs
    blocks = (NUM_TIER_BLOCKS + 2) * block_bytes(own)
    assert block_bytes(own) >= page_bytes
    assert tier_memory(own) == blocks + 2 * pages * page_bytes


def test_pages_of_half_the_host_tier_are_saved_ahead() -> None:
    """More would be replaced in the tier before the device evicts them."""
    own = program()
    forms, limits = forms_of(own), own.limits
    pool = limits.num_pages[0] * forms[0].num_bytes
    assert saved_ahead(own, forms, pool).share == pytest.approx(0.5)
    assert saved_ahead(own, forms, 3 * pool).share == 1.0
    on_cpu = saved_ahead(own, forms, pool)
    assert on_cpu.most_bytes == CPU_BYTES and not on_cpu.beside_decodes
    object.__setattr__(own, "platform", "gpu")
    on_gpu = saved_ahead(own, forms, pool)
    assert on_gpu.most_bytes == block_bytes(own) and on_gpu.beside_decodes
