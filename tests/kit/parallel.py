"""Engines on several fake CPU devices answer as on one: ``python -m kit.parallel FOLDER NAMES``.

The names are those of ``CHECKS``. A process, as the number of devices must be set before JAX
starts. Prints "checked".
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import msgspec
import numpy as np
from gguf import GGMLQuantizationType
from jax.extend.core import jaxprs_in_params

import jaxinfer
from jaxinfer import LLM, SamplingParams
from jaxinfer.core.errors import JaxinferError
from jaxinfer.core.progress import NoProgress
from jaxinfer.core.step import Bucket
from jaxinfer.engine.api.load import load
from jaxinfer.exec.compile.fingerprint import of_machine
from jaxinfer.exec.compile.program import MAX_LAUNCHED_TOKENS, Program
from jaxinfer.exec.run.batch_staging import BatchStaging
from jaxinfer.models.base import Model, Params
from jaxinfer.models.division import own_part
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import Placement, default_placement, one_kind, placement_on
from jaxinfer.rl.trainer_weights import TrainerWeights
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.load import load_params
from jaxinfer.weights.save import ParamsCheckpoint, write_model
from jaxinfer.weights.sources import resolve_source
from kit import published_formats
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf
from kit.device_sums import MOST_FUSED, check_sums, exchanged
from kit.engines import copy_to_cpu, tiny_limits
from kit.gguf_blocks import random_rows
from kit.parallel_tiers import check_tiers
from kit.quantised_models import write_gpt_oss
from kit.tiny_models import CONFIGS, random_params
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json
from pallas_kernels.harness.pins import Pins
from pallas_kernels.lib.device import Device, compiling_for

DEVICES = 4
SIZES: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_model_len": 96,
    "max_num_batched_tokens": 64,
    "prefill_bucket_start": 64,
    "mixed_bucket_start": 4,
    "decode_bucket_start": 4,
    "page_size": 8,
    "num_pages": 61,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
PROMPTS = ([5, 9, 3, 80], [7] * 20, list(range(3, 43)))
# sizes that four devices divide
MORE: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_head": 8},
    "gemma4_all": {"num_experts": 8},
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "deepseek_v2": {"n_routed_experts": 8},
    "deepseek_v4": {"o_groups": 4},
    "granite_moe": {"num_local_experts": 8},
    "ernie4_5_moe": {"moe_num_experts": 8},
    "hunyuan_moe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8},
    "olmoe": {"num_experts": 8},
    "glm4_moe": {"n_routed_experts": 8},
    "lfm2_moe": {"num_experts": 8},
    "granite_hybrid": {"num_local_experts": 8, "mamba_n_groups": 1},
    "bamba": {"mamba_n_groups": 4},
    "falcon_h1": {"mamba_n_groups": 4},
    "nemotron_h": {"n_groups": 4},
    "mamba2": {"n_groups": 1},
    "jamba": {"num_experts": 8},
    "olmo_hybrid": {"linear_num_key_heads": 4},
    "qwen3_5": {"linear_num_key_heads": 4},
    "qwen3_5_moe": {"num_experts": 8, "linear_num_key_heads": 4},
    "qwen3_next": {"num_experts": 8, "linear_num_key_heads": 4},
    "qwen4_exp": {"num_experts": 8, "linear_num_key_heads": 4},
    "kimi_linear": {
        "num_experts": 8,
        "linear_attn_config": {**CONFIGS["kimi_linear"]["linear_attn_config"], "num_heads": 4},
    },
    "exaone_moe": {"num_experts": 8},
    "afmoe": {"num_experts": 8},
    "flex_olmo": {"num_experts": 8},
    "cohere2_moe": {"num_experts": 8},
    "hy_v3": {"num_experts": 8},
    "sarvam_moe": {"num_experts": 8},
    "sarvam_mla": {"num_experts": 8},
    "mellum": {"num_experts": 8},
    "dots1": {"n_routed_experts": 8},
    "glm4_moe_lite": {"n_routed_experts": 8},
    "kolibri1": {"num_experts": 8},
    "lara_mini": {"num_experts": 8, "linear_num_key_heads": 4},
    "solar_open": {"n_routed_experts": 8},
    "mistral4": {"n_routed_experts": 8},
    "minimax": {"num_local_experts": 8},
    "bailing": {"num_experts": 8},
    "bailing_linear": {"group_norm_size": 4},
    "minimax_m2": {"num_local_experts": 8},
    "minimax_m3": {"num_local_experts": 8},
    "granite_moe_shared": {"num_local_experts": 8},
    "phimoe": {"num_local_experts": 8},
    "llama4": {"num_local_experts": 8},
    "openpangu_ultra": {"n_routed_experts": 8},
    "dots3_note": {
        "n_routed_experts": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
    },
    "muse_spark": {"num_local_experts": 8},
    "k2_horizon": {"num_experts": 8},
    "openpangu_pro": {"n_routed_experts": 8},
    "step1": {"num_attention_heads": 4, "hidden_size": 64},
    "step3": {"moe_num_experts": 8},
    "mistral_large3": {"n_routed_experts": 8},
}
# as published, a device has a part of each expert
SLICED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"intermediate_size": 256},
    "qwen3_moe": {"moe_intermediate_size": 256},
    "gemma4_all": {"moe_intermediate_size": 256},
    "deepseek_v2": {"moe_intermediate_size": 256},
    "qwen3_5_moe": {"moe_intermediate_size": 256, "linear_num_key_heads": 4},
}
STEERED = {"layers.0.z": 32, "layers.1.mlp_post": 48}  # and their widths
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[name], **MORE.get(name, {}), **changes}


def written(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A folder with a model of random weights, and the tiny tokenizer."""
    if not folder.exists():
        model = build_model(config, "float32")
        write_model(folder, model, random_params(model, seed), None, {}, NoProgress())
        (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    return folder


def answers(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """Tokens, and logprobs of the last request's prompt and answer."""
    common: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    extras: dict[str, Any] = {"presence_penalty": 0.5, "logit_bias": {7: 2.0}, "logprobs": 2}
    sampling = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, top_k=50, **common),
        SamplingParams(temperature=1.0, seed=4, prompt_logprobs=1, **extras, **common),
    ]
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], sampling)
    return tokens_of(outputs), logprobs_of(outputs[-1])


