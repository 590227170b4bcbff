"""all_reduce: sums among devices that are processes here, a device that is lost, bad arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.all_reduce import launch
from pallas_kernels.all_reduce.api import OP, AllReduceArgs, Peers, all_reduce
from pallas_kernels.lib import exchange

ROOT = Path(__file__).parents[2]
PEERS = Peers(rank=jnp.zeros(1, jnp.int32), addresses=jnp.zeros(4, jnp.int32))


def _device(memory: Path, *words: object) -> subprocess.Popen[bytes]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return subprocess.Popen(
        [sys.executable, "-m", "kit.exchange", str(memory), *map(str, words)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )


def _memory(folder: Path, ranks: int) -> Path:
    memory = folder / "memory"
    with memory.open("wb") as file:
        file.truncate(4 * exchange.words(ranks) * ranks)
    return memory


def _printed(process: subprocess.Popen[bytes]) -> Any:
    return json.loads(process.communicate(timeout=120)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_devices_add_in_the_order_of_their_ranks(ranks: int, tmp_path: Path) -> None:
    memory = _memory(tmp_path, ranks)
    devices = [_device(memory, rank, ranks) for rank in range(ranks)]
    first, *others = [_printed(device) for device in devices]
    assert all(same for _, same in first)
    assert all(other == first for other in others)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_a_lost_device_is_nan_and_is_waited_for_once(tmp_path: Path) -> None:
    found = _printed(_device(_memory(tmp_path, 2), 0, 2, "alone"))
    assert found == [[True, 1]] * len(found) and len(found) > 2


@pytest.mark.parametrize(
    ("partials", "message"),
    [
        (jnp.zeros(8), r"not \[T, D\]"),
        (jnp.zeros((2, 3, 8), jnp.bfloat16), r"bfloat16.*not \[T, D\] or float32\[S, T, D\]"),
    ],
)
def test_bad_arguments(partials: jax.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce(AllReduceArgs(partials=partials))


def test_half_an_address() -> None:
    peers = Peers(rank=PEERS.rank, addresses=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="two halves"):
        all_reduce(AllReduceArgs(partials=jnp.zeros((1, 8)), peers=peers))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_large_results_are_for_nccl() -> None:
    large = jax.ShapeDtypeStruct((launch.MAX_VALUES // 4096 + 1, 4096), jnp.float32)
    args: Any = AllReduceArgs(partials=large, peers=PEERS, axis="tensor")
    assert "values are not between" in (launch.supports(args) or "")
    alone: Any = AllReduceArgs(partials=large, axis="tensor")
    assert launch.supports(alone) == "the devices have no exchange memory"


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_results_of_decode_steps_may_be_larger() -> None:
    """256 rows of 4,096 values on up to four devices, 512 on two."""
    for rows, devices in ((129, 2), (512, 2), (256, 4), (257, 4), (128, 8), (129, 8)):
        words = jnp.zeros(2 * devices, jnp.int32)
        peers = Peers(rank=words[:1], addresses=words, decodes=True)
        values = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        args: Any = AllReduceArgs(partials=values, peers=peers, axis="tensor")
        assert (launch.supports(args) is None) == (rows % 2 == 0 or devices == 2), (rows, devices)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_compiles_for_several_devices(ranks: int, dtype: str) -> None:
    """Triton 3.6 did not compile bfloat16 for three devices or more."""
    from kit.triton_shims import Recorder, compile_call, in_place_of_triton_call

    def build() -> AllReduceArgs:
        words = jnp.zeros(2 * ranks, jnp.int32)
        peers = Peers(rank=words[:1], addresses=words)
        return AllReduceArgs(partials=jnp.ones((1, 2880), dtype), peers=peers, axis="t")

    recorder = Recorder()
    with in_place_of_triton_call(recorder):
        jax.eval_shape(OP.impls[0].fn, jax.eval_shape(build))
    (call,) = recorder.calls
    code = compile_call(call)
    assert code.spilled_bytes == 0 and code.registers <= 128, code
