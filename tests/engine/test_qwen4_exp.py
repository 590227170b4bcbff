"""Qwen3.8-Flash-Next through the whole engine: n-grams, streams, the delta rule, chosen blocks.

The tokens are those of the dense form at each border of a block, a page, an n-gram, a convolution
and a chunk, whatever the engine does with the requests.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from kit.dense import check_tokens
from kit.dense import prompt_of as drawn
from kit.engines import compiled_for, engine_of, run, tiny_limits
from kit.tiny_models import CONFIGS, tiny_model

pytestmark = pytest.mark.nightly  # the steps compile for 20 s

NAME = "qwen4_exp"
BOUNDARY, OTHER = CONFIGS[NAME]["eos_token_id"]
# around n-grams of 2 and 3 tokens, 10 inputs of the convolution, blocks of 4 tokens of which 2 and
# the last ones are read, pages of 8 and 32 tokens, chunks of 64
LENGTHS = (*range(1, 14), 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 67, 74, 127, 128, 129, 200)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Prompts of one seed share a beginning; each fifth token or so ends a text."""
    texts = np.random.default_rng(100 + seed).choice(
        (0, BOUNDARY, OTHER), length, p=(0.8, 0.1, 0.1)
    )
    return [end or token for end, token in zip(texts.tolist(), drawn(length, seed), strict=True)]


@cache
def executables() -> tuple[Program, Executables]:
    model, _ = tiny_model(NAME)
    limits = tiny_limits(max_num_seqs=3, max_num_batched_tokens=128, max_model_len=320)
    limits = replace(
        limits,
        buckets=(Bucket(3), Bucket(0, 128, 3), Bucket(3, 128, 3, scores=True)),
        groups=model.state.groups,
        num_pages=(200,) * len(model.state.bytes_per_entry),
        num_snapshots=8,
        align=model.state.align,
    )
    program = Program(model, limits)
    return program, compiled_for(program, extras=False)


def engine(num_pages: tuple[int, ...] | None = None, *, overlap: bool = True) -> Engine:
    program, compiled = executables()
    executor = Executor(program, compiled, tiny_model(NAME)[1], *init_state(program))
    limits = replace(program.limits, num_pages=num_pages or program.limits.num_pages)
    return engine_of(executor, limits, overlap=overlap)


def check(served: Engine, prompts: list[list[int]], params: SamplingParams) -> list[int]:
    return check_tokens(NAME, served, prompts, params, 320)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_prompts_end_at_every_border(overlap: bool) -> None:
    served = engine(overlap=overlap)
    assert not any(check(served, [prompt_of(n, seed=n) for n in LENGTHS], GREEDY))


def test_answers_pass_every_border() -> None:
    check(engine(), [prompt_of(2, 2), prompt_of(61, 3), prompt_of(129, 4)], LONG)


def test_prefixes_are_reused_up_to_a_border() -> None:
    served = engine()
    check(served, [prompt_of(140)], GREEDY)
    assert check(served, [prompt_of(129), prompt_of(200)], GREEDY) == [128, 128]


def test_the_next_turn_starts_near_the_end_of_the_answer() -> None:
    served = engine()
    turns = [prompt_of(60, 21), prompt_of(100, 22)]
    answers = [list(output.outputs[0].token_ids) for output in run(served, turns, LONG)]
    following = [
        [*turn, *answer, *prompt_of(20, 30 + i)]
        for i, (turn, answer) in enumerate(zip(turns, answers, strict=True))
    ]
    assert check(served, following, GREEDY) == [128, 128]


@pytest.mark.parametrize("pool", range(2))
def test_preempted_sequences_draw_the_same_tokens(pool: int) -> None:
    """There are few pages of tokens or of blocks."""
    num_pages = [200, 200]
    num_pages[pool] = (60, 16)[pool]
    served = engine(tuple(num_pages))
    check(served, [prompt_of(100, 5), prompt_of(110, 6), prompt_of(64, 7)], LONG)
    assert served.stats().num_preemptions > 0


def states_after(prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """The state of the last prompt's sequence, after prompts one at a time in a new engine."""
    served, one = engine(), SamplingParams(max_tokens=1, temperature=0)
    outputs = run(served, prompts, one, together=False)
    layout = tiny_model(NAME)[0].state
    arrays = served._loop._executor._arrays.state  # type: ignore[attr-defined]
    found = {"cached": np.asarray(outputs[-1].num_cached_tokens)}
    for i, (entry, array) in enumerate(zip(layout.arrays, arrays, strict=True)):
        if layout.pools[i] is None:
            found[f"{entry.name}{i}"] = np.asarray(array)[: served.limits.max_num_seqs]
    return found


def test_a_reused_prefix_has_the_same_state() -> None:
    """Bit for bit: a request alone is in the first slot."""
    cold = states_after([prompt_of(150)])
    warm = states_after([prompt_of(130), prompt_of(150)])
    assert (cold.pop("cached"), warm.pop("cached")) == (0, 128)
    assert len(cold) == 7  # of n-grams, unfinished blocks and the delta rule
    used = [i for i in range(3) if any(array[i].any() for array in cold.values())]
    assert used
    for name, array in cold.items():
        assert np.array_equal(array[used], warm[name][used]), name