def logprobs_of(output: Any) -> list[float]:
    found = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    return [next(iter(one.values())).logprob for one in found if one]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_equal(path: Path, folder: Path, degrees: tuple[int, ...], **settings: Any) -> None:
    """Engines of a model on so many devices answer as on one device."""
    settings = {**SIZES, "cache_dir": str(folder / "cache"), **settings}
    expected, logprobs = answers(LLM(str(path), **settings))
    for degree in degrees:
        found, others = answers(LLM(str(path), tensor_parallel_size=degree, **settings))
        assert found == expected, (path, degree, found, expected)
        np.testing.assert_allclose(others, logprobs, atol=5e-3, err_msg=f"{path} on {degree}")


def family(name: str) -> Callable[[Path], None]:
    """A check of one family on 2 and 4 devices, with whole experts if it has some."""
    return lambda folder: check_equal(written(folder / name, config_of(name)), folder, (2, DEVICES))


def undivided(name: str) -> Callable[[Path], None]:
    """A check that one family is refused on several devices, before weights are read."""

    def check(folder: Path) -> None:
        path = written(folder / name, config_of(name))
        settings = {**SIZES, "cache_dir": str(folder / "cache"), "tensor_parallel_size": 2}
        check_refused(lambda: LLM(str(path), **settings), "cannot be divided among 2 devices")

    return check


def fp8_pages(folder: Path) -> None:
    """Scales are divided with their heads; of two KV heads each is on two of four devices."""
    for name in ("llama", "gemma3"):
        path = written(folder / name, config_of(name))
        check_equal(path, folder, (2, DEVICES), kv_cache_dtype="fp8")


def tiers(name: str, *degrees: int) -> Callable[[Path], None]:
    """A check of one family whose pages and states go to a tier and come back."""

    def check(folder: Path) -> None:
        own = {"cache_dir": str(folder / "cache"), "num_pages": 73, "max_num_seqs": 6}
        check_tiers(written(folder / name, config_of(name)), {**SIZES, **own}, degrees)

    return check


def sliced(name: str) -> Callable[[Path], None]:
    """A check of one family whose experts are divided by columns."""

    def check(folder: Path) -> None:
        path = written(folder / f"{name}_sliced", {**CONFIGS[name], **SLICED[name]})
        check_equal(path, folder, (2, DEVICES))

    return check


