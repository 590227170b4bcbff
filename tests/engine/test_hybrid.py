"""Qwen3.5 and Kimi Linear through the whole engine: the delta rule beside paged attention.

The tokens are those of the dense form at each border of a chunk, a page and a convolution, whatever
the engine does with the requests; a reused prefix gives the same state, bit for bit.
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
from jaxinfer.models import Model, Params, build_model
from kit.dense import check_tokens, prompt_of
from kit.engines import compiled_for, dense_greedy, engine_of, run, tiny_limits
from kit.tiny_models import tiny_config, tiny_model

LENGTHS = (1, 3, 4, 63, 64, 65, 127, 128, 129, 200, 513)
SNAPSHOTS, ANSWER = 8, 6
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)  # past a border of 64
# of Mamba-2: among attention, beside it, in layers of one block, and alone; lightning attention
MAMBAS = (
    *("bamba", "falcon_h1", "nemotron_h", "mamba2", "falcon_mamba", "minimax"),
    "nemotron_h_puzzle",  # with sizes of each layer
    *("recurrent_gemma", "rwkv", "xlstm"),  # linear recurrences
    *("zamba", "zamba2"),  # after blocks that several layers use
)
# the delta rule: decays of heads, of channels, and next to attention to pools of 4 tokens
DELTAS = ("qwen3_5", "kimi_linear", "bailing_hybrid", "glm5_next")
PLAIN = ("lfm2", "zaya", "longcat_flash_ngram")  # convolutions, the last tokens
NAMES = (*DELTAS, "qwen3_5_moe", *PLAIN, *MAMBAS)
# scans over chunks of 64 tokens
SCANS = pytest.mark.parametrize("name", [*DELTAS, *MAMBAS])
EACH = pytest.mark.parametrize("name", [*DELTAS, *PLAIN, *MAMBAS])


@cache
def executables(name: str) -> tuple[Program, Executables]:
    return compiled(tiny_model(name)[0])


def compiled(model: Model) -> tuple[Program, Executables]:
    limits = replace(
        tiny_limits(max_num_seqs=3, max_num_batched_tokens=128, max_model_len=576),
        num_pages=pages_of(model, 360),
        buckets=(Bucket(3), Bucket(0, 128, 3), Bucket(3, 128, 3, scores=True)),
        groups=model.state.groups,
        num_snapshots=SNAPSHOTS,
        align=model.state.align,
    )
    program = Program(model, limits)
    return program, compiled_for(program, extras=False)


def pages_of(model: Model, number: int) -> tuple[int, ...]:
    """So many pages in each pool of the model."""
    return (number,) * max(1, len(model.state.bytes_per_entry))


def engine(name: str, num_pages: int = 360, *, overlap: bool = True) -> Engine:
    return served_by(*executables(name), tiny_model(name)[1], num_pages, overlap=overlap)


def served_by(
    program: Program, made: Executables, params: Params, num_pages: int = 360, *, overlap: bool
) -> Engine:
    executor = Executor(program, made, params, *init_state(program))
    limits = replace(program.limits, num_pages=pages_of(program.model, num_pages))
    return engine_of(executor, limits, overlap=overlap)


def check(name: str, served: Engine, prompts: list[list[int]], params: SamplingParams) -> list[int]:
    return check_tokens(name, served, prompts, params, 256, 576)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_end_at_every_border(name: str, overlap: bool) -> None:
    served = engine(name, overlap=overlap)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    assert not any(check(name, served, prompts, GREEDY))


@pytest.mark.parametrize("name", NAMES)
def test_answers_pass_a_border(name: str) -> None:
    check(name, engine(name), [prompt_of(20, 2), prompt_of(62, 3), prompt_of(129, 4)], LONG)


@SCANS
def test_prefixes_are_reused_up_to_a_border(name: str) -> None:
    served = engine(name)
    check(name, served, [prompt_of(140)], GREEDY)
    assert check(name, served, [prompt_of(129), prompt_of(200)], GREEDY) == [128, 128]
    # where prompts part a state is saved for the next one
    assert check(name, served, [prompt_of(64), prompt_of(66)], GREEDY) == [0, 0]
    assert check(name, served, [prompt_of(64), prompt_of(66)], GREEDY) == [0, 64]


def test_without_a_scan_prefixes_are_reused_up_to_a_page() -> None:
    served = engine("lfm2")
    check("lfm2", served, [prompt_of(140)], GREEDY)
    assert check("lfm2", served, [prompt_of(150)], GREEDY) == [136]


@SCANS
def test_the_next_turn_starts_near_the_end_of_the_answer(name: str) -> None:
    """States are saved at multiples of 64 while answers are decoded, also of several rows."""
    served = engine(name)
    turns = [prompt_of(60, 21), prompt_of(100, 22)]
    answers = [list(output.outputs[0].token_ids) for output in run(served, turns, LONG)]
    following = [
        [*turn, *answer, *prompt_of(20, 30 + i)]
        for i, (turn, answer) in enumerate(zip(turns, answers, strict=True))
    ]
    assert check(name, served, following, GREEDY) == [128, 128]


@EACH
def test_preempted_sequences_draw_the_same_tokens(name: str) -> None:
    served = engine(name, num_pages=90)
    check(name, served, [prompt_of(100, 5), prompt_of(110, 6), prompt_of(64, 7)], LONG)
    assert served.stats().num_preemptions > 0


def states_after(name: str, prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """The state of the last prompt's sequence, after prompts one at a time in a new engine."""
    served, one = engine(name), SamplingParams(max_tokens=1, temperature=0)
    outputs = run(served, prompts, one, together=False)
    layout = tiny_model(name)[0].state
    arrays = served._loop._executor._arrays.state  # type: ignore[attr-defined]
    cached = np.asarray(outputs[-1].num_cached_tokens)
    slots = {
        f"{entry.name}{i}": np.asarray(array)[: served.limits.max_num_seqs]
        for i, (entry, array, pool) in enumerate(
            zip(layout.arrays, arrays, layout.pools, strict=True)
        )
        if pool is None
    }
    return {"cached": cached, **slots}


@EACH
def test_a_reused_prefix_has_the_same_state(name: str) -> None:
    """Bit for bit: a request alone is in the first slot."""
    cold = states_after(name, [prompt_of(150)])
    warm = states_after(name, [prompt_of(130), prompt_of(150)])
    assert (cold["cached"], warm["cached"]) == (0, 128)
    first = next(name for name in cold if name != "cached")
    used = [i for i in range(3) if cold[first][i].any()]
    assert used
    for array in cold.keys() - {"cached"}:
        assert np.array_equal(cold[array][used], warm[array][used]), array


@pytest.mark.nightly
def test_contexts_within_the_chosen_number_have_no_pools() -> None:
    """All tokens are chosen: attention is that to all latents, here without rotated keys."""
    config, params = {**tiny_config("glm5_next"), "index_topk": 576}, tiny_model("glm5_next")[1]
    model = build_model(config, "float32", 576)
    assert [entry.name for entry in model.state.arrays] == ["delta", "conv", *["latent"] * 3]
    served = served_by(*compiled(model), params, overlap=True)
    prompts = [tuple(prompt_of(length, length)) for length in (3, 40, 57)]
    outputs = run(served, prompts, GREEDY)
    found = [tuple(one.outputs[0].token_ids) for one in outputs]
    assert found == dense_greedy(model, params, prompts, ANSWER)
