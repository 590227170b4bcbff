"""The Triton kernels without a GPU: right in the interpreter, and machine code for Hopper.

On Linux, where Triton can be installed, it is a development dependency: without it these tests
fail. They do not measure speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.harness.registry import (
    Case,
    Impl,
    Inputs,
    KernelOp,
    all_ops,
    arrays_of,
    select,
)
from pallas_kernels.lib.shapes import PagedCase
from pallas_kernels.paged_prefill.ref import FEW_TOKENS
from pallas_kernels.sample.cases import QWEN3, SampleCase

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

import jax_triton

from kit.lowering import lowered_in_place
from kit.triton_shims import Recorder, compile_call, in_place_of_triton_call
from kit.triton_sweep import ON_CONVERTED

ROOT = Path(__file__).parents[2]
HOPPER_SHARED_BYTES = 227 << 10  # per CTA
HAS_CUDA_PLUGIN = find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")

# Each vocabulary has its own sampling kernels, which take 5 s to compile: only those of the
# smallest and the largest are compiled in CI, the others nightly.
VOCABULARIES = (1, QWEN3)

TRITON = ("split", "triton")  # implementations in Triton
OFF_GPU = ("native", "unfused", "xla", "xla_chunks")  # choices on a CPU

compiled = cache(compile_call)


def _sweep(*tags: str, marks: Any = ()) -> list[Any]:
    """Every case with one of the tags, of every Triton kernel that can run it."""
    return [
        pytest.param(op, impl, case, id=f"{op.name}/{impl.name}/{case.name}", marks=marks)
        for op, impl, case in _runnable()
        if set(tags) & set(case.tags)
    ]


@cache
def _runnable() -> list[tuple[KernelOp, Impl, Case]]:
    return [
        (op, impl, case)
        for op in all_ops()
        for impl in op.impls
        for case in op.cases
        if "cpu" not in case.tags
        and (impl.name == "triton" or (impl.name == "split" and _is_split(op, impl, case)))
    ]


def _is_split(op: KernelOp, impl: Impl, case: Any) -> bool:
    """True if several splits can run a case; the inputs of larger ones are slow to build."""
    few = sum(case.query_lens) + case.padding <= FEW_TOKENS
    return few and impl.supports(*_inputs(op, case).args) is None


def _inputs(op: KernelOp, case: Case) -> Inputs:
    """Inputs of the case's shapes, with contexts as short as possible, since nothing runs."""
    if isinstance(case, PagedCase):
        case = replace(case, seq_lens=(1,) * len(case.seq_lens), max_pages=_pages(case))
    return op.build(case, 0)


def _pages(case: PagedCase) -> int:
    return max(case.max_pages, -(-max(case.seq_lens) // case.page_size), 1)


def _often(case: Case) -> bool:
    """True if a case is compiled in CI."""
    if isinstance(case, SampleCase):
        return case.vocab in VOCABULARIES
    # a GPU serves bfloat16; the interpreter computes the same cases in float32
    return not isinstance(case, PagedCase) or case.dtype != "float32" or case.sinks


def _to_compile() -> list[Any]:
    """The cases of CI, and more that are marked nightly."""
    cases = []
    for one in _sweep("ci"):
        marks = () if _often(one.values[2]) else pytest.mark.nightly
        cases.append(pytest.param(*one.values, id=one.id, marks=marks))
    of_gpus = _sweep("gpu", marks=pytest.mark.nightly)
    converted = ("qwen3_4b_t512_ctx512_fp8", "gpt_oss_tp8_fp8_bf16")
    return cases + of_gpus + [_prefill(ON_CONVERTED, x, pytest.mark.nightly) for x in converted]


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """The interpreter's results for the cases of this session."""
    names = [
        item.callspec.id
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is test_the_interpreter_agrees_with_the_definition
    ]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    shares = min(os.cpu_count() or 1, len(names))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "kit.triton_sweep", *names[share::shares]],
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
            stdout=subprocess.PIPE,
        )
        for share in range(shares)
    ]
    found: dict[str, str | None] = {}
    for process in processes:
        found |= json.loads(process.communicate()[0])
    return found


