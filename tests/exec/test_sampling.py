"""A step's sampling equals plain numpy code written from the definitions, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.sampling_checks import MAX_LOGPROBS
from jaxinfer.core.step import SlotAdmission
from jaxinfer.exec.calls.admit import admit, empty_rows, needs_admission, slot_rows
from jaxinfer.exec.step.sampling import (
    CHUNK,
    NOT_FINITE,
    read_logprobs,
    sample,
    token_logprobs,
    with_extras,
)
from jaxinfer.exec.step.slots import SlotState, init_slots, settings_of

VOCAB = 50
MAX_LEN = 32
PROMPT = (3, 4, 4, 7)
OUTPUT = (4, 9, 9, 11)


def draw(
    logits: np.ndarray,
    rows: list[SamplingParams],
    eos: tuple[int, ...] = (),
    before: SlotState | None = None,
) -> np.ndarray:
    """One token for each row of float32[B, V] logits, after PROMPT + OUTPUT.

    ``before``: slots with the data of earlier requests.
    """
    return draw_in(logits, rows, eos, before)[0]


def draw_in(
    logits: np.ndarray,
    rows: list[SamplingParams],
    eos: tuple[int, ...] = (),
    before: SlotState | None = None,
) -> tuple[np.ndarray, SlotState]:
    """As ``draw``, and the slots."""
    slots = before or init_slots(len(rows), MAX_LEN, jax.ShapeDtypeStruct((0,), jnp.float32))
    requests: list[Request] = []
    admissions: list[SlotAdmission] = []
    for slot, params in enumerate(rows):
        request = Request(
            request_id=str(slot),
            prompt_token_ids=PROMPT,
            sampling=params,
            max_tokens=8,
            seed=params.seed or 0,
            eos_token_ids=eos,
        )
        requests.append(request)
        if needs_admission(request):
            admissions.append(SlotAdmission(slot, request, IntLog(PROMPT + OUTPUT)))
    empty = empty_rows(len(rows) + 1, len(rows), MAX_LEN)  # at least one row is padding
    slots = jax.jit(admit)(slots, slot_rows(admissions, empty, VOCAB))
    settings = slots.settings.at[: len(rows)].set(settings_of(requests))
    slots = slots._replace(settings=settings)
    lens = jnp.full(len(rows), len(PROMPT + OUTPUT), jnp.int32)
    index = jnp.arange(len(rows), dtype=jnp.int32)
    given = jnp.asarray(logits)
    drawn, _ = jax.jit(sample)(given, slots, index, lens)
    if any(params.needs_extras for params in rows):
        changed = jax.jit(with_extras)(given, slots, index, lens)
        drawn, _ = jax.jit(sample)(given, slots, index, lens, changed=changed)
    return np.asarray(drawn), slots


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def test_frequencies_follow_the_softmax() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :4] = np.log([4, 3, 2, 1])
    logits[0, 4:] = -1e9
    rows = [SamplingParams(seed=seed) for seed in range(2000)]
    drawn = draw(np.repeat(logits, len(rows), 0), rows)
    counts = np.bincount(drawn, minlength=VOCAB)
    expected = np.array([0.4, 0.3, 0.2, 0.1]) * len(rows)
    assert counts[4:].sum() == 0
    # chi-square with 3 degrees of freedom: 16.3 is exceeded once in 1,000
    assert (((counts[:4] - expected) ** 2) / expected).sum() < 16.3


def kept_top_k(logits: np.ndarray, k: int) -> set[int]:
    return set(np.argsort(-logits)[:k].tolist())


def kept_top_p(logits: np.ndarray, p: float) -> set[int]:
    order = np.argsort(-logits)
    mass = np.exp(logits - logits.max())
    cumulative = np.cumsum(mass[order] / mass.sum())
    return set(order[: int(np.searchsorted(cumulative, p)) + 1].tolist())


def kept_min_p(logits: np.ndarray, p: float) -> set[int]:
    return set(np.flatnonzero(logits >= logits.max() + np.log(p)).tolist())


FILTERS = {
    "top_k": (dict(top_k=5), lambda row: kept_top_k(row, 5)),
    "top_p": (dict(top_p=0.7), lambda row: kept_top_p(row, 0.7)),
    "min_p": (dict(min_p=0.05), lambda row: kept_min_p(row, 0.05)),
    "top_k then top_p": (
        dict(top_k=6, top_p=0.8),
        lambda row: {
            sorted(kept_top_k(row, 6))[i] for i in kept_top_p(row[sorted(kept_top_k(row, 6))], 0.8)
        },
    ),
    "top_k beyond the vocabulary": (dict(top_k=10**6), lambda row: set(range(VOCAB))),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_keep_exactly_the_right_tokens(name: str) -> None:
    settings, kept = FILTERS[name]
    logits = random_logits(1, seed=4)
    # at this temperature every kept token is drawn in 1,000 tries
    rows = [SamplingParams(seed=seed, temperature=1.0, **settings) for seed in range(1000)]
    drawn = set(draw(np.repeat(logits, len(rows), 0), rows).tolist())
    expected = kept(logits[0])
    assert drawn <= expected
    frequent = {t for t in expected if np.exp(logits[0, t] - logits.max()) > 0.02}
    assert frequent <= drawn


def test_greedy_rows_are_untouched_by_random_neighbours() -> None:
    logits = random_logits(3)
    mixed = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(temperature=0)]
    drawn = draw(logits, mixed)
    assert drawn[0] == logits[0].argmax() and drawn[2] == logits[2].argmax()
    assert drawn[1] == draw(logits[1:2], [mixed[1]])[0]


def test_penalties() -> None:
    logits = random_logits(1, seed=2)[0]
    counts = np.bincount(OUTPUT, minlength=VOCAB)
    seen = np.bincount(PROMPT + OUTPUT, minlength=VOCAB) > 0
    expected = np.where(seen, np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
    expected = expected - 0.7 * counts - 0.4 * (counts > 0)
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.4
    )
    for top in range(10):  # remove the most likely token each time: the whole order must agree
        assert draw(logits[None], [params])[0] == expected.argmax(), top
        logits[expected.argmax()] = expected[expected.argmax()] = -1e9


def test_logit_bias_moves_the_choice_and_only_its_row() -> None:
    logits = random_logits(2)
    rows = [SamplingParams(temperature=0, logit_bias={17: 100.0}), SamplingParams(temperature=0)]
    assert draw(logits, rows).tolist() == [17, logits[1].argmax()]


def test_min_tokens_masks_stop_ids_until_reached() -> None:
    logits = random_logits(1)
    best, second = np.argsort(-logits[0])[:2]
    output = len(OUTPUT)
    short = SamplingParams(temperature=0, min_tokens=output + 1, stop_token_ids=(int(best),))
    enough = SamplingParams(temperature=0, min_tokens=output, stop_token_ids=(int(best),))
    assert draw(logits, [short]) == second
    assert draw(logits, [enough]) == best
    plain = SamplingParams(temperature=0, min_tokens=output + 1)
    assert draw(logits, [plain], eos=(int(best),)) == second


def test_extras_of_other_rows_do_not_change_a_row() -> None:
    """A plain row draws the same token with and without extras in the step."""
    logits = random_logits(2, seed=5)
    logits[0, 0] = logits[1, 0] = -1e9
    extras = SamplingParams(
        seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={1: -9.0}, logprobs=1
    )
    for seed in range(50):
        plain = SamplingParams(seed=seed, top_p=0.9)
        assert draw(logits, [plain, extras])[0] == draw(logits[:1], [plain])[0]


def test_extras_of_a_slot_s_last_request_have_no_effect() -> None:
    """Only a request with extras is admitted; the slots of others keep earlier data."""
    logits = random_logits(2, seed=6)
    best = int(logits[0].argmax())
    extras = SamplingParams(
        temperature=0,
        repetition_penalty=3.0,
        presence_penalty=2.0,
        logit_bias={best: -100.0},
        min_tokens=16,
        stop_token_ids=(best,),
    )
    drawn, before = draw_in(logits, [extras, extras])
    assert drawn[0] != best
    plain = SamplingParams(temperature=0)
    assert draw(logits, [plain, extras], before=before).tolist() == [best, drawn[1]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_k=3, top_p=0.9),
        SamplingParams(temperature=0, logprobs=1, presence_penalty=1.0),
    ],
    ids=["greedy", "sampled", "extras"],
)
def test_a_row_whose_logits_are_not_finite_draws_no_token(
    bad: float, params: SamplingParams
) -> None:
    """One such value in the row is enough; the other rows are not changed."""
    logits = random_logits(3, seed=7)
    whole = draw(logits, [params] * 3)
    for place in (0, 17, VOCAB - 1):
        damaged = logits.copy()
        damaged[1, place] = bad
        assert draw(damaged, [params] * 3).tolist() == [whole[0], NOT_FINITE, whole[2]]


def test_logprobs_and_ranks() -> None:
    logits = random_logits(2)
    chosen = np.array([logits[0].argmax(), np.argsort(-logits[1])[6]], np.int32)
    packed = token_logprobs(jnp.asarray(logits), jnp.asarray(chosen))
    result = read_logprobs(np.asarray(packed))
    expected = jax.nn.log_softmax(logits, axis=-1)
    np.testing.assert_array_equal(result.rank, [1, 7])
    np.testing.assert_allclose(result.chosen, expected[np.arange(2), chosen], rtol=1e-5)
    order = np.argsort(-logits, axis=1)[:, :20]
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_allclose(
        result.top_logprobs, np.take_along_axis(np.asarray(expected), order, 1), rtol=1e-5
    )


@pytest.mark.parametrize("vocab", [MAX_LOGPROBS, CHUNK + 1, 3 * CHUNK, 50 * CHUNK - 7])
@pytest.mark.parametrize("distinct", [3, 40, 100_000], ids=lambda count: f"{count}_values")
def test_the_most_likely_tokens_equal_a_sort_s(vocab: int, distinct: int) -> None:
    """With few distinct values most are equal, and the first of equal values counts."""
    values = np.random.default_rng(vocab).integers(0, distinct, (5, vocab))
    logits = jnp.asarray(values * (8.0 / distinct), jnp.float32).at[0, vocab // 2 :].set(-jnp.inf)
    entry = read_logprobs(np.asarray(token_logprobs(logits, jnp.zeros(5, jnp.int32))))
    order = np.argsort(-np.asarray(logits), axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(entry.top_ids, order)
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), order, axis=1)
    np.testing.assert_allclose(entry.top_logprobs, expected, rtol=1e-5, atol=1e-5)