def check_experts(folder: Path) -> None:
    """Experts are divided by columns or as a whole, as the sizes and the setting say."""
    path = written(folder / "gpt_oss_sliced", {**config_of("gpt_oss"), **SLICED["gpt_oss"]})
    settings = {**SIZES, "cache_dir": str(folder / "cache"), "tensor_parallel_size": 2}
    for whole, expected in ((None, (8, 128)), (True, (4, 256))):
        plan = jaxinfer.engine.start.build.plan_engine(  # type: ignore[attr-defined]
            jaxinfer.EngineConfig(model=str(path), enable_expert_parallel=whole, **settings)
        )
        array = plan.load_params(NoProgress())["layers_0"]["down"]
        shapes = {shard.data.shape for shard in array.addressable_shards}
        assert shapes == {(expected[0], 32, expected[1])}, shapes


def quantised(folder: Path) -> None:
    """Quantised matrices: on load in each form, MXFP4 experts, and dequantised ones."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    path = written(folder / "wide", config_of("llama", **wide))
    for form in ("int4", "int8", "fp8"):
        check_equal(path, folder, (2, DEVICES), quantization=form)
    settings = {**SIZES, "cache_dir": str(folder / "cache"), "quantization": "int4"}
    llm = LLM(str(path), tensor_parallel_size=2, **settings)
    expected = answers(llm)[0]
    check_refused(lambda: llm.model.params, "quantised and divided among several devices")
    other = written(folder / "wide_other", config_of("llama", **wide), seed=7)
    for given in (str(other), load(str(path), **SIZES).params):  # of floats
        llm.update_weights(given)
        assert (answers(llm)[0] == expected) == (given != str(other))
    kept = load(str(path), **{**settings, "cpu_weights": "auto"}).params
    check_refused(lambda: llm.update_weights(kept), "is quantised and divided among 2 devices")
    experts = write_gpt_oss(folder / "mxfp4")
    check_equal(experts, folder, (), cpu_weights="float32")
    config = json.loads((experts / "config.json").read_text())
    assert config["num_local_experts"] == 7  # whole ones cannot be divided
    check_refused(
        lambda: LLM(str(experts), tensor_parallel_size=2, **SIZES),
        "7 experts cannot be divided among 2 devices",
    )
    eight = folder / "mxfp4_of_8"
    write_gpt_oss(eight, num_local_experts=8)
    check_equal(eight, folder, (2, DEVICES))
    check_equal(eight, folder, (2,), cpu_weights="float32")


def files(folder: Path) -> None:
    """Quantised files of every published format, and GGUF."""
    for name in published_formats.PUBLISHED:
        config, tensors, _ = published_formats.published(name)
        path = published_formats.write_published(folder / name, config, tensors)
        check_equal(path, folder, (2, DEVICES))
    of = tiny_llama_config(hidden_size=128, intermediate_size=256, head_dim=32)
    tensors = random_hf_tensors(build_model(of, "float32"))
    for kind in ("Q8_0", "Q4_1", "Q5_1"):
        path = folder / f"{kind}.gguf"
        write_gguf(path, of, tensors, kind=GGMLQuantizationType[kind])
        check_equal(path, folder, (2, DEVICES))
    check_equal(path, folder, (2,), cpu_weights="float32")


def lowered(folder: Path) -> None:
    """Steps for several GPUs can be lowered; none of them waits for masks."""
    del folder
    config = config_of("qwen3_moe", hidden_size=512, head_dim=128, moe_intermediate_size=256)
    model = build_model(config, "bfloat16")
    layers = (replace(x, ffn=x.ffn.with_experts(slices=True)) for x in model.config.layers)
    sliced = replace(model, config=replace(model.config, layers=tuple(layers)))
    for count, own in ((2, model), (DEVICES, sliced)):
        placement, divided = default_placement(count), replace(own, devices=count)
        program = Program(divided, tiny_limits(), "gpu", placement=placement)
        assert not program.reads_masks
        for name in program.names():
            text = program.trace(name).lower(lowering_platforms=("cuda",)).as_text()
            assert ("all_gather" in text) == (name != "admit"), name
    for impl in ("triton", "xla"):  # steps with prompts that NCCL interrupts are no CUDA graphs
        buckets = (Bucket(4), Bucket(0, 2 * MAX_LAUNCHED_TOKENS, 4), Bucket(0, 64, 4))
        limits = msgspec.structs.replace(tiny_limits(), buckets=buckets)
        pins = Pins((("all_reduce", impl),))
        program = Program(divided, limits, "gpu", pins, placement)
        options = [program.compiler_options(bucket.name) for bucket in limits.buckets]
        graphs = ["xla_gpu_enable_command_buffer" not in own for own in options]
        assert graphs == [True, impl == "triton", False]  # short prompts are launched
        kept = [own.get("xla_gpu_command_buffer_update_mode") == "SKIP_TEMP" for own in options]
        assert kept == graphs  # temporaries of graphs do not move


# by kind: dense, norms over all heads, experts, latent attention, recurrent, inputs of layers
DECODERS = (
    "gemma3n",
    "llama",
    "olmo2",
    "qwen3_moe",
    "deepseek_v2",
    "qwen3_5",
    "mamba2",
    "gemma4_all",
)
COLLECTIVE = re.compile(r"\b(?:psum|pm\w\w|all_\w+|ppermute|reduce_scatter)\w*\[")
EXCHANGE = re.compile(r"JITFunction\(pallas_kernels\.all_(?:reduce|gather)")


def graphs(folder: Path) -> None:
    """A step of several GPUs of one host is one CUDA graph: nothing in it is NCCL's, and its
    kernels that exchange data run one after the other, as each takes ``Peers.order``.
    """
    del folder
    tests = (*((name, "triton") for name in DECODERS), ("llama", "xla"))
    for name, impl in tests:
        with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
            model = replace(build_model(config_of(name), "bfloat16"), devices=2)
            sizes: dict[str, Any] = {"groups": model.state.groups, "align": model.state.align}
            sizes["num_pages"] = (61,) * len(sizes["groups"])
            sizes["num_snapshots"] = 4 if model.state.bytes_per_slot else 0
            limits = msgspec.structs.replace(tiny_limits(), buckets=(Bucket(2),), **sizes)
            pins = Pins((("all_reduce", impl),))
            program = Program(model, limits, "gpu", pins, default_placement(2))
            traced = program.trace("d2").jaxpr
        assert bool(COLLECTIVE.search(str(traced))) == (impl == "xla"), name
        kinds = Counter(kind for kind in equations(traced.jaxpr) if kind)
        assert (kinds["exchange"] > 2) == (impl == "triton"), name
        assert kinds["other"] == 0 and kinds["order"] <= 1, (name, kinds)


def equations(jaxpr: Any) -> Iterator[str]:
    """The kinds of the equations of a computation and of those that it calls: "exchange" of a
    kernel that exchanges data and takes an order, "other" of one that does not, "order" of one that
    makes an order, and else "".
    """
    for equation in jaxpr.eqns:
        refs = [one for one in equation.invars if str(one.aval) == "Ref{int32[1]}"]
        made = [one for one in equation.outvars if str(one.aval) == "Ref{int32[1]}"]
        if EXCHANGE.search(str(equation.params.get("fn"))):
            yield "exchange" if len(refs) == 1 else "other"
        else:
            yield "order" if made else ""
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def model_and_weights(folder: Path) -> tuple[Model, Params, Path]:
    """A model whose two KV heads are each on two devices, and whose vocabulary is not a multiple
    of four.
    """
    config = config_of("llama", attention_bias=True, mlp_bias=True)
    config |= {"vocab_size": TINY_VOCAB_SIZE, "eos_token_id": 2}
    path = written(folder / "model", config)
    model = build_model(config, "float32")
    return model, random_params(model), path


def check_loading(folder: Path) -> None:
    """Each device receives its own part of every parameter, and no more at any time."""
    model, params, path = model_and_weights(folder)
    placement, wholes = placement_on(jax.devices()), by_path(params)
    divided = replace(model, devices=DEVICES)
    source = resolve_source(str(path), cache_dir=folder, progress=NoProgress())
    dequantised = replace(source, quantised=True)  # from the second time on the cache is read
    options: dict[str, Any] = {"placement": placement, "cache_dir": folder, "seed": 0}
    options["progress"] = NoProgress()
    for found in (source, dequantised, dequantised):
        with peak_on_a_device() as peak:
            loaded = by_path(load_params(divided, found, **options))
        own = sum(array.addressable_shards[0].data.nbytes for array in loaded.values())
        assert own < 0.4 * sum(array.nbytes for array in wholes.values())
        assert max(peak.values()) <= own, (peak, own)
        check_parts(loaded, wholes, divided, placement)
    one = load_params(model, dequantised, **{**options, "placement": default_placement()})
    for leaf, array in by_path(one).items():
        np.testing.assert_array_equal(array, wholes[leaf], err_msg=leaf)
    assert len([*(folder / "converted").iterdir()]) == 1, "any number of devices share an entry"
    made = by_path(
        dummy_params(model, placement=default_placement(), seed=1, progress=NoProgress())
    )
    random = dummy_params(divided, placement=placement, seed=1, progress=NoProgress())
    check_parts(by_path(random), made, divided, placement, zeros=False)


def check_parts(
    loaded: dict[str, jax.Array],
    wholes: dict[str, Any],
    divided: Model,
    placement: Placement,
    *,
    zeros: bool = True,
) -> None:
    """Each device has its part of the whole arrays; ``zeros``: also behind the vocabulary."""
    specs, vocab = divided.whole.arrays, divided.config.vocab_size
    for leaf, array in loaded.items():
        parts = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        for rank, device in enumerate(placement.devices):
            expected = own_part(np.asarray(wholes[leaf]), specs[leaf], DEVICES, rank)
            found = parts[device]
            if not zeros and leaf in ("embed", "lm_head"):
                rows = max(0, min(len(found), vocab - rank * len(found)))
                found, expected = found[:rows], expected[:rows]
            np.testing.assert_array_equal(found, expected, err_msg=f"{leaf} of {device}")


@contextmanager
def peak_on_a_device() -> Iterator[Counter[Any]]:
    """The most bytes of new arrays that each device holds at a time in this scope."""
    peak, before, put = Counter[Any](), {id(a) for a in jax.live_arrays()}, jax.device_put

    def counted(*arguments: Any, **named: Any) -> Any:
        made = put(*arguments, **named)
        now, seen = Counter[Any](), set[int]()
        for array in jax.live_arrays():
            for shard in array.addressable_shards if id(array) not in before else ():
                at = shard.data.unsafe_buffer_pointer()
                if (key := hash((shard.device, at))) not in seen:  # a part of a global array too
                    seen.add(key)
                    now[shard.device] += shard.data.nbytes
        peak.update({d: max(0, n - peak[d]) for d, n in now.items()})
        return made

    jax.device_put = counted
    try:
        yield peak
    finally:
        jax.device_put = put


def features(folder: Path, **more: Any) -> None:
    """Chunks, preemption, prefixes, masks, other weights and sleep: on four devices as on one.

    Each step has a call after it, that of the digests, which is launched before masks are written.
    """
    _, _, path = model_and_weights(folder)
    other = written(folder / "other", json.loads((path / "config.json").read_text()), seed=7)
    settings = {**SIZES, "cache_dir": str(folder / "cache"), "num_pages": 16, **more}
    settings |= {"skip_tokenizer_init": False, "max_num_batched_tokens": 32}
    settings |= {"prefill_bucket_start": 32, "max_model_len": 80}
    settings |= {"record_digests": True}
    found = [
        described(
            LLM(str(path), tensor_parallel_size=n, record=str(folder / f"record{n}"), **settings),
            path,
            other,
        )
        for n in (1, DEVICES)
    ]
    for one, two in zip(*found, strict=True):
        name, expected = one
        if isinstance(expected, np.ndarray):
            np.testing.assert_allclose(two[1], expected, atol=1e-3, err_msg=name)
        else:
            assert two == one, (name, expected, two[1])


def described(llm: LLM, path: Path, other: Path) -> list[tuple[str, Any]]:
    """An engine's answers, each with the name of the feature that it shows."""
    given = [{"prompt_token_ids": one} for one in PROMPTS]
    found: list[tuple[str, Any]] = []

    def add(name: str, sampling: Any = GREEDY) -> list[Any]:
        outputs = llm.generate(given, sampling)
        found.append((name, tokens_of(outputs)))
        return outputs

    longer = SamplingParams(temperature=1.0, seed=2, max_tokens=36, ignore_eos=True)
    add("preempted", longer)
    assert llm.stats().num_preemptions > 0
    outputs = add("from prefixes")
    found.append(("cached tokens", cached := [one.num_cached_tokens for one in outputs]))
    assert any(cached)
    add("masks", SamplingParams(max_tokens=6, structured_outputs={"regex": "[a-c]{5}"}))
    add("masks and extras", SamplingParams(max_tokens=4, allowed_token_ids=[5, 9], logprobs=1))
    if llm.config.tap_points is not None:
        taps = llm.config.tap_points.split(",")
        vectors = {point: np.linspace(-2, 2, width).tolist() for point, width in STEERED.items()}
        steer = [{"point": point, "vector": vector} for point, vector in vectors.items()]
        tapped = add("taps", SamplingParams(temperature=0.0, max_tokens=3, taps=taps, steer=steer))
        found.extend((point, tapped[2].outputs[0].taps[point]) for point in taps)
    llm.update_weights(str(other))
    add("weights of a folder")
    params = llm.model.params
    llm.sleep(1)
    llm.wake_up()
    add("after sleep")
    llm.update_weights(load(str(path), dtype="float32", skip_tokenizer_init=True).params)
    add("weights of a tree")
    llm.sleep(2)
    llm.wake_up()
    llm.update_weights(params)
    add("own weights after sleep")
    assert found[-1][1] == dict(found)["weights of a folder"] != dict(found)["weights of a tree"]
    found.append(("logits", np.asarray(llm.model.forward(PROMPTS[0]))))
    assert llm.stats().num_late_compiles == 0
    return found


