"""One tiny model through the whole engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from kit.dense import check_tokens
from kit.engines import compiled_for, engine_of, run, tiny_limits
from kit.tiny_models import tiny_model

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


@dataclass(frozen=True)
class OneModel:
    """Engines of the tiny model ``name``, whose steps are compiled once. They run up to three
    sequences of ``max_model_len`` tokens, and ``chunk`` tokens of prompts in a step; with
    ``extras`` penalties, logprobs and masks, too.
    """

    name: str
    chunk: int
    max_model_len: int
    extras: bool = False

    @cached_property
    def compiled(self) -> tuple[Program, Executables]:
        """The program and its steps."""
        model, _ = tiny_model(self.name)
        limits = tiny_limits(
            max_num_seqs=3, max_num_batched_tokens=self.chunk, max_model_len=self.max_model_len
        )
        limits = replace(
            limits,
            buckets=(Bucket(3), Bucket(0, self.chunk, 3), Bucket(3, self.chunk, 3, scores=True)),
            groups=model.state.groups,
            num_pages=(max(200, 3 * self.max_model_len // limits.page_size),)
            * len(model.state.bytes_per_entry),
            num_snapshots=8 if model.state.bytes_per_slot else 0,
            align=model.state.align,
        )
        program = Program(model, limits)
        return program, compiled_for(program, extras=self.extras)

    def engine(
        self,
        num_pages: tuple[int, ...] | None = None,
        *,
        overlap: bool = True,
        chat_template: str = "",
    ) -> Engine:
        """A fresh engine, with so many pages in each pool."""
        program, compiled = self.compiled
        executor = Executor(program, compiled, tiny_model(self.name)[1], *init_state(program))
        limits = replace(program.limits, num_pages=num_pages or program.limits.num_pages)
        return engine_of(executor, limits, overlap=overlap, chat_template=chat_template)

    def check(self, served: Engine, prompts: list[list[int]], params: SamplingParams) -> list[int]:
        """The reused tokens of each prompt; the answers must be those of the dense form."""
        return check_tokens(self.name, served, prompts, params, self.max_model_len)

    def states_after(self, prompts: list[list[int]]) -> tuple[int, dict[str, np.ndarray]]:
        """The reused tokens of the last prompt, and the states of all slots, after prompts one at a
        time in a fresh engine.
        """
        served = self.engine()
        outputs = run(served, prompts, ONE_TOKEN, together=False)
        layout = tiny_model(self.name)[0].state
        arrays = served._loop._executor._arrays.state  # type: ignore[attr-defined]
        found = {
            f"{entry.name}{i}": np.asarray(array)[: served.limits.max_num_seqs]
            for i, (entry, array) in enumerate(zip(layout.arrays, arrays, strict=True))
            if layout.pools[i] is None
        }
        return outputs[-1].num_cached_tokens, found

    def check_same_state(self, first: list[int], then: list[int], cached: int) -> int:
        """A prompt has the same state, bit for bit, alone and after another one, of which it reuses
        so many tokens: a request alone is in the first slot. Returns the number of arrays.
        """
        none, cold = self.states_after([then])
        reused, warm = self.states_after([first, then])
        assert (none, reused) == (0, cached)
        used = [i for i in range(3) if any(array[i].any() for array in cold.values())]
        assert used
        for name, array in cold.items():
            assert np.array_equal(array[used], warm[name][used]), name
        return len(cold)

    def check_next_turns(
        self,
        turns: Sequence[list[int]],
        questions: Sequence[list[int]],
        params: SamplingParams,
        after: SamplingParams,
    ) -> list[int]:
        """The reused tokens of chats that go on with ``questions``, after answers to ``turns``."""
        served = self.engine()
        answers = [list(output.outputs[0].token_ids) for output in run(served, [*turns], params)]
        chats = zip(turns, answers, questions, strict=True)
        following = [[*turn, *answer, *question] for turn, answer, question in chats]
        return self.check(served, following, after)
