"""Worker processes: the same bytes as in this process, and no process is left behind."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import deserialize_portable_artifact, serialize_portable_artifact
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import ir, make_ir_context

from pallas_kernels.append_decode.api import DecodeArgs, append_decode
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.norm_gemm.api import NormGemmArgs, norm_gemm
from pallas_kernels.paged_prefill.api import PrefillArgs, paged_prefill
from pallas_kernels.residual_norm.ref import NormArgs
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm
from pallas_kernels.swiglu_gemm.api import swiglu_gemm
from pallas_kernels.toolchain.find import kernels_in
from pallas_kernels.toolchain.jax_internals import (
    MOSAIC_CALL,
    attribute_of,
    custom_calls,
    mosaic_bytecode,
    mosaic_context,
    set_attribute,
)
from pallas_kernels.toolchain.kernel_call import Kernel, LoweredKernel
from pallas_kernels.toolchain.pool import KernelError, KernelPool

H200 = Device("gpu", "NVIDIA H200", "9.0")


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


POOL, TABLE, LENS = array(65, 16, 8, 128), array(8, 8, dtype=jnp.int32), array(8, dtype=jnp.int32)
ANGLES = array(8, 64, dtype=jnp.float32)
CALLS = {
    "append_decode": (
        append_decode,
        (
            DecodeArgs(
                qkv=array(8, 48, 128),
                cos=ANGLES,
                sin=ANGLES,
                qk_norms=array(2, 128),
                k_pages=POOL,
                v_pages=POOL,
                page_table=TABLE,
                seq_lens=LENS,
                scale=0.1,
                eps=1e-6,
            ),
        ),
    ),
    "paged_prefill": (
        paged_prefill,
        (
            PrefillArgs(
                q=array(256, 32, 128),
                k_pages=POOL,
                v_pages=POOL,
                page_table=TABLE,
                seq_lens=LENS,
                query_start_loc=array(9, dtype=jnp.int32),
                scale=0.1,
            ),
        ),
    ),
    "norm_gemm": (
        norm_gemm,
        (
            NormGemmArgs(
                norm=NormArgs(
                    x=array(1, 2560),
                    partials=array(1, 2560),
                    weights=array(2, 2560),
                    row=0,
                    eps=1e-6,
                ),
                w=array(2560, 6144),
            ),
        ),
    ),
    "skinny_gemm": (skinny_gemm, (GemmArgs(x=array(128, 2560), w=array(2560, 6144)),)),
    "swiglu_gemm": (
        swiglu_gemm,
        (GemmArgs(x=array(1024, 256), w=array(256, 2048), swiglu=True),),
    ),
}


OF_O = GemmArgs(x=array(8, 4096), w=array(4096, 2560), split=True)
WITH_PARTS = {"parts": (skinny_gemm, (OF_O,))}


def kernel_of(name: str) -> Kernel:
    """The kernel of a step on an H200."""
    call, args = (CALLS | WITH_PARTS)[name]
    with compiling_for(H200):
        (found,) = kernels_in(jax.jit(call).trace(*args).jaxpr)
    assert isinstance(found, LoweredKernel)
    return found.kernel


def taken_apart(artifact: bytes) -> tuple[bytes, bytes]:
    """A module's only kernel, without the running number of Mosaic's dumps, and the rest."""
    with make_ir_context():
        module = deserialize_portable_artifact(artifact)
        (call,) = custom_calls(module.operation, MOSAIC_CALL)
        source = attribute_of(call, "module")
        assert attribute_of(call, "kernel_hash") == hashlib.sha256(source).digest()
        for name in ("module", "kernel_hash"):
            set_attribute(call, name, "")
        rest = serialize_portable_artifact(module, stablehlo.get_current_version())
    with mosaic_context():
        kernel = ir.Module.parse(source)
        del kernel.operation.attributes["mosaic_gpu.dump_basename"]
        return mosaic_bytecode(kernel), rest


@pytest.fixture(scope="module")
def pool() -> Iterator[KernelPool]:
    # what this process has traced before, in the interpreter or for another device, it would lower
    jax.clear_caches()
    with KernelPool(1, H200) as pool:
        yield pool


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name == "paged_prefill"))  # 27 s
        for name in CALLS
    ],
)
def test_a_worker_lowers_the_same_module_as_this_process(name: str, pool: KernelPool) -> None:
    kernel = kernel_of(name)
    assert kernel.name == name
    assert taken_apart(pool.run(kernel.lower)) == taken_apart(kernel.lower())


@pytest.mark.parametrize("name", [*CALLS, *WITH_PARTS])
def test_result_shapes_are_known_without_a_trace(name: str) -> None:
    kernel = kernel_of(name)
    assert kernel.returned is not None
    assert kernel.returned == replace(kernel, returned=None).results()


def test_the_config_is_that_of_the_target_device(pool: KernelPool) -> None:
    """On an H200 this GEMM has a tuned choice; on an H100 it has the heuristic config."""
    tuned = kernel_of("skinny_gemm")
    by_rule = replace(tuned, device=replace(H200, kind="NVIDIA H100"))
    with KernelPool(1, H200) as another:  # traces are remembered by a process
        assert taken_apart(another.run(by_rule.lower)) != taken_apart(pool.run(tuned.lower))


def test_jax_settings_reach_the_worker(pool: KernelPool) -> None:
    kernel = Kernel("jax.numpy", "arange", (), (("start", 4),), H200, (("jax_enable_x64", True),))
    with make_ir_context():
        module = deserialize_portable_artifact(pool.run(kernel.lower))
        assert "tensor<4xi64>" in str(module)


def test_errors_of_a_worker_are_raised_here(pool: KernelPool) -> None:
    whole, uneven = array(16, 64), array(65, 512)
    kernel = Kernel("jax.numpy", "matmul", (whole, uneven), (), H200, ())
    with pytest.raises(KernelError, match="matmul.*could not be built: TypeError: dot_general"):
        pool.run(kernel.lower)
    absent = Kernel("pallas_kernels.absent", "f", (), (), H200, ())
    with pytest.raises(KernelError, match="ModuleNotFoundError: No module named") as error:
        pool.run(absent.lower)
    assert "Traceback" in error.value.__notes__[0]
    assert pool.run(Kernel("jax.numpy", "sin", (array(4),), (), H200, ()).lower)  # lives on


FOREVER = """
import os, time
from pathlib import Path
def forever(x):
    Path(__file__).with_name("begun").write_text(str(os.getpid()))
    time.sleep(600)
