"""Rows that yield several tokens.

Drafts do not change the tokens. The drafts come from a table of answers that is wrong at two of
five positions, so rows accept none, some or all of them, and the host knows how many only when it
reads the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_field
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
from jaxinfer.engine.requests.outputs import RequestOutput
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.fingerprint import of_drafter
from jaxinfer.exec.compile.memory_plan import program_memory
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.step.drafts import DraftContext, Drafter, num_accepted
from jaxinfer.exec.step.slots import SlotState
from jaxinfer.models.base import Model, Params
from jaxinfer.nn.state import Entry, LayerArrays, LayerState
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

    return Drafter("answers", COUNT, propose_answers, {"answers": table})


def propose_answers(
    params: Params, state: LayerArrays, slots: SlotState, hidden: jax.Array, ctx: DraftContext
) -> tuple[jax.Array, LayerArrays]:
    del hidden
    table, history = params["answers"], slots.token_ids[ctx.slots]
    same = (history[:, None, :KEY] == table[None, :, :KEY]).all(axis=2)
    at = jnp.minimum(ctx.lens[:, None] + jnp.arange(COUNT), table.shape[1] - 1)
    drafts = table[jnp.argmax(same, axis=1)[:, None], at]
    return jnp.where(at % 5 % 3 == 0, (drafts + 1) % 300, drafts), state


def propose_pairs(
    params: Params, state: LayerArrays, slots: SlotState, hidden: jax.Array, ctx: DraftContext
) -> tuple[jax.Array, LayerArrays]:
    """The token that followed each token in the answers; every third time one that is wrong."""
    assert hidden.shape == (len(ctx.slots), 32) and ctx.lens.shape == ctx.slots.shape
    times = jnp.where(ctx.begins == 0, 0, state["times"][ctx.slots])
    last = slots.token_ids[ctx.slots, jnp.maximum(ctx.lens - 1, 0)]
    drafts: list[jax.Array] = []
    for _ in range(COUNT):
        last = params["next"][last]
        drafts.append(jnp.where(times % 3 == 2, (last + 1) % 300, last))
    counted = times + ctx.samples.astype(jnp.int32)
    return jnp.stack(drafts, axis=1), {"times": state["times"].at[ctx.slots].set(counted)}


@cache
def program_of(
    name: str, *, drafts: bool, drafter: Drafter | None = None
) -> tuple[Program, Executables]:
    """A program; llama has all executables, others lack those that only extras need."""
    model, _ = model_of(name)
    query_tokens = 1 + COUNT if drafts else 1
    limits = replace(
        tiny_limits(max_num_seqs=3, max_num_batched_tokens=16, num_pages=120),
        groups=model.state.groups,
        num_pages=(120,) * len(model.state.bytes_per_entry),
        buckets=(
            *((Bucket(3),) if name == "llama" and drafts else ()),  # of steps without drafts
            *(
                Bucket(d, p, r, scores=bool(d and r), query_tokens=query_tokens if d else 1)
                for d, p, r in ((3, 0, 0), (0, 16, 3), (3, 16, 3))
            ),
        ),
    )
    drafter = (drafter or drafter_of(name)) if drafts else None
    program = Program(model, limits, drafter=drafter)
    return program, compiled_for(program, extras=name == "llama")


def engine(
    name: str,
    *,
    drafts: bool = True,
    most: int = 0,
    overlap: bool = True,
    drafter: Drafter | None = None,
) -> Engine:
    program, executables = program_of(name, drafts=drafts, drafter=drafter)
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


def test_a_drafter_with_weights_and_state() -> None:
    """Its table and its counts are no constants of the steps; it changes no token."""
    table = np.zeros(320, np.int32)
    for prompt, answer in zip(PROMPTS, greedy("gpt2"), strict=True):
        known = [prompt[-1], *answer]
        table[known[:-1]] = known[1:]
    state = LayerState(per_slot=(Entry("times", (), jnp.dtype(jnp.int32)),))
    drafter = Drafter("pairs", COUNT, propose_pairs, {"next": table}, state)
    served, steps = engine("gpt2", drafter=drafter), 0
    for together in (True, False):
        assert answers(run(served, PROMPTS, GREEDY, together=together)) == greedy("gpt2")
    slots = served._loop._executor._arrays.slots  # type: ignore[attr-defined]
    assert slots.drafter is not None and np.asarray(slots.drafter["times"]).max() > 2
    served.add_request("r", RequestSpec(PROMPTS[0], GREEDY))
    while served.has_work:
        steps += len(served.step().steps)
    assert steps < (GREEDY.max_tokens or 0), "drafts are accepted"
    memory = program_memory(program_of("gpt2", drafts=True, drafter=drafter)[0], None)
    assert memory.weights["drafter"] == table.nbytes


def test_a_drafter_is_in_the_fingerprint() -> None:
    """Two that propose as many tokens must not share executables."""
    one, other = (Drafter(name, COUNT, propose_pairs) for name in ("one", "other"))
    sized = replace_field(one, params={"next": np.zeros(320, np.int32)})
    assert len({str(of_drafter(each)) for each in (one, other, sized, None)}) == 4


def test_a_stop_token_among_accepted_drafts_ends_the_text_there() -> None:
    answer = greedy("llama")[0]
    stop = answer[10]
    sampling = msgspec.structs.replace(GREEDY, stop_token_ids=(stop,))
    assert answers(run(engine("llama"), PROMPTS[:1], sampling)) == [
        answer[: answer.index(stop) + 1]
    ]


def test_drafts_are_refused_for_models_with_state_for_each_sequence() -> None:
    model, _ = mixed_model("recurrent", "full")
    limits = replace(tiny_limits(), buckets=(Bucket(2, query_tokens=2),))
    with pytest.raises(ConfigError, match="serve it without drafts"):
        Program(model, limits, drafter=Drafter("none", 1, propose_answers))


@pytest.mark.parametrize(
    ("drafts", "most", "accepted"),
    [((4, 5), 2, 2), ((4, 9), 2, 1), ((9, 5), 2, 0), ((4, 5), 1, 1), ((4, 5), 0, 0)],
)
def test_acceptance(drafts: tuple[int, int], most: int, accepted: int) -> None:
    draws = np.array([[4, 5, 6]], np.int32)
    found = num_accepted(jnp.array([drafts], jnp.int32), jnp.array(draws), jnp.array([most]))
    assert found.tolist() == [accepted]
