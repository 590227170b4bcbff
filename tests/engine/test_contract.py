"""The step's contract holds: a family that the library does not know is served.

Whatever the engine does with its requests (batches, chunks, preemption, reuse of prefixes and of
snapshots of state, overlap) the tokens are those of the dense form.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import Bucket, PageGroup, StepPlan
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import Model, Params
from kit.engines import compiled_for, dense_greedy, engine_of, run, tiny_limits
from kit.mixed_family import WINDOW, mixed_model
from kit.stream_family import stream_model

KINDS = {
    "all": ("window", "latent", "aligned", "full", "window"),
    "paged": ("window", "latent", "full", "window", "window"),
    "recurrent": ("recurrent", "full", "recurrent"),
    # its pools are of keys and values, latents, and summaries of four tokens
    "compressed": ("compressed", "latent", "full", "compressed"),
    "compressed and recurrent": ("recurrent", "compressed", "full"),
    # of DeepSeek-V4: all compressed windows, or chosen ones
    "windows": ("windows", "chosen", "windows"),
    "two streams": ("window", "recurrent", "full", "full"),
}
# where the longest prompt, of 40 tokens, has its last border: a page of summaries covers 16 tokens,
# and the state of "aligned" is saved every 8
PROMPTS_END = dict.fromkeys(KINDS, 32) | {"paged": 36, "recurrent": 36, "two streams": 36}
STATEFUL = ("all", "recurrent", "compressed and recurrent", "windows")
SPARE = {"windows": 2}  # pages of each pool beyond those of one sequence; of others 8
MOST_SNAPSHOTS = 3
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def prompts_of(*sizes: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Prompts by first token and length; those of one first token share a beginning."""
    return tuple(tuple((7 * i * i + first) % 320 for i in range(n)) for first, n in sizes)


PROMPTS = prompts_of((1, 40), (1, 33), (5, 3))
SHORT = prompts_of((1, 9), (2, 8), (5, 10))
LIMITS = replace(
    tiny_limits(max_num_seqs=3, max_num_batched_tokens=16, num_pages=120),
    buckets=(Bucket(3), Bucket(0, 16, 3), Bucket(3, 16, 3, scores=True)),
)


def model_of(name: str) -> tuple[Model, Params]:
    """The model; one has two residual streams, and adapters beside its weights."""
    return (stream_model if name == "two streams" else mixed_model)(*KINDS[name])


@cache
def expected(
    name: str,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    max_tokens: int = 14,
) -> list[tuple[int, ...]]:
    """Greedy tokens of the dense form."""
    return dense_greedy(*model_of(name), prompts, max_tokens)


@cache
def executables(name: str, platform: str = "cpu") -> tuple[Program, Executables]:
    model, _ = model_of(name)
    limits = replace(
        LIMITS,
        groups=model.state.groups,
        num_pages=LIMITS.num_pages * len(model.state.bytes_per_entry),
        num_snapshots=MOST_SNAPSHOTS if model.state.bytes_per_slot else 0,
        align=model.state.align,
    )
    program = Program(model, limits, platform=platform)
    return program, compiled_for(program, extras=platform == "gpu")


def engine(
    name: str,
    num_pages: tuple[int, ...] = (),
    *,
    num_snapshots: int = MOST_SNAPSHOTS,
    platform: str = "cpu",
    overlap: bool = True,
) -> Engine:
    """The scheduler has ``num_pages`` and ``num_snapshots``; steps are compiled for the most."""
    program, compiled = executables(name, platform)
    _, params = model_of(name)
    executor = Executor(program, compiled, params, *init_state(program))
    executor.warm_up()
    limits = replace(
        program.limits,
        num_pages=num_pages or program.limits.num_pages,
        num_snapshots=min(num_snapshots, program.limits.num_snapshots),
    )
    return engine_of(executor, limits, overlap=overlap)


def answers(one: Engine, *, together: bool = True) -> list[tuple[int, ...]]:
    outputs = run(one, PROMPTS, GREEDY, together=together)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_batched_and_chunked(name: str, overlap: bool) -> None:
    served = engine(name, overlap=overlap)
    assert answers(served) == expected(name)
    assert served.stats().num_live_pages == 0


@pytest.mark.parametrize("name", KINDS)
def test_alone(name: str) -> None:
    assert answers(engine(name), together=False) == expected(name)


@pytest.mark.parametrize("name", KINDS)
def test_preempted(name: str) -> None:
    needed = executables(name)[0].limits.pages_needed(50)
    served = engine(name, num_pages=tuple(count + SPARE.get(name, 8) for count in needed))
    outputs = run(served, SHORT, LONG)
    found = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert found == expected(name, SHORT, LONG.max_tokens)
    assert served.stats().num_preemptions > 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