"""
CALLER = """
import os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
folder, end = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path.append(folder)  # which the process must have, too
from pallas_kernels.lib.device import Device
from pallas_kernels.toolchain.kernel_call import Kernel
from pallas_kernels.toolchain.pool import KernelPool
cpu = Device("cpu", "cpu")
with suppress(KeyboardInterrupt), KernelPool(2, cpu) as pool:
    kernel = Kernel("forever", "forever", (1.0,), (), cpu, ())
    ThreadPoolExecutor(1).submit(pool.run, kernel.lower)
    while not Path(folder, "begun").exists():
        time.sleep(0.01)
    if end == "gone":
        os._exit(0)
    os.killpg(0, signal.SIGINT)
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["gone", "interrupted"])
def test_no_worker_outlives_the_caller_or_prints(end: str, tmp_path: Path) -> None:
    """Also during a compilation. A pipe ends when no process can write to it."""
    (tmp_path / "forever.py").write_text(FOREVER)
    ended = subprocess.run(
        [sys.executable, "-c", CALLER, str(tmp_path), end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        start_new_session=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_a_worker_that_dies_is_an_error_with_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forever.py").write_text(FOREVER)
    monkeypatch.syspath_prepend(tmp_path)
    kernel = Kernel("forever", "forever", (array(3),), (), H200, ())

    def kill_when_begun() -> None:
        while not (begun := tmp_path / "begun").exists() or not begun.read_text():
            time.sleep(0.01)
        os.kill(int(begun.read_text()), signal.SIGKILL)

    with KernelPool(1, H200) as pool:
        threading.Thread(target=kill_when_begun).start()
        named = r"forever.forever\(bfloat16\[3\]\): its worker process has died"
        for _ in range(2):  # nor does whoever comes next wait for ever
            with pytest.raises(KernelError, match=named):
                pool.run(kernel.lower)


def test_other_workers_go_on_when_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forever.py").write_text(FOREVER.replace("time.sleep(600)", "os._exit(3)"))
    monkeypatch.syspath_prepend(tmp_path)
    dying = Kernel("forever", "forever", (array(3),), (), H200, ())
    with KernelPool(2, H200) as pool:
        with pytest.raises(KernelError, match="has died"):
            pool.run(dying.lower)
        assert pool.run(Kernel("jax.numpy", "sin", (array(4),), (), H200, ()).lower)
    assert pool._process.returncode == -signal.SIGKILL


def test_waiting_threads_get_an_error_when_the_pool_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forever.py").write_text(FOREVER)
    monkeypatch.syspath_prepend(tmp_path)
    kernel = Kernel("forever", "forever", (array(3),), (), H200, ())
    with ThreadPoolExecutor(2) as threads, KernelPool(1, H200) as pool:
        waiting = [threads.submit(pool.run, kernel.lower) for _ in range(2)]
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        pool.close()
        for each in waiting:
            with pytest.raises(KernelError, match="has died"):
                each.result(10)
