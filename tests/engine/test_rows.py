"""Rows that yield several tokens, and rows that yield a hidden state.

Drafts do not change the tokens. The drafts come from a table of answers that is wrong at two of
five positions, so rows accept none, some or all of them, and the host knows how many only when it
reads the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.errors import ConfigError, RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.outputs import Delta, RequestOutput
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.step.drafts import Drafter, num_accepted
from jaxinfer.models.base import Model, Params, hidden_states
from jaxinfer.nn.context import dense_context
from kit.engines import engine_of, run, tiny_limits, tokens
from kit.mixed_family import mixed_model
from kit.tiny_models import tiny_model

COUNT = 3  # drafts of a row
KEY = 4  # first tokens of a prompt, by which it is found in the table
SIZES = ((1, 20), (2, 5), (3, 9))
PROMPTS = tuple(tuple((7 * i * i + 11 * first) % 300 for i in range(n)) for first, n in SIZES)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)


@cache
def model_of(name: str) -> tuple[Model, Params]:
    if name == "mixed":
        return mixed_model("window", "latent", "full", "window", "window")
    return tiny_model(name)


@cache
def drafter_of(answers: tuple[tuple[int, ...], ...]) -> Drafter:
    """A drafter that continues a row from the answer with the same first tokens."""
    longest = max(map(len, answers)) + COUNT + 1
    table = jnp.array([[*one, *[0] * (longest - len(one))] for one in answers], jnp.int32)

    def propose(history: jax.Array, lens: jax.Array) -> jax.Array:
        known = (history[:, None, :KEY] == table[None, :, :KEY]).all(axis=2)
        at = jnp.minimum(lens[:, None] + jnp.arange(COUNT), longest - 1)
        drafts = table[jnp.argmax(known, axis=1)[:, None], at]
        return jnp.where(at % 5 % 3 == 0, (drafts + 1) % 300, drafts)

    return Drafter(COUNT, propose)


@cache
def program_of(
    name: str, drafter: Drafter | None, *, pools: bool = False
) -> tuple[Program, Executables]:
    model, _ = model_of(name)
    query_tokens = 1 if drafter is None else 1 + drafter.count
    limits = replace(
        tiny_limits(max_num_seqs=3, max_num_batched_tokens=16, num_pages=120),
        windows=model.state.windows,
        query_tokens=query_tokens,
        pools=pools,
        buckets=tuple(
            Bucket(d, p, r, scores=bool(d and r), query_tokens=query_tokens if d else 1)
            for d, p, r in ((3, 0, 0), (0, 16, 3), (3, 16, 3))
        ),
    )
    program = Program(model, limits, drafter=drafter)
    by_name = {one: program.trace(one).lower().compile() for one in program.names()}
    return program, Executables(by_name, compiled=0, workspace_bytes=0)


def engine(
    name: str,
    drafter: Drafter | None,
    *,
    num_pages: int = 120,
    overlap: bool = True,
    pools: bool = False,
) -> Engine:
    program, executables = program_of(name, drafter, pools=pools)
    _, params = model_of(name)
    executor = Executor(program, executables, params, *init_state(program))
    return engine_of(executor, replace(program.limits, num_pages=num_pages), overlap=overlap)


def complete(outputs: Sequence[RequestOutput]) -> tuple[tuple[int, ...], ...]:
    return tuple((*prompt, *one) for prompt, (one,) in zip(PROMPTS, tokens(outputs), strict=True))


@cache
def plain(name: str, sampling: SamplingParams) -> list[RequestOutput]:
    return run(engine(name, None), PROMPTS, sampling)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("llama", GREEDY), ("llama", SAMPLED), ("mixed", GREEDY), ("gpt2", GREEDY)],
    ids=["llama", "sampled", "mixed", "gpt2"],
)
def test_tokens_are_those_of_rows_of_one_token(name: str, sampling: SamplingParams) -> None:
    expected = plain(name, sampling)
    served = engine(name, drafter_of(complete(expected)))
    for together in (True, False):  # the second run reuses prefixes
        assert tokens(run(served, PROMPTS, sampling, together=together)) == tokens(expected)
    assert served.stats().num_live_pages == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_accepted_drafts_save_steps(overlap: bool) -> None:
    """Three of five drafts are right, so a row yields up to three tokens."""
    expected = plain("llama", GREEDY)
    served = engine("llama", drafter_of(complete(expected)), overlap=overlap)
    events, steps = [], 0
    served.add_request("r", PROMPTS[0], GREEDY)
    while served.has_work:
        news = served.step()
        steps += len(news.steps)
        events += [delta.token_ids for delta in news.deltas]
    assert [token for event in events for token in event] == tokens(expected)[0][0]
    assert {len(event) for event in events if event} >= {1, 2, 3}
    assert steps < GREEDY.max_tokens * (0.6 if not overlap else 1)


def test_rows_with_drafts_next_to_rows_with_extras() -> None:
    """Rows with extras have no drafts, since their one token is drawn again after the step."""
    params = [
        GREEDY,
        replace_sampling(logprobs=2),
        replace_sampling(presence_penalty=1.5, logit_bias={5: 3.0}),
    ]
    expected = run(engine("llama", None), PROMPTS, params)
    served = engine("llama", drafter_of(complete(expected)))
    found = run(served, PROMPTS, params)
    assert tokens(found) == tokens(expected)
    assert found[1].outputs[0].logprobs is not None
    assert len(found[1].outputs[0].logprobs) == GREEDY.max_tokens


def replace_sampling(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "mixed"])
def test_preempted(name: str) -> None:
    """Pages are taken for every draft; if none is left the last sequence is preempted."""
    expected = plain(name, GREEDY)
    groups = len(model_of(name)[0].state.windows)
    served = engine(name, drafter_of(complete(expected)), num_pages=1 + 14 * groups)
    assert tokens(run(served, PROMPTS, GREEDY)) == tokens(expected)
    assert served.stats().num_preemptions > 0 and served.stats().num_live_pages == 0


def test_a_stop_token_among_accepted_drafts_ends_the_text_there() -> None:
    answer = tokens(plain("llama", GREEDY))[0][0]
    stop = answer[10]
    sampling = replace_sampling(stop_token_ids=(stop,))
    served = engine("llama", drafter_of(complete(plain("llama", GREEDY))))
    (output,) = run(served, PROMPTS[:1], sampling)
    assert output.outputs[0].token_ids == answer[: answer.index(stop) + 1]


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


def test_pooled_vectors_are_the_dense_forms_last_hidden_states() -> None:
    """With chunked prompts, several such rows in a step, and rows that generate."""
    model, params = model_of("llama")
    served = engine("llama", None, pools=True)
    served.add_request("text", PROMPTS[1], GREEDY)
    prompts = {f"p{i}": prompt for i, prompt in enumerate((*PROMPTS, *PROMPTS[:1]))}
    for name, prompt in prompts.items():
        served.add_request(name, prompt, GREEDY, pools=True)
    deltas: dict[str, list[Delta]] = {}
    while served.has_work:
        for delta in served.step().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    drawn = [token for delta in deltas.pop("text") for token in delta.token_ids]
    assert drawn == tokens(plain("llama", GREEDY))[1][0]
    for name, (delta,) in deltas.items():
        assert delta.finish_reason == "stop" and not delta.token_ids and not delta.error
        ids = jnp.array(prompts[name], jnp.int32)
        hidden, _ = hidden_states(model, params, ids, dense_context(len(ids)))
        assert delta.pooled is not None
        np.testing.assert_allclose(delta.pooled, hidden[-1], rtol=1e-4, atol=1e-5)
    assert served.stats().num_live_pages == 0


def test_pooling_is_refused_by_an_engine_built_without_it() -> None:
    with pytest.raises(RequestError, match="was not built to pool"):
        engine("llama", None).add_request("r", PROMPTS[0], GREEDY, pools=True)
