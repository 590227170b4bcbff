"""The Triton kernels with fixed bits without a GPU: the same bits in any company, and machine code.

A row's bits are compared for several numbers of rows and places among them, a token's for chunks of
several sizes and decode rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.skinny_gemm.ref import GemmArgs

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

from kit import triton_fixed
from kit.triton_shims import Recorder, compile_call, in_place_of_triton_call

TESTS = Path(__file__).parents[1]
CHECKS = tuple(triton_fixed.checks())
HOPPER_SHARED_BYTES = 227 << 10  # per CTA


def _often(names: tuple[str, ...], often: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in often else pytest.mark.nightly) for name in names
    ]


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The results of this session's checks in the interpreter."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_the_same_bits_in_any_company
    ]
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    ended = subprocess.run(
        [sys.executable, "-m", "kit.triton_fixed", *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", _often(CHECKS, triton_fixed.BY_DAY))
def test_the_same_bits_in_any_company(name: str, interpreted: dict[str, list[str]]) -> None:
    assert interpreted[name] == []


def _gemm(dtype: str, rows: int, **static: Any) -> None:
    from pallas_kernels.skinny_gemm.fixed.triton import skinny_gemm

    of = partial(jax.ShapeDtypeStruct, dtype=dtype)
    shape = (32064, 2560) if static.get("by_output") else (2560, 6144)
    jax.eval_shape(skinny_gemm, GemmArgs(x=of((rows, 2560)), w=of(shape), **static))


def _attention(dtype: str, heads: int, kv_heads: int, dim: int) -> None:
    from pallas_kernels.paged_prefill.fixed.triton import attend_rows, paged_prefill

    of, ints = partial(jax.ShapeDtypeStruct, dtype=dtype), partial(jax.ShapeDtypeStruct, dtype="i4")
    common: dict[str, Any] = {"scale": 0.1, "k_pages": of((99, 16, kv_heads, dim))}
    common |= {"v_pages": common["k_pages"], "page_table": ints((4, 256)), "seq_lens": ints((4,))}
    q, starts = of((1024, heads, dim)), ints((5,))
    jax.eval_shape(paged_prefill, PrefillArgs(q=q, query_start_loc=starts, **common))
    rows = DecodeArgs(qkv=of((4, heads + 2 * kv_heads, dim)), eps=0.0, **common)
    jax.eval_shape(attend_rows, of((4, heads, dim)), rows)


def _experts(dtype: str) -> None:
    from pallas_kernels.experts.fixed.triton import experts

    of, chosen = partial(jax.ShapeDtypeStruct, dtype=dtype), (100, 8)
    args = ExpertsArgs(
        x=of((100, 2048)),
        choices=jax.ShapeDtypeStruct(chosen, "i4"),
        weights=jax.ShapeDtypeStruct(chosen, "f4"),
        gate_up=of((128, 1536, 2048)),
        down=of((128, 2048, 768)),
    )
    jax.eval_shape(experts, args)


CALLS = {
    "few rows": partial(_gemm, "bfloat16", 8),
    "many rows": partial(_gemm, "bfloat16", 100),
    "few rows, swiglu": partial(_gemm, "bfloat16", 8, swiglu=True),
    "many rows, swiglu": partial(_gemm, "bfloat16", 100, swiglu=True),
    "logits": partial(_gemm, "bfloat16", 8, by_output=True, wide=True),
    "float32": partial(_gemm, "float32", 8),
    "heads of 128": partial(_attention, "bfloat16", 32, 8, 128),
    "heads of 64": partial(_attention, "bfloat16", 9, 3, 64),
    "heads of 256": partial(_attention, "bfloat16", 16, 8, 256),
    "float32 heads of 128": partial(_attention, "float32", 32, 8, 128),
    "float32 heads of 256": partial(_attention, "float32", 16, 8, 256),
    "experts": partial(_experts, "bfloat16"),
}


@pytest.mark.parametrize("name", _often(tuple(CALLS), ("heads of 128",)))
def test_compiles_for_hopper_without_spills(name: str) -> None:
    recorder = Recorder()
    with in_place_of_triton_call(recorder):
        CALLS[name]()
    own = [call for call in recorder.calls if ".fixed." in call.kernel.__module__]
    assert own
    for call in own:
        code = compile_call(call)
        assert code.spilled_bytes == 0, f"{call} spills: {code}"
        assert code.shared_bytes <= HOPPER_SHARED_BYTES, f"{call}: {code}"


@pytest.mark.nightly
def test_all_tiles_have_one_kind_of_instruction() -> None:
    """Others of the tensor cores could add the products of a row in another order."""
    recorder = Recorder()
    with in_place_of_triton_call(recorder):
        for name in ("few rows", "many rows", "few rows, swiglu", "many rows, swiglu", "logits"):
            CALLS[name]()
    assert len(recorder.calls) == 5
    assert {compile_call(call).matmuls for call in recorder.calls} == {frozenset({"m64k16"})}


def test_decode_rows_and_prompts_have_one_tile() -> None:
    """The parameters that order a token's sums are equal in both launches."""
    recorder = Recorder()
    with in_place_of_triton_call(recorder):
        _attention("bfloat16", 32, 8, 128)
    decodes, prompts = (
        next(
            (dict(call.constants), call.options)
            for call in recorder.calls
            if dict(call.constants).get("DECODES") is decodes
        )
        for decodes in (True, False)
    )
    assert decodes[1] == prompts[1]
    for name in ("ROWS", "BLOCK", "SPLIT", "SCALE"):
        assert decodes[0][name] == prompts[0][name]
