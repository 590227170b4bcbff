"""An engine whose answers are given by a test: it speaks a text and obeys masks.

Owns: ``scripted_engine``. Its tokenizer is the tiny one, whose tokens are bytes, or a real one, and
its chat template is real.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from jaxinfer.core.constraint import TokenFilter
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import StepPlan, StepResult
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from kit.engines import tiny_limits
from kit.fake_executor import FakeExecutor, Slot
from kit.tokenizers import DATA, real_spec, tiny_tokenizer_json

TEMPLATES = DATA.parent / "chat_templates"


class ScriptedExecutor(FakeExecutor):
    """Draws the tokens of ``script``, then the end. Each is the longest that the mask allows; if it
    allows none, it is replaced by one that ends a string, an object or the text soonest, and the
    script goes on behind as many bytes.
    """

    script = b""

    def __init__(self, page_size: int, words: Sequence[bytes], eos_id: int) -> None:
        """``words``: the text of each token, empty for special ones."""
        super().__init__(page_size)
        self._words, self._eos_id = words, eos_id
        self._ids = {word: token_id for token_id, word in enumerate(words) if word}
        self._longest = max(map(len, words))
        self._filters: WeakKeyDictionary[Slot, TokenFilter] = WeakKeyDictionary()

    def _draw(self, slot: Slot, num_generated: int) -> int:
        drawn = slot.token_ids[len(slot.request.prompt_token_ids) :]
        rest = self.script[sum(len(self._words[token_id]) or 1 for token_id in drawn) :]
        sizes = range(min(self._longest, len(rest)), 0, -1)
        wanted = [self._ids[rest[:size]] for size in sizes if rest[:size] in self._ids]
        wanted = wanted or [self._eos_id]
        if (constraint := slot.request.constraint) is None:
            return wanted[0]
        if slot not in self._filters:  # perhaps after a preemption
            self._filters[slot] = constraint.begin(drawn)
        mask = np.zeros(cdiv(len(self._words), 32), np.uint32)
        self._filters[slot].fill(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
        singles = [bytes([one]) for one in (*b'"}', *range(ord("!"), ord("~")), *range(256))]
        ways_out = (self._eos_id, *(self._ids[one] for one in singles if one in self._ids))
        drawn_id = next(token for token in (*wanted, *ways_out) if allowed[token])
        if drawn_id != self._eos_id:
            self._filters[slot].push(drawn_id)
        return drawn_id


class ScriptedDevice:
    """A ``StepExecutor`` over ``ScriptedExecutor``; ``speak`` sets the next answers."""

    def __init__(self, page_size: int, words: Sequence[bytes], eos_id: int) -> None:
        self.fake = ScriptedExecutor(page_size, words, eos_id)
        self._released = threading.Event()
        self._num_steps = -1  # before the device waits; -1: it does not

    def speak(self, text: str) -> None:
        """Answer with this text from now on."""
        self.fake.script = text.encode()

    def launch(self, plan: StepPlan) -> StepResult:
        """Run the step."""
        if self._num_steps == 0:
            self._released.wait(30)
        self._num_steps -= self._num_steps >= 0
        return self.fake.run(plan)

    @contextmanager
    def held(self, *, after: int) -> Iterator[threading.Event]:
        """After so many steps, wait until the event that this yields is set."""
        self._released.clear()
        self._num_steps = after
        try:
            yield self._released
        finally:
            self._released.set()

    def collect(self, step: StepResult) -> StepResult:
        """Its result."""
        return step

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing: nothing is kept."""

    def free_state(self) -> None:
        """See ``StepExecutor``."""
        self.fake.free_state()

    def make_state(self) -> None:
        """See ``StepExecutor``."""
        self.fake.make_state()


def scripted_engine(
    template: str = "", *, source: str = "", num_pages: int = 2049, vocabulary: str = ""
) -> tuple[Engine, ScriptedDevice]:
    """An engine with the chat template of this name in tests/data, or this one, and the tiny
    tokenizer, or the real one of this name.
    """
    limits = tiny_limits(
        num_pages=num_pages, page_size=16, max_model_len=8192, max_num_batched_tokens=8192
    )
    spec = TokenizerSpec(
        tokenizer_json=tiny_tokenizer_json(),
        tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
    )
    if vocabulary:
        spec = real_spec(vocabulary)
    chat_template = source or Path(TEMPLATES / f"{template}.jinja").read_text()
    tokenizer = load_tokenizer(replace(spec, chat_template=chat_template))
    eos_id, size = tokenizer.eos_token_id, len(tokenizer)
    assert eos_id is not None
    special = tokenizer.special_token_ids
    words = [
        b"" if token_id in special else word
        for token_id, word in enumerate(tokenizer.vocabulary_bytes(size))
    ]
    device = ScriptedDevice(limits.page_size, words, eos_id)
    facts = ModelFacts(
        name="scripted",
        vocab_size=size,
        eos_token_ids=(eos_id,),
        default_sampling=SamplingParams(),
    )
    engine = Engine(device, limits, facts, tokenizer, overlap=False)
    return engine, device