def _to_interpret() -> list[Any]:
    """The cases of CI; bfloat16 where there is the same in float32 is marked nightly."""
    cases = _sweep("ci")
    names = {one.id for one in cases}
    return [
        *(
            pytest.param(
                *one.values, id=one.id, marks=[pytest.mark.nightly] * _is_twin(one.id, names)
            )
            for one in cases
        ),
        _prefill(ON_CONVERTED, "smollm2_tp3_ragged_fp8"),
        _prefill(ON_CONVERTED, "smollm2_tp3_ragged_window_fp8", pytest.mark.nightly),
    ]


def _prefill(impl: Impl, case: str, marks: Any = ()) -> Any:
    """A case of paged_prefill with an implementation of ``kit.triton_sweep``."""
    op = next(op for op in all_ops() if op.name == "paged_prefill")
    found = next(one for one in op.cases if one.name == case)
    return pytest.param(op, impl, found, id=f"{op.name}/{impl.name}/{case}", marks=marks)


def _is_twin(name: str, names: set[str]) -> bool:
    return name.removesuffix("_bf16") in names - {name}


@pytest.mark.parametrize(("op", "impl", "case"), _to_interpret())
def test_the_interpreter_agrees_with_the_definition(
    op: KernelOp, impl: Impl, case: Case, interpreted: dict[str, str | None]
) -> None:
    problem = interpreted[f"{op.name}/{impl.name}/{case.name}"]
    assert problem is None, problem


@pytest.mark.parametrize(("op", "impl", "case"), _to_compile())
def test_compiles_for_hopper_without_spills(
    op: KernelOp, impl: Impl, case: Case, record_property: pytest.RecordProperty
) -> None:
    inputs, recorder = _inputs(op, case), Recorder()
    with in_place_of_triton_call(recorder):
        jax.eval_shape(partial(impl.fn, **inputs.static), *inputs.args)
    assert recorder.calls
    for call in recorder.calls:
        code = compiled(call)
        record_property(str(call), str(code))
        assert code.spilled_bytes == 0, f"{call} spills: {code}"
        assert code.shared_bytes <= HOPPER_SHARED_BYTES, f"{call}: {code}"


@pytest.mark.parametrize(("op", "impl", "case"), _sweep("ci"))
def test_chosen_on_a_gpu_and_nowhere_else(op: KernelOp, impl: Impl, case: Case) -> None:
    inputs = _inputs(op, case)
    first = next(one for of, one, other in _runnable() if (of, other) == (op, case))
    assert select(op, "gpu", inputs.args, inputs.static) == first
    assert select(op, "cpu", inputs.args, inputs.static).name in OFF_GPU
    with pytest.raises(ValueError, match=f"{impl.name}: it runs on gpu, not on cpu"):
        select(op, "cpu", inputs.args, inputs.static, pinned=impl.name)


@pytest.mark.skipif(not HAS_CUDA_PLUGIN, reason="jax-triton lowers with JAX's CUDA plugin alone")
@pytest.mark.parametrize(("op", "impl", "case"), _sweep("ci"))
def test_lowers_for_cuda_in_place(op: KernelOp, impl: Impl, case: Case) -> None:
    inputs = _inputs(op, case)
    call = partial(jax_triton.triton_call, compute_capability=90)
    with in_place_of_triton_call(call):
        text = lowered_in_place(op, impl, inputs)
    assert "custom_call @triton_kernel_call_ffi" in text
    arrays, _ = arrays_of(inputs.args)
    donated = [i for i in op.donate if arrays[i] is not None]
    assert text.count("tf.aliasing_output") == len(donated)


def test_unsupported_dtypes_are_refused() -> None:
    """By kernels of floating-point values; publish takes integers only."""
    for op in all_ops():
        for impl in (impl for impl in op.impls if impl.name in TRITON):
            inputs = _inputs(op, op.cases[0])
            if not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(inputs.args)):
                assert op.name == "publish"
                continue
            whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), inputs.args)
            reason = impl.refuses("gpu", whole, inputs.static)
            assert reason is not None and "int32, not one of bfloat16" in reason
