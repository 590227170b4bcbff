"""An engine whose answers are given by a test: it speaks a text, byte by byte, and obeys masks.

Owns: ``scripted_engine``. Its tokenizer is the tiny one with a real chat template.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from kit.tokenizers import DATA, TINY_EOS_ID, TINY_VOCAB_SIZE, tiny_tokenizer_json

TEMPLATES = DATA.parent / "chat_templates"


class ScriptedExecutor(FakeExecutor):
    """Draws the bytes of ``script``, then the end. A mask that forbids a token replaces it by one
    that ends a string, an object or the text soonest; then the script goes on.
    """

    script = b""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._filters: WeakKeyDictionary[Slot, TokenFilter] = WeakKeyDictionary()

    def _draw(self, slot: Slot, num_generated: int) -> int:
        script = [*self.script, TINY_EOS_ID]
        wanted = script[min(num_generated, len(script) - 1)]
        if (constraint := slot.request.constraint) is None:
            return wanted
        if slot not in self._filters:  # perhaps after a preemption
            drawn = slot.token_ids[len(slot.request.prompt_token_ids) :]
            self._filters[slot] = constraint.begin(drawn)
        mask = np.zeros(cdiv(TINY_VOCAB_SIZE, 32), np.uint32)
        self._filters[slot].fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ways_out = (TINY_EOS_ID, *b'"}', *range(ord("!"), ord("~")), *range(256))
        drawn_id = next(token for token in (wanted, *ways_out) if token in allowed)
        if drawn_id != TINY_EOS_ID:
            self._filters[slot].push(drawn_id)
        return drawn_id


class ScriptedDevice:
    """A ``StepExecutor`` over ``ScriptedExecutor``; ``speak`` sets the next answers."""

    def __init__(self, page_size: int) -> None:
        self.fake = ScriptedExecutor(page_size)
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
    template: str = "", *, source: str = "", num_pages: int = 2049
) -> tuple[Engine, ScriptedDevice]:
    """An engine with the chat template of this name in tests/data, or this one."""
    limits = tiny_limits(
        num_pages=num_pages, page_size=16, max_model_len=8192, max_num_batched_tokens=8192
    )
    device = ScriptedDevice(limits.page_size)
    spec = TokenizerSpec(
        tokenizer_json=tiny_tokenizer_json(),
        tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        chat_template=source or Path(TEMPLATES / f"{template}.jinja").read_text(),
    )
    facts = ModelFacts(
        name="scripted",
        vocab_size=TINY_VOCAB_SIZE,
        eos_token_ids=(TINY_EOS_ID,),
        default_sampling=SamplingParams(),
    )
    engine = Engine(device, limits, facts, load_tokenizer(spec), overlap=False)
    return engine, device
