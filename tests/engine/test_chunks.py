"""Attention within chunks of the context (Llama 4, Rnj-1) through the whole engine.

The tokens are those of the dense form, wherever the borders of chunks are: within one step's tokens
of a prompt, at its end, or between two tokens of an answer. The tiny Llama 4 has chunks of 24
tokens, Rnj-1 chunks of 8, of which a token sees its own and the one before.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from msgspec.structs import replace

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket, PageGroup
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.sizes import resolve, with_device_defaults
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models import build_model
from jaxinfer.nn.placement import default_placement
from kit.dense import check_tokens, prompt_of
from kit.engines import compiled_for, engine_of, tiny_limits
from kit.tiny_models import tiny_config, tiny_model
from pallas_kernels.harness.pins import Pins

FAMILIES = ("llama4", "rnj1")
LENGTHS = (1, 17, 23, 24, 25, 47, 48, 49, 80, 100)
LONGEST = 160
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@cache
def executables(name: str) -> tuple[Program, Executables]:
    model, _ = tiny_model(name)
    limits = tiny_limits(
        max_num_seqs=3,
        max_num_batched_tokens=56,  # up to three chunks in a step
        num_pages=400,
        max_model_len=LONGEST,
        groups=model.state.groups,
    )
    buckets = (Bucket(3), Bucket(0, 56, 3), Bucket(3, 56, 3, scores=True))
    program = Program(model, replace(limits, buckets=buckets))
    return program, compiled_for(program, extras=False)


def engine(num_pages: int | None = None, name: str = "llama4") -> Engine:
    program, compiled = executables(name)
    executor = Executor(program, compiled, tiny_model(name)[1], *init_state(program))
    limits = program.limits
    if num_pages is not None:
        limits = replace(limits, num_pages=(num_pages,))
    return engine_of(executor, limits)


def test_the_layer_with_chunks_returns_pages_as_one_with_a_window() -> None:
    assert tiny_model("llama4")[0].state.groups == (PageGroup(), PageGroup(24))
    assert PageGroup(16) in tiny_model("rnj1")[0].state.groups


@pytest.mark.parametrize("name", FAMILIES)
def test_batched_and_divided_prompts(name: str) -> None:
    """The longest prompt has two parts, next to decode rows."""
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    assert not any(check_tokens(name, engine(name=name), prompts, GREEDY, LONGEST))


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_pass_borders_and_prefixes_are_reused(name: str) -> None:
    served = engine(name=name)
    check_tokens(name, served, [prompt_of(52)], LONG, LONGEST)
    # own tokens begin within a chunk
    reused = check_tokens(name, served, [prompt_of(53), prompt_of(90)], LONG, LONGEST)
    assert reused == [52, 52]


@pytest.mark.parametrize(
    ("name", "num_pages", "lengths"),
    [("llama4", 60, (50, 40, 30)), ("rnj1", 62, (22, 21, 20))],
    ids=FAMILIES,
)
def test_preempted_sequences_draw_the_same_tokens(
    name: str, num_pages: int, lengths: tuple[int, ...]
) -> None:
    served = engine(num_pages, name)
    prompts = [prompt_of(length, 5 + i) for i, length in enumerate(lengths)]
    check_tokens(name, served, prompts, LONG, LONGEST)
    assert served.stats().num_preemptions > 0


def test_chunks_are_whole_pages() -> None:
    given = EngineConfig(model="unused", load_format="dummy", skip_tokenizer_init=True)
    model = build_model(tiny_config("llama4"), "float32")

    def page_size(own: int | None) -> int:
        config = with_device_defaults(dataclasses.replace(given, page_size=own), "cpu")
        return resolve(config, given, model, None, Pins(), default_placement()).limits.page_size

    assert (page_size(None), page_size(4)) == (8, 4)
    with pytest.raises(ConfigError, match="page_size is 16, .* 24 tokens, .* set page_size to 8"):
        page_size(16)