def staging(folder: Path) -> None:
    """Batches in staging buffers, of which each device has one, are what every device reads."""

    def of_placement(placement: Placement) -> BatchStaging:
        return BatchStaging([copy_to_cpu] * placement.num_devices, placement)

    with patch.object(BatchStaging, "of_placement", of_placement):
        check_equal(model_and_weights(folder)[2], folder, (DEVICES,))


def exchange(folder: Path) -> None:
    """Every sum over the devices knows its rank and the addresses of their exchange memory, and so
    does the gather of logits; few rows are added and normalised together.
    """
    biased = model_and_weights(folder)[2]
    plain = written(folder / "plain", config_of("llama"))
    parallel = written(folder / "cohere", config_of("cohere"))
    for path, is_fused in ((biased, False), (plain, True), (parallel, False)):
        with exchanged() as sums:
            check_equal(path, folder, (DEVICES,))
        assert max(sums.alone) > MOST_FUSED
        assert sums.gathered == {1, 3, 6}  # rows of decode steps, and of those with prompts
        assert sums.fused == (set(range(1, MOST_FUSED + 1)) & sums.alone if is_fused else set())


def small_rows(outputs: int, inputs: int) -> np.ndarray:  # uint8[O, bytes of a row]
    """Random rows in Q4_K, whose values are about as large as those of a model."""
    rows = random_rows(GGMLQuantizationType.Q4_K, outputs, inputs)
    factors = rows.reshape(outputs, -1, 144)[..., :4].copy().view(np.float16)
    rows.reshape(outputs, -1, 144)[..., :4] = (factors * np.float16(0.002)).view(np.uint8)
    return rows


