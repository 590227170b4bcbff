"""Beam search: its results are those of a plain search over all tokens, alone and on the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, BeamSearchParams, SamplingParams
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import RequestError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.engine.requests.beam_search import BeamSearch, BeamSearchSequence
from jaxinfer.engine.requests.outputs import Logprob
from jaxinfer.models.base import forward
from kit.engines import EOS, tiny_engine
from kit.tiny_models import tiny_model

type NextLogprobs = Callable[[tuple[int, ...]], np.ndarray]  # float64[V] after these tokens
type Scored = tuple[float, tuple[int, ...]]  # a beam's score and its tokens

VOCABULARY = 8
PROMPT = (1, 2)


def random_logprobs(seed: int, end: int = 0) -> NextLogprobs:
    """The next token's logprobs, random for each text; ``end`` is a likely token."""

    @cache
    def of(tokens: tuple[int, ...]) -> np.ndarray:  # float64[V]
        logits = np.random.default_rng([seed, *tokens]).normal(size=VOCABULARY) * 2
        logits[end] += 1.0
        return logits - np.log(np.exp(logits).sum())

    return of


def plain_search(
    logprobs: NextLogprobs, prompt: Sequence[int], params: BeamSearchParams, ends: Sequence[int]
) -> list[Scored]:
    """Every round to the end: of each beam the 2 * width likeliest tokens, as vLLM does."""
    width = params.beam_width
    beams, ended = [(0.0, tuple(prompt))], []

    def scored(beam: Scored) -> Scored:
        total, tokens = beam
        return total / (len(tokens) - (tokens[-1] in ends)) ** params.length_penalty, tokens

    for _ in range(params.max_tokens):
        longer = []
        for total, tokens in beams:
            found = logprobs(tokens)
            for token in np.argsort(-found, kind="stable")[: 2 * width].tolist():
                beam = (total + float(found[token]), (*tokens, token))
                (ended if token in ends and not params.ignore_eos else longer).append(beam)
        beams = sorted(longer, key=scored, reverse=True)[:width]
    return sorted(map(scored, ended + beams), reverse=True)[:width]


def searched(
    logprobs: NextLogprobs, params: BeamSearchParams, ends: Sequence[int], max_model_len: int = 99
) -> tuple[list[BeamSearchSequence], int]:
    """The best beams, and the number of rounds."""
    search = BeamSearch(PROMPT, params, ends, max_model_len)
    for num_rounds in itertools.count():
        if not (prompts := search.prompts):
            return search.best(), num_rounds
        positions = []
        for tokens in prompts:
            found = logprobs(tokens)
            likeliest = np.argsort(-found, kind="stable")[: 2 * params.beam_width].tolist()
            ranked = enumerate(likeliest, 1)
            positions.append({one: Logprob(float(found[one]), rank) for rank, one in ranked})
        search.extend(positions)
    raise AssertionError


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0, -1.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_results_are_those_of_a_plain_search(width: int, length_penalty: float) -> None:
    """Also where the search stops before the last round."""
    num_rounds = []
    for seed in range(20):
        logprobs = random_logprobs(seed)
        for ignore_eos in (False, True):
            params = BeamSearchParams(width, 8, ignore_eos, length_penalty=length_penalty)
            beams, rounds = searched(logprobs, params, (0, 5))
            expected = plain_search(logprobs, PROMPT, params, (0, 5))
            assert [tuple(beam.tokens) for beam in beams] == [tokens for _, tokens in expected]
            for beam in beams:
                steps = zip(beam.tokens[len(PROMPT) :], beam.logprobs, strict=True)
                assert beam.cum_logprob == pytest.approx(sum(p[t].logprob for t, p in steps))
                ended = beam.tokens[-1] in (0, 5) and not ignore_eos
                assert beam.finish_reason == ("stop" if ended else "length")
                assert beam.stop_reason == (beam.tokens[-1] if ended else None)
            num_rounds.append(rounds)
    assert min(num_rounds) < 8 or length_penalty == 3.0
    assert max(num_rounds) == 8


def test_wide_search_finds_the_best_of_all_texts() -> None:
    logprobs = random_logprobs(3)
    params = BeamSearchParams(10, 2, ignore_eos=True, length_penalty=0.0)
    totals = {
        (*PROMPT, a, b): logprobs(PROMPT)[a] + logprobs((*PROMPT, a))[b]
        for a, b in itertools.product(range(VOCABULARY), repeat=2)
    }
    beams, _ = searched(logprobs, params, (0,))
    assert [tuple(one.tokens) for one in beams] == sorted(totals, key=totals.__getitem__)[:-11:-1]


def test_early_stopping_ends_with_enough_beams() -> None:
    params = BeamSearchParams(2, 50, length_penalty=5.0, early_stopping=True)
    beams, num_rounds = searched(random_logprobs(1), params, (0,))
    assert num_rounds < 50 and len(beams) == 2


def test_context_ends_a_search() -> None:
    params = BeamSearchParams(2, 50, ignore_eos=True)
    beams, num_rounds = searched(random_logprobs(1), params, (), max_model_len=6)
    assert num_rounds == 4 and {len(beam.tokens) for beam in beams} == {6}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width must be at most 10"),
        ({"beam_width": 1.5}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 21}, "length_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"early_stopping": "never"}, "early_stopping"),
    ],
)
def test_wrong_parameters_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.of_engine(tiny_engine(), EngineConfig(), NO_PROGRESS)


def test_beams_on_the_engine(llm: LLM) -> None:
    """Several prompts at once, with more beams than slots, on cached prefixes."""
    model, params = tiny_model("llama")
    logits = jax.jit(lambda ids: forward(model, params, ids))

    def dense(tokens: tuple[int, ...]) -> np.ndarray:  # float32[V]
        ids = np.zeros(64, np.int32)
        ids[: len(tokens)] = tokens
        return np.asarray(jax.nn.log_softmax(jnp.asarray(logits(ids)[len(tokens) - 1])))

    prompts = [(5, 6, 7), tuple(range(40, 50)), (9,)]
    how = BeamSearchParams(beam_width=3, max_tokens=5)
    found = llm.beam_search([list(prompt) for prompt in prompts], how)
    for prompt, output in zip(prompts, found, strict=True):
        expected = plain_search(dense, prompt, how, (EOS,))
        assert [tuple(one.tokens) for one in output.sequences] == [ids for _, ids in expected]
        for beam, (score, tokens) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob / len(tokens) == pytest.approx(score, abs=1e-4)
            assert beam.text == llm.get_tokenizer().decode(tokens, skip_special_tokens=False)
    assert llm.stats().num_cached_tokens > 0
    alone = llm.beam_search([{"prompt_token_ids": [9]}], how, concurrency_limit=1)
    assert alone[0].sequences == found[2].sequences


def test_one_beam_is_greedy(llm: LLM) -> None:
    (output,) = llm.beam_search("ab", BeamSearchParams(1, 6))
    (greedy,) = llm.generate("ab", SamplingParams(max_tokens=6, temperature=0))
    assert output.sequences[0].tokens[2:] == greedy.outputs[0].token_ids


def test_wrong_prompt_starts_no_search(llm: LLM) -> None:
    before = llm.stats().num_requests
    with pytest.raises(RequestError, match="prompt 1"):
        llm.beam_search([[1], [1] * 500], BeamSearchParams(2, 4))
    assert llm.stats().num_requests == before
