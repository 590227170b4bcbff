"""Run as a process on two CPU devices: tiny models are loaded on both, and each shard is looked at.

``python -m kit.two_devices FOLDER``; prints "checked" when everything is where it should be.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

import jaxinfer
from jaxinfer.core.errors import ConfigError, JaxinferError
from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.requests.outputs import RequestOutput
from jaxinfer.exec.compile.fingerprint import of_machine
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import Model
from jaxinfer.models.params import by_path, nested
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import Placement, default_placement, placement_on
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.load import load_params
from jaxinfer.weights.sources import ModelSource, resolve_source
from kit.checkpoints import (
    HFConfig,
    built_arrays,
    random_hf_tensors,
    tiny_llama_config,
    tiny_olmo2_config,
    write_hf_folder,
)
from kit.engines import compiled_for, engine_of, run, tiny_limits, tokens
from kit.memory_checkpoint import InMemory, source_of
from kit.mixed_family import FAMILY, mixed_decoder, mixed_tensors
from kit.tiny_models import random_params, tiny_config

CONFIG = tiny_llama_config(attention_bias=True, mlp_bias=True)
EXPERTS = {**tiny_config("gpt_oss"), "num_local_experts": 4}
LATENT = {**tiny_config("deepseek_v2"), "n_routed_experts": 8}
FAMILIES = {
    "gemma4": {**tiny_config("gemma4_all"), "num_experts": 4},
    "qwen3_5_moe": {**tiny_config("qwen3_5_moe"), "num_experts": 4},
    "kimi_linear": {**tiny_config("kimi_linear"), "num_experts": 4},
}
Q, KV, F, V = 64, 32, 128, 96  # widths of the tiny model
# by name: what one of two devices holds of the whole array; of others each has all
SPLIT = {
    "embed": lambda i: np.s_[V // 2 * i : V // 2 * (i + 1)],
    "o": lambda i: np.s_[Q // 2 * i : Q // 2 * (i + 1)],
    "down": lambda i: np.s_[F // 2 * i : F // 2 * (i + 1)],
    "qkv": lambda i: np.s_[:, shares(i, Q, KV, KV)],
    "qkv_bias": lambda i: np.s_[shares(i, Q, KV, KV)],
    "gate_up": lambda i: np.s_[:, shares(i, F, F)],
    "gate_up_bias": lambda i: np.s_[shares(i, F, F)],
}


def shares(shard: int, *widths: int) -> list[int]:
    """The columns of one of two shards, where parts of these widths lie side by side."""
    columns: list[int] = []
    start = 0
    for width in widths:
        half = width // 2
        columns += range(start + shard * half, start + (shard + 1) * half)
        start += width
    return columns


def check_shards(name: str, array: jax.Array, whole: np.ndarray, devices: list[Any]) -> None:
    """Each device has its share of the array, or all of one that is not divided."""
    shards = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    assert set(shards) == set(devices), name
    for i, device in enumerate(devices):
        own = whole[SPLIT[name](i)] if name in SPLIT else whole
        np.testing.assert_array_equal(shards[device], own, err_msg=f"{name} of shard {i}")


def load(
    model: Model, source: ModelSource, placement: Placement, cache: Path
) -> dict[str, jax.Array]:
    params = load_params(
        model, source, placement=placement, cache_dir=cache, seed=0, progress=NoProgress()
    )
    return by_path(params)


def check_weights(folder: Path, placement: Placement) -> None:
    """Check weights of a checkpoint, of the cache of converted weights, and random ones."""
    devices = list(placement.mesh.devices.flat)
    model = build_model(CONFIG, "float32")
    tensors = random_hf_tensors(model)
    path = write_hf_folder(folder / "model", CONFIG, tensors)
    source = resolve_source(str(path), cache_dir=folder, progress=NoProgress())
    cached = replace(source, quantised=True)
    whole = built_arrays(model, tensors)
    for found in (source, cached, cached):  # the third is restored
        loaded = load(model, found, placement, folder)
        assert loaded.keys() == whole.keys()
        for leaf, array in loaded.items():
            check_shards(leaf.rpartition("/")[2], array, whole[leaf], devices)
    made = [
        by_path(dummy_params(model, placement=where, seed=1, progress=NoProgress()))
        for where in (default_placement(), placement)
    ]
    for leaf, array in made[1].items():
        check_shards(leaf.rpartition("/")[2], array, np.asarray(made[0][leaf]), devices)


def check_stacks(placement: Placement, folder: Path) -> None:
    """Experts are divided among the devices, values and scales alike."""
    model = Model(FAMILY, "MixedForTests", mixed_decoder("full", "latent"))
    whole = built_arrays(model, mixed_tensors(model))
    loaded = load(model, source_of(InMemory(mixed_tensors(model))), placement, folder)
    for name in ("layers_1/experts/values", "layers_1/experts/scales"):
        shards = [shard.data for shard in loaded[name].addressable_shards]
        assert [len(shard) for shard in shards] == [len(whole[name]) // 2] * 2
        np.testing.assert_array_equal(np.concatenate(shards), whole[name], err_msg=name)


def check_state(placement: Placement) -> None:
    """Pages are divided by heads; slots are on every device; steps are traced with the same."""
    model = build_model(CONFIG, "float32")
    program = Program(model, tiny_limits(), placement.platform, placement=placement)
    state, slots = init_state(program)
    for entry, array in zip(model.state.arrays, state, strict=True):
        heads, dim = entry.shape
        assert {shard.data.shape[-2:] for shard in array.addressable_shards} == {(heads // 2, dim)}
        assert len(array.addressable_shards) == 2
    assert all(array.is_fully_replicated for array in jax.tree.leaves(slots))
    abstract = (program.state(), program.slots())
    jax.tree.map(_same_place, abstract, (state, slots))
    params = dummy_params(model, placement=placement, seed=0, progress=NoProgress())
    jax.tree.map(_same_place, program.params, params)


def check_steps(placement: Placement, config: HFConfig) -> None:
    """Steps that are divided draw the tokens that steps on one device draw."""
    model = build_model(config, "float32")
    groups = model.state.groups
    align = model.state.align
    limits = tiny_limits(max_num_seqs=1, max_num_batched_tokens=max(8, align), groups=groups)
    snapshots = 2 if model.state.bytes_per_slot else 0
    limits = msgspec.structs.replace(limits, align=align, num_snapshots=snapshots)
    weights = by_path(random_params(model))
    sampling = [SamplingParams(temperature=t, seed=1, max_tokens=6) for t in (0, 1)]
    # the executables beside the step are divided too, though not the state of slots
    extras = config is CONFIG
    if extras:
        more = {"logit_bias": {7: 2.0}, "logprobs": 2, "prompt_logprobs": 2}
        sampling = [msgspec.structs.replace(one, **more) for one in sampling]

    def drawn(where: Placement) -> Any:
        program = Program(model, limits, where.platform, placement=where)
        params = {
            path: where.put(where.arranged(np.asarray(weights[path]), array.axes), array.axes)
            for path, array in model.arrays.items()
        }
        compiled = compiled_for(program, extras=extras)
        executor = Executor(program, compiled, nested(params), *init_state(program))
        engine = engine_of(executor, limits, tokenizer=False)
        outputs = run(engine, [[5, 6, 7], [9] * 20], sampling)
        return tokens(outputs), [logprobs_of(output) for output in outputs]

    (found, logprobs), (expected, others) = drawn(placement), drawn(default_placement())
    assert found == expected, config["architectures"]
    for own, other in zip(logprobs, others, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)
    assert bool(logprobs[0]) == extras


def logprobs_of(output: RequestOutput) -> list[float]:
    """Logprobs of the prompt and of the drawn tokens, each of the token itself."""
    prompt, drawn = output.prompt_logprobs or [], output.outputs[0].logprobs or []
    return [next(iter(one.values())).logprob for one in (*prompt, *drawn) if one]


def check_refusals() -> None:
    """Each error names the parts that cannot be divided."""
    for config, message in (
        (CONFIG, "4 query heads cannot be divided among 3 devices"),
        (EXPERTS, "4 experts cannot be divided among 8 devices"),
    ):
        layer = build_model(config, "float32").config.layers[0]
        part = layer.ffn if "experts" in message else layer.mixer
        try:
            part.share(int(message.split()[-2]))
        except ConfigError as error:
            assert str(error) == message, error
        else:
            raise AssertionError(message)


def check_research(folder: Path) -> None:
    """``jaxinfer.load`` divides parameters over a mesh, and ``forward`` computes what one device
    does.
    """
    path, tokens = str(folder / "model"), list(range(3, 20))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "cache_dir": str(folder)}
    settings |= {"max_model_len": 64, "max_num_seqs": 2}
    one = jaxinfer.load(path, **settings)
    mesh = jax.make_mesh((1, 2), ("data", "model"))
    two = jaxinfer.load(path, mesh=mesh, **settings)
    for name, array in by_path(two.params).items():
        np.testing.assert_array_equal(array, by_path(one.params)[name])
        halves = len({shard.index for shard in array.addressable_shards})  # type: ignore[misc]
        assert halves == (2 if name.rpartition("/")[2] in SPLIT else 1), name
    logits = jax.jit(lambda p: two.forward(tokens, params=p))(two.params)
    np.testing.assert_allclose(logits, one.forward(tokens), atol=1e-5)
    config = tiny_llama_config(vocab_size=97)
    odd = str(
        write_hf_folder(folder / "odd", config, random_hf_tensors(build_model(config, "float32")))
    )
    second = jax.make_mesh((1,), ("x",), devices=jax.devices()[1:])
    alone = jaxinfer.load(path, mesh=second, **settings)
    assert alone.params["final_norm"].devices() == {jax.devices()[1]}
    for wrong, message in (
        (lambda: jaxinfer.load(odd, mesh=mesh, **settings), "[97, 64] cannot be divided among 2"),
        (lambda: two.generate(tokens), "an engine serves on one device, and the mesh has 2"),
        (
            lambda: jaxinfer.load(path, mesh=jax.devices(), **settings),
            "must be a jax.sharding.Mesh",
        ),
    ):
        try:
            wrong()
        except JaxinferError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


def _same_place(abstract: jax.ShapeDtypeStruct, array: jax.Array) -> None:
    assert (abstract.shape, abstract.dtype) == (array.shape, array.dtype)
    assert abstract.sharding is not None
    assert array.sharding.is_equivalent_to(abstract.sharding, array.ndim)


def main(folder: Path, *names: str) -> None:
    """All checks, or only the steps of families by name."""
    placement = placement_on(jax.devices())
    assert placement.num_devices == 2
    for name in names:
        check_steps(placement, FAMILIES[name])
    if not names:
        check_all(placement, folder)
    print("checked")


def check_all(placement: Placement, folder: Path) -> None:
    """All but the steps of ``FAMILIES``."""
    check_weights(folder, placement)
    check_stacks(placement, folder)
    check_state(placement)
    # OLMo 2 has norms over all devices' heads
    for config in (CONFIG, tiny_olmo2_config(), EXPERTS, LATENT):
        check_steps(placement, config)
    check_refusals()
    check_research(folder)
    second = jax.devices()[1]
    with jax.default_device(second):
        assert default_placement().device == second
    one, two = of_machine(default_placement()), of_machine(placement)
    assert (one["device"], two["device"]) == ("cpu cpu", "cpu cpu x2")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