def exchange_forms(folder: Path) -> None:
    """Quantised forms and experts through exchange memory."""
    wide = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    path = written(folder / "wide", config_of("llama", **wide))
    of = tiny_llama_config(hidden_size=512, intermediate_size=512, head_dim=128)
    tensors, kind = random_hf_tensors(build_model(of, "float32")), GGMLQuantizationType.Q4_K
    blocks = {n: (small_rows(*a.shape), kind) for n, a in tensors.items() if a.ndim == 2}
    gguf = write_gguf(folder / "Q4_K.gguf", of, tensors, blocks=blocks)
    mxfp4 = write_gpt_oss(folder / "mxfp4", num_local_experts=8)
    given: list[tuple[Path, dict[str, Any]]] = [
        *((path, {"quantization": form}) for form in ("int4", "int8", "fp8")),
        (gguf, {}),
        (mxfp4, {}),
        *((written(folder / n, config_of(n)), {}) for n in ("qwen3_moe", "deepseek_v2", "gemma3")),
        (written(folder / "sliced", {**CONFIGS["qwen3_moe"], **SLICED["qwen3_moe"]}), {}),
    ]
    for one, settings in given:
        with exchanged() as sums:
            check_equal(one, folder, (2,), **settings)
        assert bool(sums.fused) == ("gemma3" not in one.name), one  # its norms are of outputs


