"""Rows that yield several tokens.

Drafts do not change the tokens. The drafts come from a table of answers that is wrong at two of
five positions, so rows accept none, some or all of them, and the host knows how many only when it
reads the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.step.drafts import Drafter, num_accepted
from jaxinfer.models.base import Model, Params
from kit.engines import compiled_for, dense_greedy, engine_of, run, tiny_limits
from kit.mixed_family import mixed_model
from kit.tiny_models import tiny_model

COUNT = 3  # drafts of a row
KEY = 4  # tokens by which the table knows a prompt
SIZES = (20, 5, 9)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
EXTRAS = (
    GREEDY,
    msgspec.structs.replace(GREEDY, logprobs=2),
    msgspec.structs.replace(GREEDY, presence_penalty=1.5, logit_bias={5: 3.0}),
)


def prompts_of(first: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple((7 * i * i + 11 * (first + k)) % 300 for i in range(size))
        for k, size in enumerate(SIZES)
    )


PROMPTS, SAMPLED_PROMPTS, EXTRAS_PROMPTS = prompts_of(1), prompts_of(4), prompts_of(7)


@cache
def model_of(name: str) -> tuple[Model, Params]:
    return mixed_model("window", "latent", "full") if name == "mixed" else tiny_model(name)


@cache
def greedy(name: str) -> list[tuple[int, ...]]:
    """The answers to ``PROMPTS`` by the dense form."""
    return dense_greedy(*model_of(name), PROMPTS, GREEDY.max_tokens or 0)


@cache
def sampled() -> list[tuple[int, ...]]:
    return answers(run(engine("llama", drafts=False), SAMPLED_PROMPTS, SAMPLED))


@cache
def with_extras() -> list[tuple[int, ...]]:
    return answers(run(engine("llama", drafts=False), EXTRAS_PROMPTS, EXTRAS))


@cache
def drafter_of(name: str) -> Drafter:
    """A drafter that continues a row from the answer with the same first tokens."""
    known = list(zip(PROMPTS, greedy(name), strict=True))
    if name == "llama":
        known += zip(SAMPLED_PROMPTS, sampled(), strict=True)
        known += zip(EXTRAS_PROMPTS, with_extras(), strict=True)
    longest = max(SIZES) + (GREEDY.max_tokens or 0) + COUNT + 1
    rows = [[*prompt, *answer] for prompt, answer in known]
    table = jnp.array([row + [0] * (longest - len(row)) for row in rows], jnp.int32)

    def propose(history: jax.Array, lens: jax.Array) -> jax.Array:
        same = (history[:, None, :KEY] == table[None, :, :KEY]).all(axis=2)
        at = jnp.minimum(lens[:, None] + jnp.arange(COUNT), longest - 1)
        drafts = table[jnp.argmax(same, axis=1)[:, None], at]
        return jnp.where(at % 5 % 3 == 0, (drafts + 1) % 300, drafts)

    return Drafter(COUNT, propose)


@cache
def program_of(name: str, *, drafts: bool) -> tuple[Program, Executables]:
    """A program; llama has all executables, others lack those that only extras need."""
    model, _ = model_of(name)
    query_tokens = 1 + COUNT if drafts else 1
    limits = replace(
        tiny_limits(max_num_seqs=3, max_num_batched_tokens=16, num_pages=120),
        groups=model.state.groups,
        num_pages=(120,) * len(model.state.bytes_per_entry),
        query_tokens=query_tokens,
        buckets=tuple(
            Bucket(d, p, r, scores=bool(d and r), query_tokens=query_tokens if d else 1)
            for d, p, r in ((3, 0, 0), (0, 16, 3), (3, 16, 3))
        ),
    )
    program = Program(model, limits, drafter=drafter_of(name) if drafts else None)
    return program, compiled_for(program, extras=name == "llama")


def engine(name: str, *, drafts: bool = True, most: int = 0, overlap: bool = True) -> Engine:
    program, executables = program_of(name, drafts=drafts)
    _, params = model_of(name)
    executor = Executor(program, executables, params, *init_state(program))
    limits = program.limits
    if most:  # pages for each group
        num_pages = tuple(1 + count for count in limits.of_pools([most] * len(limits.groups)))
        limits = replace(limits, num_pages=num_pages)
    return engine_of(executor, limits, overlap=overlap)


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "name", [pytest.param("llama", marks=pytest.mark.nightly), "mixed", "gpt2"]
)
def test_greedy_tokens_are_those_of_the_dense_form(name: str) -> None:
    served = engine(name)
    for together in (True, False):  # the second run reuses prefixes
        assert answers(run(served, PROMPTS, GREEDY, together=together)) == greedy(name)
    assert served.stats().num_live_pages == 0


def test_sampled_tokens_are_those_of_rows_of_one_token() -> None:
    assert answers(run(engine("llama"), SAMPLED_PROMPTS, SAMPLED)) == sampled()


@pytest.mark.parametrize("overlap", [True, False])
def test_accepted_drafts_save_steps(overlap: bool) -> None:
    """Three of five drafts are right, so a row yields up to three tokens."""
    served = engine("llama", overlap=overlap)
    events, steps = [], 0
    served.add_request("r", RequestSpec(PROMPTS[0], GREEDY))
    while served.has_work:
        news = served.step()
        steps += len(news.steps)
        events += [delta.token_ids for delta in news.deltas]
    assert [token for event in events for token in event] == list(greedy("llama")[0])
    assert {len(event) for event in events if event} >= {1, 2, 3}
    assert steps < GREEDY.max_tokens * (0.6 if not overlap else 1)


def test_rows_with_drafts_next_to_rows_with_extras() -> None:
    """Rows with extras have no drafts, since their one token is drawn again after the step."""
    found = run(engine("llama"), EXTRAS_PROMPTS, EXTRAS)
    assert answers(found) == with_extras()
    assert found[1].outputs[0].logprobs is not None
    assert len(found[1].outputs[0].logprobs) == GREEDY.max_tokens


@pytest.mark.parametrize("name", ["llama", "mixed"])
def test_preempted(name: str) -> None:
    """Pages are taken for every draft; if none is left the last sequence is preempted."""
    served = engine(name, most=14)
    assert answers(run(served, PROMPTS, GREEDY)) == greedy(name)
    assert served.stats().num_preemptions > 0 and served.stats().num_live_pages == 0


def test_a_stop_token_among_accepted_drafts_ends_the_text_there() -> None:
    answer = greedy("llama")[0]
    stop = answer[10]
    sampling = msgspec.structs.replace(GREEDY, stop_token_ids=(stop,))
    assert answers(run(engine("llama"), PROMPTS[:1], sampling)) == [
        answer[: answer.index(stop) + 1]
    ]


def test_drafts_are_refused_for_models_with_state_for_each_sequence() -> None:
    model, _ = mixed_model("recurrent", "full")
    limits = replace(tiny_limits(), query_tokens=2)
    with pytest.raises(ConfigError, match="serve it without drafts"):
        Program(model, limits, drafter=Drafter(1, lambda history, lens: lens[:, None]))


@pytest.mark.parametrize(
    ("drafts", "most", "accepted"),
    [((4, 5), 2, 2), ((4, 9), 2, 1), ((9, 5), 2, 0), ((4, 5), 1, 1), ((4, 5), 0, 0)],
)
def test_acceptance(drafts: tuple[int, int], most: int, accepted: int) -> None:
    draws = np.array([[4, 5, 6]], np.int32)
    found = num_accepted(jnp.array([drafts], jnp.int32), jnp.array(draws), jnp.array([most]))
    assert found.tolist() == [accepted]
