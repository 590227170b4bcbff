"""Qwen3.8-Flash-Next through the whole engine: n-grams, streams, the delta rule, chosen blocks.

The tokens are those of the dense form at each border of a block, a page, an n-gram, a convolution
and a chunk, whatever the engine does with the requests.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.core.request import SamplingParams
from kit.dense import prompt_of as drawn
from kit.one_model import OneModel
from kit.tiny_models import CONFIGS

pytestmark = pytest.mark.nightly  # the steps compile for 20 s

NAME = "qwen4_exp"
BOUNDARY, OTHER = CONFIGS[NAME]["eos_token_id"]
# around n-grams of 2 and 3 tokens, 10 inputs of the convolution, blocks of 4 tokens of which 2 and
# the last ones are read, pages of 8 and 32 tokens, chunks of 64
LENGTHS = (*range(1, 14), 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 67, 74, 127, 128, 129, 200)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
MODEL = OneModel(NAME, chunk=128, max_model_len=320)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Prompts of one seed share a beginning; each fifth token or so ends a text."""
    texts = np.random.default_rng(100 + seed).choice(
        (0, BOUNDARY, OTHER), length, p=(0.8, 0.1, 0.1)
    )
    return [end or token for end, token in zip(texts.tolist(), drawn(length, seed), strict=True)]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_prompts_end_at_every_border(overlap: bool) -> None:
    served = MODEL.engine(overlap=overlap)
    assert not any(MODEL.check(served, [prompt_of(n, seed=n) for n in LENGTHS], GREEDY))


def test_answers_pass_every_border() -> None:
    MODEL.check(MODEL.engine(), [prompt_of(2, 2), prompt_of(61, 3), prompt_of(129, 4)], LONG)


def test_prefixes_are_reused_up_to_a_border() -> None:
    served = MODEL.engine()
    MODEL.check(served, [prompt_of(140)], GREEDY)
    assert MODEL.check(served, [prompt_of(129), prompt_of(200)], GREEDY) == [128, 128]


def test_the_next_turn_starts_near_the_end_of_the_answer() -> None:
    turns = [prompt_of(60, 21), prompt_of(100, 22)]
    questions = [prompt_of(20, 30), prompt_of(20, 31)]
    assert MODEL.check_next_turns(turns, questions, LONG, GREEDY) == [128, 128]


@pytest.mark.parametrize("pool", range(2))
def test_preempted_sequences_draw_the_same_tokens(pool: int) -> None:
    """There are few pages of tokens or of blocks."""
    num_pages = [200, 200]
    num_pages[pool] = (60, 16)[pool]
    served = MODEL.engine(tuple(num_pages))
    MODEL.check(served, [prompt_of(100, 5), prompt_of(110, 6), prompt_of(64, 7)], LONG)
    assert served.stats().num_preemptions > 0


def test_a_reused_prefix_has_the_same_state() -> None:
    count = MODEL.check_same_state(prompt_of(130), prompt_of(150), cached=128)
    assert count == 7  # of n-grams, unfinished blocks and the delta rule
