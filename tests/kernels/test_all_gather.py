"""all_gather: machine code for several devices, which calls the kernel takes, bad arguments.

``test_all_reduce`` runs it among processes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.all_gather import launch
from pallas_kernels.all_gather.api import OP, AllGatherArgs, all_gather
from pallas_kernels.all_reduce import launch as sum_launch
from pallas_kernels.all_reduce.ref import Peers
from pallas_kernels.harness.registry import select
from pallas_kernels.lib import exchange
from pallas_kernels.lib.device import Device, compiling_for


def on_devices(tokens: int, width: int, *, ranks: int = 2, dtype: str = "float32") -> AllGatherArgs:
    """An abstract call of one of several devices."""

    def build() -> AllGatherArgs:
        words = jnp.zeros(2 * ranks, jnp.int32)
        peers, x = Peers(rank=words[:1], addresses=words), jnp.ones((tokens, width), dtype)
        return AllGatherArgs(x=x, columns=ranks * width - 3, peers=peers, axis="t")

    return jax.eval_shape(build)


LARGE = on_devices(1 << 14, 1 << 17)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (on_devices(64, 75968), None),
        (on_devices(512, 131072, ranks=8), None),
        (replace(on_devices(1, 64), peers=None), "the devices have no exchange memory"),
        (on_devices(1, 64, dtype="int32"), "the arguments are int32"),
        (LARGE, f"{2**32} values are not between 1 and"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_which_calls_the_kernel_takes(args: AllGatherArgs, reason: str | None) -> None:
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        found, chosen = launch.supports(args), select(OP, "gpu", (args,), {}).name
    assert found == reason if reason is None else (found or "").startswith(reason), found
    assert chosen == ("triton" if reason is None else "xla")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize(("ranks", "rows"), [(2, 64), (8, 1), (8, 64)])
def test_all_ctas_run_at_the_same_time(ranks: int, rows: int) -> None:
    """Each waits for those of the other devices."""
    from kit.triton_shims import Recorder, compile_call, in_place_of_triton_call

    args, recorder = on_devices(rows, 151936 // ranks, ranks=ranks), Recorder()
    with in_place_of_triton_call(recorder):
        jax.eval_shape(OP.impls[0].fn, args)
    (call,) = recorder.calls
    code = compile_call(call)
    threads = sum_launch.CTAS_PER_SM * 32 * sum_launch.NUM_WARPS
    assert code.spilled_bytes == 0 and threads * code.registers <= 1 << 16, code
    for num_sms in (58, 132, 148):
        with compiling_for(Device("gpu", "a GPU", "9.0", num_sms=num_sms)):
            most = min(sum_launch.CTAS_PER_SM * num_sms, exchange.MAX_CTAS)
            assert sum_launch.ctas(args.x.size) == min(most, -(-args.x.size // exchange.TILE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros(8)}, r"float32\(8,\), not \[T, W\]"),
        ({"columns": 9}, r"1 devices have no 9 columns in \(2, 8\)"),
        ({"columns": 0}, r"no 0 columns"),
        ({"peers": Peers(rank=jnp.zeros(1), addresses=jnp.zeros(3))}, "two halves"),
    ],
)
def test_arguments_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_gather(replace(AllGatherArgs(x=jnp.zeros((2, 8)), columns=8), **change))
