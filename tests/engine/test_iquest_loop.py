"""IQuest-LoopCoder through the whole engine: a second pass reads pages that the first one wrote.

The tokens are those of the dense form at borders of pages, of the second pass's window of 7 tokens,
and of a step's tokens of a prompt, whatever the engine does with the requests.
"""

from __future__ import annotations

import pytest

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import PageGroup
from kit.dense import prompt_of
from kit.one_model import OneModel
from kit.tiny_models import tiny_model

NAME = "iquest_loop"
LENGTHS = (1, 3, 4, 5, 6, 7, 8, 9, 16, 31, 55, 56, 57, 63, 100, 120)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
MODEL = OneModel(NAME, chunk=56, max_model_len=168)

nightly = pytest.mark.nightly  # the steps compile for 8 s


def test_the_second_pass_has_pages_of_a_window_and_reads_those_of_the_first() -> None:
    layout = tiny_model(NAME)[0].state
    assert layout.groups == (PageGroup(), PageGroup(7))
    assert [place.groups for place in layout.layers] == [(0,), (0,), (1, 0), (1, 0)]
    assert layout.layers[2].arrays == layout.layers[0].arrays
    assert layout.border_before(2) == 0, "a step is not split where a pass borrows weights"


@nightly
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_batched_and_divided_prompts(overlap: bool) -> None:
    served = MODEL.engine(overlap=overlap)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    assert not any(MODEL.check(served, prompts, GREEDY))


@nightly
def test_answers_pass_borders_and_prefixes_are_reused() -> None:
    served = MODEL.engine()
    MODEL.check(served, [prompt_of(52)], LONG)
    assert MODEL.check(served, [prompt_of(53), prompt_of(90)], LONG) == [52, 52]


@nightly
def test_preempted_sequences_draw_the_same_tokens() -> None:
    served = MODEL.engine((44,))
    MODEL.check(served, [prompt_of(22, 5), prompt_of(21, 6), prompt_of(20, 7)], LONG)
    assert served.stats().num_preemptions > 0