def taps(folder: Path) -> None:
    """Activations of which a device has a part are read and steered whole."""
    features(folder, tap_points=",".join([*STEERED, "layers.1.resid_post", "final_norm"]))


def hybrid(folder: Path) -> None:
    """Prefix hits of a model with a state for each sequence start from snapshots."""
    path = written(folder / "qwen3_5", config_of("qwen3_5"))
    settings = {**SIZES, "cache_dir": str(folder / "cache"), "max_model_len": 256}
    settings |= {"num_pages": 100, "max_num_mixed_tokens": 64, "max_num_batched_tokens": 128}
    prompt = {"prompt_token_ids": [(7 * i * i) % 300 for i in range(150)]}
    found = []
    for degree in (1, 2, DEVICES):
        llm = LLM(str(path), tensor_parallel_size=degree, **settings)
        outputs = [*llm.generate(prompt, GREEDY), *llm.generate(prompt, GREEDY)]
        found.append((tokens_of(outputs), [output.num_cached_tokens for output in outputs]))
    assert found[0] == found[1] == found[2], found
    assert found[0][1][1] > 0, "no snapshot was used"


def check_refusals(folder: Path) -> None:
    """Each sentence says what does not fit, before weights are read."""
    _, _, path = model_and_weights(folder)
    settings = {**SIZES, "cache_dir": str(folder / "cache")}

    def of(name: str, count: int, **changes: Any) -> Callable[[], Any]:
        config = folder / f"config_{name}_{count}_{'_'.join(changes)}"
        config.mkdir()
        content = json.dumps({**CONFIGS[name], **changes}, default=dict)
        (config / "config.json").write_text(content)
        given = {**settings, "load_format": "dummy", "tensor_parallel_size": count}
        return lambda: LLM(str(config), **given)

    for wrong, message in (
        (of("llama", 3), "4 query heads cannot be divided among 3 devices; choose 2 or 4 as tenso"),
        (of("llama", 4, num_attention_heads=12, num_key_value_heads=3), "3 KV heads cannot be"),
        (of("llama", 4, intermediate_size=50), "50 columns of a feed-forward network cannot be"),
        (of("gpt_oss", 2), "7 experts cannot be divided among 2 devices; leave out tensor_paral"),
        (of("qwen3_5", 4), "2 key heads cannot be divided among 4 devices"),
        (of("llama", 8), "tensor_parallel_size is 8, and JAX finds 4 devices of the platform cpu"),
        (lambda: one_kind([Kind("A"), Kind("B")]), "of several kinds, A and B"),
        (
            lambda: load(str(path), mesh=jax.make_mesh((2,), ("x",)), tensor_parallel_size=4),
            "tensor_parallel_size is 4, and the mesh has 2 devices",
        ),
        (lambda: load(str(path), mesh=jax.devices()), "must be a jax.sharding.Mesh"),  # type: ignore[arg-type]
    ):
        check_refused(wrong, message)
    one, two = of_machine(default_placement()), of_machine(default_placement(2))
    assert (one["device"], two["device"]) == ("cpu cpu", "cpu cpu x2")


