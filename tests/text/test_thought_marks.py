"""Marks of thoughts that are several tokens, which the text around them may divide otherwise."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.structured import StructuredOutputsParams, Thinking
from jaxinfer.text.grammar.compile import ConstraintCompiler
from jaxinfer.text.tokenizer import load_tokenizer
from kit.tokenizers import (
    TINY_EOS_ID,
    TINY_VOCAB_SIZE,
    tiny_tokenizer_json,
    tiny_tokenizer_spec,
)

pytest.importorskip("llguidance")
MERGED = ("</", ">\n", ">\n\n", ">{")  # tokens of the tiny vocabulary with merges


@pytest.fixture(scope="module")
def merging() -> ConstraintCompiler:
    """Its tokens divide ``</think>`` otherwise than the text around it does."""
    definition = json.loads(tiny_tokenizer_json())
    words = [word.replace("\n", "Ċ") for word in MERGED]  # GPT-2's letter for a newline
    definition["model"]["vocab"] |= {word: 256 + i for i, word in enumerate(words)}
    definition["model"]["merges"] = [f"{word[:-1]} {word[-1]}" for word in words]
    spec = replace(tiny_tokenizer_spec(), tokenizer_json=json.dumps(definition))
    # special tokens get the ids behind them
    return ConstraintCompiler(load_tokenizer(spec), TINY_VOCAB_SIZE + 4, (TINY_EOS_ID + 4,))


def allowed(follower) -> list[int]:
    mask = np.zeros(-(-TINY_VOCAB_SIZE // 32), np.uint32)
    follower.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("text", ["hm</think>\n\n", "hm</think>", "</</think>\n"])
def test_the_tokens_of_a_mark_depend_on_the_text_around_it(
    merging: ConstraintCompiler, text: str
) -> None:
    spelt = {word: 256 + i for i, word in enumerate(MERGED)}
    mark = (spelt["</"], *b"think>")
    thinking = Thinking(end=mark, is_open=True)
    form = StructuredOutputsParams(choice=("{yes", "{no"))
    constraint = merging.compile(SamplingParams(structured_outputs=form, thinking=thinking))
    assert constraint is not None
    ids = [
        spelt[one] if one in spelt else ord(one)
        for one in re.findall("</|>\n\n|>\n|.", text, re.DOTALL)
    ]
    for count in range(1, len(ids)):
        within = allowed(constraint.begin(ids[:count]))
        assert len(within) > 200
        # the form begins with a token of its own
        assert (spelt[">{"] in within) is not (ids[:count][-6:] == [spelt["</"], *b"think"])
    assert allowed(constraint.begin(ids)) == [ord("{")]
