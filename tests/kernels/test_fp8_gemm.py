"""quantised_gemm of fp8 matrices in Mosaic, without a GPU: right in JAX's interpreter, and lowered.

JAX's interpreter multiplies fp8 in float32, so these tests do not show the precision of the tensor
cores.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.harness.registry import Inputs, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.arrangements import rows_of
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.quantised import Form, Quantised, dequantised, joined
from pallas_kernels.quantised_gemm.api import OP, quantised_gemm
from pallas_kernels.quantised_gemm.cases import QuantisedCase
from pallas_kernels.quantised_gemm.fp8 import decode, launch, mosaic, prompt, quantise, tokens
from pallas_kernels.quantised_gemm.fp8.launch import DecodeConfig, Fp8Sizes, PromptConfig
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.residual_norm import token

FP8 = next(impl for impl in OP.impls if impl.name == "mosaic_fp8")
HOPPER = Device("gpu", "NVIDIA H100", "9.0")
ROWS, BLOCKS = False, True
QWEN3 = {  # the dense models of Qwen3-FP8: hidden, outputs of q, and of gate
    "0.6b": (1024, 2048, 3072),
    "1.7b": (2048, 2048, 6144),
    "4b": (2560, 4096, 9728),
    "8b": (4096, 4096, 12288),
    "14b": (5120, 5120, 17408),
    "32b": (5120, 8192, 25600),
}
GEMMS = {  # inputs, outputs, swiglu, split
    f"{model}_{name}": sizes
    for model, (hidden, q, gate) in QWEN3.items()
    for name, sizes in {
        "qkv": (hidden, q + 2 * 1024, False, False),
        "o": (q, hidden, False, True),
        "gate_up": (hidden, gate, True, False),
        "down": (gate, hidden, False, True),
    }.items()
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "ref_union", lambda plain, swizzled: plain)
    monkeypatch.setattr(token, "views", lambda ref: (ref, ref))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


def nightly(num_tokens: int) -> Any:
    """A number of tokens between others, which CI leaves out."""
    return pytest.param(num_tokens, marks=pytest.mark.nightly)


def arguments(
    num_tokens: int,
    inner: int,
    outer: int,
    blocks: bool,
    swiglu: bool = False,
    split: bool = False,
    bias: bool = False,
) -> QuantisedGemmArgs:
    """Tokens of different magnitudes, values and scales; the bias is as large as the results."""
    rng, rows = np.random.default_rng(num_tokens), outer * (1 + swiglu)
    x = rng.normal(size=(num_tokens, inner)) * rng.uniform(0.1, 3, (num_tokens, 1))
    values = rng.normal(size=(rows, inner)).astype(ml_dtypes.float8_e4m3fn)
    shape = (rows // tokens.GROUP, inner // tokens.GROUP) if blocks else (rows, 1)
    scales = rng.uniform(0.5, 1.5, shape) * inner**-0.5
    w = Quantised("fp8", jnp.asarray(values), jnp.asarray(scales, jnp.float32))
    added = jnp.asarray(rng.normal(size=rows), jnp.bfloat16) if bias else None
    x = jnp.asarray(x, jnp.bfloat16)
    return QuantisedGemmArgs(x=x, w=w, bias=added, swiglu=swiglu, split=split)


def problem(impl: Any, args: QuantisedGemmArgs) -> str | None:
    """How the implementation differs from its definition, or None."""
    case = QuantisedCase("case", "fp8", *args.x.shape, args.w.num_outputs, group=0)
    impl = type(FP8)("mosaic_fp8", impl, ref=FP8.ref)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return mismatch(OP, impl, case, Inputs((args,)))


@pytest.mark.parametrize("blocks", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("swiglu", [False, True], ids=["plain", "swiglu"])
@pytest.mark.parametrize("num_tokens", [1, nightly(3), 8, 64, nightly(200), 512])
@pytest.mark.usefixtures("on_hopper", "interpreted")
def test_the_interpreter_agrees_with_the_definition(
    num_tokens: int, swiglu: bool, blocks: bool
) -> None:
    args = arguments(num_tokens, 512, 128, blocks, swiglu)
    assert FP8.refuses("gpu", (args,), {}) is None
    found = problem(mosaic.quantised_gemm, args)
    assert found is None, found


@pytest.mark.parametrize("blocks", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("num_tokens", [1, nightly(8), 64, nightly(200), 264])
@pytest.mark.usefixtures("on_hopper", "interpreted")
def test_the_kernels_add_the_bias(num_tokens: int, blocks: bool) -> None:
    args = arguments(num_tokens, 512, 256, blocks, bias=True)
    assert len(jax.make_jaxpr(FP8.fn)(args).eqns) == 1, "an addition follows the kernels"
    found = problem(mosaic.quantised_gemm, args)
    assert found is None, found


@pytest.mark.parametrize("blocks", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("num_tokens", [1, nightly(3), 8, 64, nightly(200)])
@pytest.mark.usefixtures("on_hopper", "interpreted")
def test_split_k_partials_add_up(num_tokens: int, blocks: bool) -> None:
    args = arguments(num_tokens, 2560, 128, blocks, split=True)
    assert launch.decode_config(launch.sizes_of(args)).split_k > 1
    found = problem(mosaic.quantised_gemm, args)
    assert found is None, found


def with_config(config: DecodeConfig | PromptConfig, args: QuantisedGemmArgs) -> Any:
    """A kernel with a given configuration, with the signature of an implementation."""
    x, values, scales = args.x, args.w.values, args.w.scales
    sizes = launch.sizes_of(args)
    if isinstance(config, PromptConfig):
        return prompt.launch_with(config, sizes, *tokens.quantised_tokens(x), values, scales)
    quantised = (x, None) if config.quantises else tokens.quantised_tokens(x)
    return decode.launch_with(config, sizes, *quantised, values, scales)


DECODE = {
    "one_stage": (3, 512, 64, ROWS, False, DecodeConfig(1, 1)),
    "several_groups": (8, 512, 128, BLOCKS, True, DecodeConfig(2, 2)),
    "uneven_split_k": (8, 1280, 64, ROWS, False, DecodeConfig(2, 2, split_k=3)),
    "warpgroups_divide_tokens": (16, 512, 128, BLOCKS, True, DecodeConfig(1, 2, warpgroups=2)),
    "warpgroups_divide_outputs": (8, 512, 128, ROWS, True, DecodeConfig(1, 3, 2, 1, False, True)),
    "two_blocks": (8, 512, 256, BLOCKS, False, DecodeConfig(2, 2)),
    "blocks_and_split_k": (64, 1280, 256, BLOCKS, False, DecodeConfig(1, 2, split_k=3)),
    "blocks_of_two_warpgroups": (8, 512, 256, BLOCKS, True, DecodeConfig(1, 3, 2, 1, False, True)),
    "blocks_quantises_one_token": (1, 1664, 256, BLOCKS, True, DecodeConfig(1, 2, 1, 1, True)),
    "blocks_quantises_split": (8, 1664, 256, BLOCKS, False, DecodeConfig(1, 2, 1, 3, True)),
    "quantises_16_tokens": (16, 640, 64, ROWS, False, DecodeConfig(1, 2, 1, 2, True)),
    "quantises_uneven_split": (8, 1664, 64, ROWS, False, DecodeConfig(1, 2, 1, 3, True)),
    "quantises_one_token": (1, 1664, 64, ROWS, False, DecodeConfig(1, 2, 1, 2, True)),
}
PROMPT = {
    "two_accumulators": (200, 512, 256, BLOCKS, False, PromptConfig(2, 2, 3)),
    "gate_and_up_in_one": (136, 640, 128, BLOCKS, True, PromptConfig(2, 1, 2)),
    "blocks_of_three_warpgroups": (264, 512, 256, BLOCKS, True, PromptConfig(3, 1, 3)),
    "three_warpgroups": (264, 512, 128, ROWS, True, PromptConfig(3, 1, 3)),
}


@pytest.mark.parametrize(
    ("num_tokens", "inner", "outer", "blocks", "swiglu", "config"),
    [*DECODE.values(), *PROMPT.values()],
    ids=[*DECODE, *PROMPT],
)
@pytest.mark.usefixtures("interpreted")
def test_all_configs_agree_with_the_definition(
    num_tokens: int, inner: int, outer: int, blocks: bool, swiglu: bool, config: Any
) -> None:
    split = isinstance(config, DecodeConfig) and config.split_k > 1
    args = arguments(num_tokens, inner, outer, blocks, swiglu, split)
    few_sms = Device("gpu", "few SMs", "9.0", num_sms=2)  # so that CTAs compute several tiles
    with compiling_for(few_sms):
        found = problem(partial(with_config, config), args)
    assert found is None, found


@pytest.mark.usefixtures("interpreted")
def test_a_token_is_the_same_alone_and_in_a_batch() -> None:
    args = arguments(64, 512, 128, ROWS)
    parts = [replace(args, x=args.x[:n]) for n in (1, 3, 8, 64)]
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        results = [mosaic.quantised_gemm(part) for part in parts]
    for result in results[:-1]:
        np.testing.assert_array_equal(result, results[-1][: result.shape[0]])


@pytest.mark.parametrize("shape", [(1, 512), (3, 640), (96, 640), (1024, 768)])
def test_tokens_are_quantised_as_defined(shape: tuple[int, int]) -> None:
    num_tokens, inner = shape
    x = arguments(num_tokens, inner, 64, ROWS).x.at[0, :128].set(0)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        values, scales = quantise.quantised_tokens(x)
    expected, expected_scales = tokens.quantised_tokens(x)
    np.testing.assert_array_equal(values.astype(jnp.float32), expected.astype(jnp.float32))
    np.testing.assert_allclose(scales[:, : shape[0]], expected_scales[:, : shape[0]], rtol=1e-6)


def test_quantised_tokens_are_close() -> None:
    x = arguments(16, 1024, 64, ROWS).x.astype(jnp.float32)
    error = tokens.dequantised_tokens(*tokens.quantised_tokens(x)) - x
    assert jnp.sqrt((error**2).mean(1) / (x**2).mean(1)).max() < 0.03  # e4m3 has 3 bits


def test_results_of_swiglu_are_quantised_in_the_epilogue() -> None:
    args = arguments(200, 512, 128, BLOCKS, swiglu=True)
    x8, x_scales = tokens.quantised_tokens(args.x)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        result = mosaic.swiglu_quantised(x8, x_scales, args.w, sizes=launch.sizes_of(args))
    wide = args.x.astype(jnp.float32)  # so that results are not rounded before they are quantised
    y = tokens.quantised_gemm(replace(args, x=wide))
    expected = tokens.dequantised_tokens(*tokens.quantised_tokens(y))
    # Sums are added in another order, so a few values are rounded the other way.
    error = jnp.abs(tokens.dequantised_tokens(*result) - expected)
    assert (error > 0.01 * jnp.abs(expected)).mean() < 1e-4
    assert (error <= 0.13 * jnp.abs(expected) + 1e-3).all()


@pytest.mark.parametrize("blocks", [ROWS, BLOCKS], ids=["rows", "blocks"])
def test_the_weights_are_those_of_the_stored_matrix(blocks: bool) -> None:
    w = arguments(1, 512, 256, blocks).w
    values, scales = w.values, w.scales
    assert w.block_outputs == (128 if blocks else 1)
    np.testing.assert_array_equal(tokens.dequantised_weights(values, scales), dequantised(w))
    each = np.repeat(np.asarray(scales), w.block_outputs, axis=0)
    by_output = Quantised("fp8", values, each)
    np.testing.assert_array_equal(dequantised(w), dequantised(by_output))
    ids = jnp.array([5, 255, 127, 128, 300, -7])  # beyond the matrix: padding
    np.testing.assert_array_equal(rows_of(w, ids), rows_of(by_output, ids))


def test_a_form_of_blocks() -> None:
    form = Form("fp8", 128, "float32", block_outputs=128)
    assert str(form) == "fp8 128x128"
    assert form.arrays(256, 512)["scales"] == ((2, 4), "float32")
    args = arguments(1, 512, 256, BLOCKS)
    w = jax.tree.map(np.asarray, args.w)
    assert w.form == form and joined([w, w]).form == form
    np.testing.assert_array_equal(dequantised(joined([w, w]))[256:], dequantised(w))
    with pytest.raises(ValueError, match="192 outputs are not a multiple of 128"):
        form.arrays(192, 512)
    with pytest.raises(ValueError, match="3 blocks do not divide 256 outputs"):
        quantised_gemm(replace(args, w=replace(w, scales=jnp.ones((3, 4)))))


def shapes(num_tokens: int, name: str, blocks: bool) -> QuantisedGemmArgs:
    """The arguments of a call of ``GEMMS``."""
    inner, outer, swiglu, split = GEMMS[name]
    rows = outer * (1 + swiglu)
    of: Any = jax.ShapeDtypeStruct
    scales = (rows // 128, inner // 128) if blocks else (rows, 1)
    w = Quantised("fp8", of((rows, inner), "float8_e4m3fn"), of(scales, "float32"))
    x = of((num_tokens, inner), "bfloat16")
    return QuantisedGemmArgs(x=x, w=w, swiglu=swiglu, split=split)


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("blocks", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.usefixtures("on_hopper")
def test_gemms_of_published_models_are_chosen_and_fit(name: str, blocks: bool) -> None:
    for num_tokens in (1, 8, 16, 64, 128, 256, 512, 8192):
        args = shapes(num_tokens, name, blocks)
        assert select(OP, "gpu", (args,), {}).name == "mosaic_fp8"
        sizes = launch.sizes_of(args)
        assert sizes.blocks == blocks
        with compiling_for(HOPPER):
            few = launch.decodes(sizes)
            config = launch.decode_config(sizes) if few else launch.prompt_config(sizes)
        assert config.fits(sizes), (sizes, config)


def test_tiles_whose_registers_spill_are_not_chosen() -> None:
    with compiling_for(HOPPER):
        for name, (inner, outer, swiglu, split) in GEMMS.items():
            sizes = Fp8Sizes(8192, inner, outer, swiglu, split, ROWS, dtype="bfloat16")
            assert launch.prompt_config(sizes).accs == 2, name
            assert launch.prompt_config(sizes._replace(blocks=True)).accs == 1, name


@pytest.mark.parametrize("num_tokens", [1, nightly(8), 64, nightly(256), 1024])
@pytest.mark.parametrize("name", ["4b_qkv", "32b_gate_up", "32b_down"])
@pytest.mark.parametrize("blocks", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.usefixtures("on_hopper")
def test_lowered_for_hopper(num_tokens: int, name: str, blocks: bool) -> None:
    args, step = shapes(num_tokens, name, blocks), jax.jit(FP8.fn)
    assert "@mosaic_gpu" in step.trace(args).lower(lowering_platforms=("cuda",)).as_text()
    assert step.eval_shape(args) == launch.result_shapes(args)


SPLIT_BLOCKS = jnp.zeros((256, 4), jnp.float32)  # a scale for each output and group
FINE_BLOCKS = jnp.zeros((4, 8), jnp.float32)  # blocks of 64 x 64


@pytest.mark.parametrize(
    ("args", "more", "reason"),
    [
        pytest.param((9, 512, 128, ROWS), {}, "9 tokens are not a multiple of 8", id="tokens"),
        pytest.param((8, 384, 128, ROWS), {}, "384 inputs are not", id="inputs"),
        pytest.param((8, 512, 96, ROWS), {}, "96 outputs not of 64", id="outputs"),
        pytest.param((512, 512, 192, ROWS), {}, "192 outputs not of 128", id="prompt_outputs"),
        pytest.param((8, 512, 256, ROWS), {"scales": SPLIT_BLOCKS}, "neither of rows", id="scales"),
        pytest.param((8, 512, 256, ROWS), {"scales": FINE_BLOCKS}, "neither of rows", id="fine"),
        pytest.param((8, 576, 128, BLOCKS), {}, "576 inputs are not", id="block_inputs"),
        pytest.param((8, 512, 192, BLOCKS), {}, "(1, 4) are neither of rows", id="block_outputs"),
        pytest.param((8, 512, 128, ROWS), {"kind": "int8"}, "is not fp8", id="kind"),
        pytest.param((8, 512, 128, ROWS), {"x": jnp.zeros((8, 512))}, "float32", id="dtype"),
        pytest.param((8, 512, 128, ROWS), {"hopper": False}, "not 9.x", id="device"),
    ],
)
def test_refusals(
    args: Any, more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if more.get("hopper", True):
        monkeypatch.setattr(launch, "not_hopper", lambda: None)
    call = arguments(*args)
    matrix = {name: more[name] for name in ("scales", "kind") if name in more}
    call = replace(call, x=more.get("x", call.x), w=replace(call.w, **matrix))
    assert reason in (FP8.refuses("gpu", (call,), {}) or "")


def test_configs_that_do_not_fit_are_refused() -> None:
    args = arguments(8, 640, 64, ROWS)
    for config in (DecodeConfig(2, 2), PromptConfig(2, 2, 4)):
        with pytest.raises(ValueError, match="does not fit"):
            with_config(config, args)