class Kind:
    """A device of a kind."""

    def __init__(self, name: str) -> None:
        self.device_kind = name


def check_refused(call: Callable[[], Any], message: str) -> None:
    try:
        call()
    except JaxinferError as error:
        assert re.search(re.escape(message), str(error)), error
    else:
        raise AssertionError(message)


def research(folder: Path) -> None:
    """``jaxinfer.load`` spreads parameters over a mesh: ``forward`` and ``generate`` are those of
    one device.
    """
    path = written(folder / "research", config_of("llama", attention_bias=True))
    settings = {**SIZES, "cache_dir": str(folder / "cache"), "max_model_len": 64}
    one = jaxinfer.load(str(path), **settings)
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2])
    two = jaxinfer.load(str(path), mesh=mesh, **settings)
    for name, array in by_path(two.params).items():
        np.testing.assert_array_equal(array, by_path(one.params)[name])
    assert len({shard.index for shard in two.params["embed"].addressable_shards}) == 2
    tokens = list(range(3, 20))
    logits = jax.jit(lambda p: two.forward(tokens, params=p))(two.params)
    np.testing.assert_allclose(logits, one.forward(tokens), atol=1e-4)
    second = jax.make_mesh((1,), ("x",), devices=jax.devices()[1:2])
    alone = jaxinfer.load(str(path), mesh=second, **settings)
    assert alone.params["final_norm"].devices() == {jax.devices()[1]}
    given = [{"prompt_token_ids": one} for one in PROMPTS]
    drawn = [tokens_of(model.generate(given, GREEDY)) for model in (one, two)]
    assert drawn[0] == drawn[1]
    edit = {"layers.0.z": lambda z: 2 * z, "layers.1.mlp_post": lambda h: h.at[:, 3].add(1.0)}
    edited = [tokens_of(model.generate(given, GREEDY, edit=edit)) for model in (one, two)]
    assert edited[0] == edited[1] != drawn[0]