@pytest.mark.parametrize("name", KINDS)
def test_prefix_hits(name: str, overlap: bool) -> None:
    """Of every group: what a window has given back is not needed. And of state for each sequence,
    of which there is a snapshot.
    """
    served = engine(name, overlap=overlap)
    assert answers(served) == expected(name)
    again = run(served, PROMPTS, GREEDY)
    assert [tuple(output.outputs[0].token_ids) for output in again] == expected(name)
    cached = [output.num_cached_tokens for output in again]
    assert cached == [PROMPTS_END[name], 32, 0]


@pytest.mark.parametrize("name", ["all", "recurrent"])
def test_one_chunk_saves_several_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second prompt saves where it leaves the first one, and at its last border.

    Without overlap, as pages that a window passes are else returned before they can be known.
    """
    served, plans, launch = engine(name, overlap=False), list[StepPlan](), Executor.launch
    monkeypatch.setattr(Executor, "launch", lambda self, p: plans.append(p) or launch(self, p))
    (first,), ends = prompts_of((1, 18)), prompts_of((2, 9), (3, 9))
    second, third = (*first[:11], *ends[0][:7]), (*first[:9], *ends[1])
    prompts = (first, second, third, second)
    outputs = run(served, prompts, GREEDY, together=False)
    assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name, prompts)
    assert [one.num_cached_tokens for one in outputs] == [0, 0, 8, 16]
    saved = [[count for count, _ in row.saves] for plan in plans for row in plan.prefills]
    assert [8, 16] in saved


@pytest.mark.parametrize("num_snapshots", [1, 2])
@pytest.mark.parametrize("name", STATEFUL)
def test_snapshots_run_out(name: str, num_snapshots: int) -> None:
    """Prompts that take each other's snapshots; what is left of them is of use."""
    served, cached = engine(name, num_snapshots=num_snapshots), 0
    for together in (True, False, True):
        outputs = run(served, PROMPTS, GREEDY, together=together)
        assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name)
        cached += sum(one.num_cached_tokens for one in outputs)
    assert cached > 0


@pytest.mark.parametrize("name", ["all", "two streams"])
def test_a_split_step_reads_and_saves_rows(name: str) -> None:
    """As on a GPU, where a prompt's step is two executables."""
    served = engine(name, platform="gpu")
    for cached in ([0, 0, 0], [PROMPTS_END[name], 32, 0]):
        outputs = run(served, PROMPTS, GREEDY)
        assert [tuple(output.outputs[0].token_ids) for output in outputs] == expected(name)
        assert [output.num_cached_tokens for output in outputs] == cached


def test_executables_of_its_own() -> None:
    """They are warmed up, and launched with the steps as their records say."""
    program, _ = executables("all", "gpu")
    assert {"forget1", "forget3", "tally"} < {*program.names()}
    served = engine("all", platform="gpu")
    own = served._loop._executor._arrays.own  # type: ignore[attr-defined]
    assert not np.asarray(own["tally"]).any(), "padding has no tokens"
    assert answers(served) == expected("all")
    # each token is computed once, but for the last one of an answer
    counted = sum(len(prompt) + (GREEDY.max_tokens or 0) - 1 for prompt in PROMPTS)
    assert np.asarray(own["tally"]).sum() == counted


def test_a_preempted_sequence_starts_from_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own prompt: no other prompt has this beginning."""
    needed = executables("recurrent")[0].limits.pages_needed(50)
    served = engine("recurrent", num_pages=tuple(count + 8 for count in needed))
    plans: list[StepPlan] = []
    launch = Executor.launch
    monkeypatch.setattr(Executor, "launch", lambda self, p: plans.append(p) or launch(self, p))
    outputs = run(served, SHORT, LONG)
    found = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert found == expected("recurrent", SHORT, LONG.max_tokens)
    assert served.stats().num_preemptions > 0
    assert [one for plan in plans for one in plan.prefills if one.reads is not None]
    assert not any(output.num_cached_tokens for output in outputs)  # of the first admission


def test_pages_behind_a_window_go_back() -> None:
    """A sequence never holds more pages than for its window and a chunk."""
    served = engine("paged")
    limits = executables("paged")[0].limits
    assert [group.window for group in limits.groups].count(WINDOW) == 3
    most, scheduler_state = 0, lambda: served._loop._state
    served.add_request("r", RequestSpec(PROMPTS[0], GREEDY))
    while served.has_work:
        served.step()
        for seq in scheduler_state().running:
            held = [len(p.ids) for p, g in zip(seq.pages, limits.groups, strict=True) if g.window]
            most = max(most, *held)
    assert most <= limits.most_pages(PageGroup(WINDOW)) == 7  # of the 14 that the sequence fills
