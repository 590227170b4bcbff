"""A prompt step split into two executables: the same tokens, and each has only its own arrays."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from msgspec.structs import replace

from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.build import build_executables
from jaxinfer.exec.compile.memory_plan import program_memory
from jaxinfer.exec.compile.program import FIRST, MAX_LAUNCHED_TOKENS, MAX_SPLIT_TOKENS, Program
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import Model, Params
from jaxinfer.models.registry import build_model
from kit.counted import Counted
from kit.engines import engine_of, run, tiny_limits
from kit.tiny_models import random_params, tiny_config

TOKENS = MAX_LAUNCHED_TOKENS + 16  # more than are launched whole
LIMITS = replace(
    tiny_limits(max_num_seqs=2, max_num_batched_tokens=16),
    # one of each kind, as compiling twelve layers takes most of the time
    buckets=(Bucket(2), Bucket(0, TOKENS, 2), Bucket(2, TOKENS, 2, scores=True)),
)
LAYERS = {"qwen3": "num_hidden_layers", "gpt2": "n_layer"}
PROMPTS = [tuple(range(5, 45)), (9, 8, 7, 6, 5)]  # the first has three chunks
NOT_OPTIMISED = {"xla_backend_optimization_level": 0}  # compiles faster
REQUESTS = [
    SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=1, top_k=9, ignore_eos=True),
]


class NotSplit(Program):
    """A program without split steps; its other executables are the same."""

    def is_split(self, bucket: Bucket) -> bool:
        return False


def deep_model(family: str) -> tuple[Model, Params]:
    """A model of twelve layers, so that names of layers do not sort as their numbers do."""
    model = build_model(tiny_config(family) | {LAYERS[family]: 12}, "float32")
    return model, random_params(model)


def test_splitting_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "compiler_options", lambda *_: dict(NOT_OPTIMISED))
    model, params = deep_model("qwen3")
    engines, counts = [], []
    for kind in (Program, NotSplit):
        program = kind(model, LIMITS, platform="gpu")
        store = Store.of(program, program_memory(program, None), tmp_path / kind.__name__)
        counted = Counted(build_executables(store, NoProgress()))
        executor = Executor(program, counted.executables, params, *init_state(program))
        engines.append(engine_of(executor, LIMITS))
        counts.append(counted)
    split, whole = (run(engine, PROMPTS, REQUESTS) for engine in engines)
    assert split == whole
    calls = counts[0].calls
    firsts = [name for name in calls if name.endswith("_first")]
    assert firsts and not [name for name in counts[1].calls if name.endswith("_first")]
    assert all(calls[name] == calls[name.removesuffix("_first")] for name in firsts)


@pytest.mark.parametrize("family", LAYERS)
def test_pages_are_updated_in_place_and_neither_has_the_others_weights(family: str) -> None:
    program = Program(deep_model(family)[0], LIMITS, platform="gpu")
    bucket = next(b for b in LIMITS.buckets if b.num_prefills and not b.num_decodes)
    whole = NotSplit(program.model, LIMITS, platform="gpu").trace(bucket.name)
    pools = {",".join(map(str, leaf.shape)) for leaf in program.state()}
    made = 0
    for name, slots in ((bucket.name + FIRST, False), (bucket.name, True)):
        lowered = program.trace(name).lower()
        compiled = lowered.compile(dict(NOT_OPTIMISED))
        weights, *_ = lowered.args_info[0]
        assert len(weights) < len(whole.args_info[0][0])
        kept = [*jax.tree.leaves(program.slots())] if slots else []
        own = program.parts[slots].arrays
        # one array: two of one size would let the temporaries of steps move, see ``copy_batch``
        one = 4 * 32 * bucket.num_tokens if slots else 0
        assert program.stream_bytes(name, compiled) == one
        kept += [program.state()[i] for i in own]
        analysis = compiled.memory_analysis()
        assert analysis is not None
        assert analysis.alias_size_in_bytes == sum(leaf.size * 4 for leaf in kept)
        copied = re.findall(r"= [fs]32\[([\d,]+)\]\S* copy\(", compiled.as_text() or "")
        assert not pools.intersection(copied)
        made += len(own)
    assert made == len(program.state())


def test_only_prompt_steps_of_a_gpu_with_enough_layers_are_split() -> None:
    model, _ = deep_model("qwen3")
    few = build_model(tiny_config("qwen3"), "float32")
    for each, platform, expected in (
        (model, "gpu", True),
        (model, "cpu", False),
        (few, "gpu", False),
    ):
        program = Program(each, LIMITS, platform=platform)
        for bucket in LIMITS.buckets:
            only_prompts = bucket.num_prefills > 0 and not bucket.num_decodes
            assert program.is_split(bucket) == (expected and only_prompts)
        assert any(name.endswith("_first") for name in program.names()) == expected
        assert not program.is_split(Bucket(0, 2 * MAX_SPLIT_TOKENS, 1))
        assert not program.is_split(Bucket(0, MAX_LAUNCHED_TOKENS, 1))
        assert not program.is_split(Bucket(0, 256, 1, scores=True))
