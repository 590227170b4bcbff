"""DeepSeek-V4 through the whole engine: windows, entries of 4 and 8 tokens, experts of token ids.

The tokens are those of the dense form at each border of a window, an entry and a page, whatever the
engine does with the requests.
"""

from __future__ import annotations

import pytest

from jaxinfer.core.request import SamplingParams
from kit.dense import prompt_of
from kit.one_model import OneModel

pytestmark = pytest.mark.nightly  # the steps compile for 20 s

# around entries of 4 and 8 tokens, the window of 12, pages of 16 and 32 tokens, chunks of 64
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 200)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
MODEL = OneModel("deepseek_v4", chunk=64, max_model_len=256)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_prompts_end_at_every_border(overlap: bool) -> None:
    served = MODEL.engine(overlap=overlap)
    assert not any(MODEL.check(served, [prompt_of(n, seed=n) for n in LENGTHS], GREEDY))


def test_answers_pass_every_border() -> None:
    MODEL.check(MODEL.engine(), [prompt_of(2, 2), prompt_of(61, 3), prompt_of(129, 4)], LONG)


def test_prefixes_are_reused_up_to_a_page_of_the_longest_entries() -> None:
    served = MODEL.engine()
    MODEL.check(served, [prompt_of(140)], GREEDY)
    assert MODEL.check(served, [prompt_of(129), prompt_of(200)], GREEDY) == [128, 128]


def test_the_next_turn_starts_near_the_end_of_the_answer() -> None:
    turns = [prompt_of(20, 21), prompt_of(60, 22)]
    questions = [prompt_of(20, 30), prompt_of(20, 31)]
    assert MODEL.check_next_turns(turns, questions, LONG, GREEDY) == [32, 96]


@pytest.mark.parametrize("pool", range(2))
def test_preempted_sequences_draw_the_same_tokens(pool: int) -> None:
    """There are few pages of entries of 4 or of 8 tokens; those of windows are returned early."""
    num_pages = [200, 200, 200]
    num_pages[pool] = (18, 10)[pool]
    served = MODEL.engine(tuple(num_pages))
    MODEL.check(served, [prompt_of(60, 5), prompt_of(70, 6), prompt_of(33, 7)], LONG)
    assert served.stats().num_preemptions > 0


def test_a_reused_prefix_has_the_same_unfinished_windows() -> None:
    MODEL.check_same_state(prompt_of(130), prompt_of(150), cached=128)