def embeddings(folder: Path) -> None:
    """Vectors of an engine that pools."""
    path = written(folder / "qwen3", config_of("qwen3"))
    settings = {**SIZES, "cache_dir": str(folder / "cache"), "task": "embed"}
    given = [{"prompt_token_ids": one} for one in PROMPTS]
    found = []
    for degree in (1, DEVICES):
        outputs = LLM(str(path), tensor_parallel_size=degree, **settings).embed(given)
        found.append([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def trainer(folder: Path) -> None:
    """A trainer's weights are made into the parts of devices in one program."""
    model, params, _ = model_and_weights(folder)
    placement, divided = placement_on(jax.devices()), replace(model, devices=DEVICES)
    tensors = ParamsCheckpoint(model, params)
    tree = {name: jax.numpy.asarray(tensors.read(name)) for name in tensors.tensors}
    tree = {n: a if a.ndim < 2 or "embed" in n else a.T for n, a in tree.items()}
    mapping = {name: (name, None) for name in tree}
    made = by_path(TrainerWeights(divided, placement, mapping).params(tree))
    check_parts(made, by_path(params), divided, placement)


def bundles(folder: Path) -> None:
    """A bundle of two devices serves on two, without settings, and is refused for others."""
    from jaxinfer import EngineConfig
    from jaxinfer.engine.start.build import plan_engine, write_planned

    _, _, path = model_and_weights(folder)
    settings = {**SIZES, "cache_dir": str(folder / "cache")}
    given = EngineConfig(model=str(path), tensor_parallel_size=2, **settings)
    bundle = str(folder / "bundle")
    write_planned(plan_engine(given), Path(bundle))
    llm = LLM(str(path), bundle=bundle, skip_tokenizer_init=True)
    assert llm.stats().num_compiled == 0
    assert len(jax.tree.leaves(llm.model.params)[0].devices()) == 2
    assert answers(llm)[0] == answers(LLM(str(path), **settings))[0]
    check_refused(
        lambda: LLM(str(path), bundle=bundle, tensor_parallel_size=DEVICES),
        f"tensor_parallel_size is 2 in the bundle {bundle} and 4 was asked for; leave it out",
    )


UNDIVIDED = ("doge", "zaya")
CHECKS: dict[str, Callable[[Path], None]] = {
    "loading": check_loading,
    "refusals": check_refusals,
    "experts": check_experts,
    "features": features,
    "taps": taps,
    "staging": staging,
    "sums": lambda folder: check_sums(default_placement(DEVICES)),
    "exchange": exchange,
    "exchange_forms": exchange_forms,
    "hybrid": hybrid,
    "quantised": quantised,
    "files": files,
    "lowered": lowered,
    "graphs": graphs,
    "research": research,
    "embeddings": embeddings,
    "trainer": trainer,
    "llama_tiers": tiers("llama", 2, DEVICES),  # of two KV heads each is on two of four devices
    "deepseek_v2_tiers": tiers("deepseek_v2", 2),
    "qwen3_5_tiers": tiers("qwen3_5", 2),
    "fp8_pages": fp8_pages,
    "bundles": bundles,
    **{name: (undivided if name in UNDIVIDED else family)(name) for name in CONFIGS},
    **{f"{name}_sliced": sliced(name) for name in SLICED},
}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    for name in sys.argv[2:]:
        CHECKS[name](Path(sys.argv[1]))
        print(name, flush=True)
    print("checked")


if __name__ == "__main__":
    main()
