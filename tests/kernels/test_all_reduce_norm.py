"""all_reduce_norm: which calls are one kernel, machine code for several devices, bad arguments.

``test_all_reduce`` runs it among processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.all_reduce.ref import Peers
from pallas_kernels.all_reduce_norm import launch
from pallas_kernels.all_reduce_norm.api import OP, AllReduceNormArgs, all_reduce_norm
from pallas_kernels.harness.pins import LINKS, UNLINKED, Pins
from pallas_kernels.harness.registry import UnfitKernel, select
from pallas_kernels.lib import exchange
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.residual_norm.ref import NormArgs

NORM = NormArgs(
    x=jnp.ones((3, 8)), partials=jnp.ones((2, 3, 8)), weights=jnp.ones((2, 8)), row=1, eps=1e-6
)


def on_devices(
    tokens: int, width: int, *, ranks: int = 2, partials: int = 2, dtype: str = "bfloat16"
) -> AllReduceNormArgs:
    """An abstract call of one of several devices."""

    def build() -> AllReduceNormArgs:
        x = jnp.ones((tokens, width), dtype)
        own = jnp.ones((partials, tokens, width), jnp.float32)
        norm = NormArgs(x=x, partials=own, weights=x[:1], row=0, eps=1e-6)
        words = jnp.zeros(2 * ranks, jnp.int32)
        return AllReduceNormArgs(norm=norm, peers=Peers(rank=words[:1], addresses=words), axis="t")

    return jax.eval_shape(build)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (on_devices(65, 5120), "65 rows are above 64"),
        (on_devices(1, 8200), "rows of 8200 components are above 8192"),
        (replace(on_devices(1, 5120), peers=None), "the devices have no exchange memory"),
        (replace(on_devices(1, 5120), pins=Pins((("all_reduce", "xla"),))), "all_reduce is pinned"),
        (
            replace(on_devices(1, 5120), pins=Pins((("residual_norm", "xla"),))),
            "residual_norm is pinned",
        ),
        (on_devices(1, 4096), "linked with the next GEMM"),
        (on_devices(64, 2560), "linked with the next GEMM"),
        (replace(on_devices(1, 2048), before_gemm=False), None),
        (on_devices(64, 8192), None),
        (on_devices(64, 5120), None),
        (on_devices(1, 576), None),
        (on_devices(8, 4096, dtype="float32"), None),
        (replace(on_devices(8, 4096), pins=Pins(((LINKS, UNLINKED),))), None),
        (replace(on_devices(8, 4096), pins=Pins((("all_reduce_norm", "triton"),))), None),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_one_kernel_where_it_saves_a_launch(args: AllReduceNormArgs, reason: str | None) -> None:
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        found, chosen = launch.supports(args), select(OP, "gpu", (args,), {}).name
    assert found == reason if reason is None else reason in (found or ""), found
    assert chosen == ("triton" if reason is None else "unfused")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_each_row_has_an_sm() -> None:
    """As all CTAs must run at the same time."""
    args = replace(on_devices(59, 5120), pins=Pins((("all_reduce_norm", "triton"),)))
    with compiling_for(Device("gpu", "NVIDIA L4", "8.9", num_sms=58)):
        assert launch.supports(args) == "59 rows are above 58"
    with compiling_for(Device("gpu", "NVIDIA L4", "8.9", num_sms=59)):
        assert launch.supports(args) is None


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize(("ranks", "width"), [(2, 4096), (2, 8192), (8, 5120), (8, 8192)])
def test_compiles_for_several_devices_without_spills(ranks: int, width: int) -> None:
    from kit.triton_shims import Recorder, compile_call, in_place_of_triton_call

    recorder = Recorder()
    with in_place_of_triton_call(recorder):
        jax.eval_shape(OP.impls[0].fn, on_devices(8, width, ranks=ranks))
    (call,) = recorder.calls
    code = compile_call(call)
    assert code.spilled_bytes == 0 and code.registers <= 128, code  # of 512 threads
    assert exchange.MAX_ROWS * exchange.MAX_ROW_VALUES == exchange.MAX_VALUES


@pytest.mark.parametrize("name", ["all_reduce", "residual_norm"])
def test_pins_reach_the_unfused_ops(name: str) -> None:
    args = AllReduceNormArgs(norm=NORM, pins=Pins(((name, "nope"),)))
    with pytest.raises(UnfitKernel, match=f"{name} has no implementation 'nope'"):
        all_reduce_norm(args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((3, 4))}, r"tokens \(3, 4\) do not fit weights \(2, 8\)"),
        ({"row": 2}, r"no row 2 in weights \(2, 8\)"),
        ({"partials": None}, "no partials to add"),
        ({"partials": jnp.ones((2, 2, 8))}, r"partials \(2, 2, 8\) do not fit tokens \(3, 8\)"),
        ({"partials": jnp.ones((3, 8), jnp.bfloat16)}, "are bfloat16, not float32"),
    ],
)
def test_arguments_are_checked(change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce_norm(AllReduceNormArgs(norm=replace(NORM, **change)))


def test_half_an_address() -> None:
    peers = Peers(rank=jnp.zeros(1, jnp.int32), addresses=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="two halves"):
        all_reduce_norm(AllReduceNormArgs(norm=NORM, peers=peers))
