"""The step's contract holds: a family that the library does not know is served.

Whatever the engine does with its requests (batches, chunks, preemption, reuse of prefixes, overlap)
the tokens are those of the dense form.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.config import Limits
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models import forward
from jaxinfer.nn.placement import default_placement
from kit.engines import engine_of, run, tiny_limits
from kit.mixed_family import WINDOW, mixed_model

KINDS = {
    "all": ("window", "latent", "recurrent", "full", "window"),
    "paged": ("window", "latent", "full", "window", "window"),
}
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def prompts_of(*sizes: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Prompts by first token and length; those of one first token share a beginning."""
    return tuple(tuple((7 * i * i + first) % 320 for i in range(n)) for first, n in sizes)


PROMPTS = prompts_of((1, 40), (1, 33), (5, 3))
SHORT = prompts_of((1, 9), (2, 8), (5, 10))
LIMITS = replace(
    tiny_limits(max_num_seqs=3, max_num_batched_tokens=16, num_pages=120),
    buckets=(Bucket(3), Bucket(0, 16, 3), Bucket(3, 16, 3, scores=True)),
)


@cache
def expected(
    name: str,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    max_tokens: int = 14,
) -> list[tuple[int, ...]]:
    """Greedy tokens of the dense form, each from the logits of the whole sequence before it."""
    model, params = mixed_model(*KINDS[name])
    logits = jax.jit(lambda ids: forward(model, params, ids))
    found = []
    for prompt in prompts:
        ids = np.zeros(64, np.int32)
        ids[: len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + max_tokens):
            ids[end] = jnp.argmax(logits(ids)[end - 1])
        found.append(tuple(ids[len(prompt) : len(prompt) + max_tokens].tolist()))
    return found


@cache
def executables(name: str, num_pages: int) -> tuple[Program, Executables]:
    model, _ = mixed_model(*KINDS[name])
    limits = replace(LIMITS, num_pages=num_pages, windows=model.state.windows)
    program = Program(model, limits)
    by_name = {one: program.trace(one).lower().compile() for one in program.names()}
    return program, Executables(by_name, compiled=0, workspace_bytes=0)


def engine(name: str, num_pages: int = 120, *, overlap: bool = True) -> Engine:
    program, compiled = executables(name, num_pages)
    _, params = mixed_model(*KINDS[name])
    executor = Executor(program, default_placement(), compiled, params, *init_state(program))
    reusable = not program.model.state.bytes_per_slot  # as ``engine.start.build`` has it
    limits: Limits = replace(program.limits, enable_prefix_caching=reusable)
    return engine_of(executor, limits, overlap=overlap)


def answers(one: Engine, *, together: bool = True) -> list[tuple[int, ...]]:
    outputs = run(one, PROMPTS, GREEDY, together=together)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_batched_and_chunked(name: str, overlap: bool) -> None:
    served = engine(name, overlap=overlap)
    assert answers(served) == expected(name)
    assert served.stats().num_live_pages == 0


@pytest.mark.parametrize("name", KINDS)
def test_alone(name: str) -> None:
    assert answers(engine(name), together=False) == expected(name)


@pytest.mark.parametrize("name", KINDS)
def test_preempted(name: str) -> None:
    needed = executables(name, 120)[0].limits.pages_needed(50)
    served = engine(name, num_pages=needed + 8)
    outputs = run(served, SHORT, LONG)
    found = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert found == expected(name, SHORT, LONG.max_tokens)
    assert served.stats().num_preemptions > 0


def test_prefix_hits() -> None:
    """Of every group: what a window has given back is not needed."""
    served = engine("paged")
    assert answers(served) == expected("paged")
    again = run(served, PROMPTS, GREEDY)
    assert [tuple(output.outputs[0].token_ids) for output in again] == expected("paged")
    assert [output.num_cached_tokens for output in again] == [36, 32, 0]


def test_pages_behind_a_window_go_back() -> None:
    """A sequence never holds more pages than for its window and a chunk."""
    served = engine("paged")
    limits = executables("paged", 120)[0].limits
    assert limits.windows.count(WINDOW) == 3
    most, scheduler_state = 0, lambda: served._loop._state
    served.add_request("r", PROMPTS[0], GREEDY)
    while served.has_work:
        served.step()
        for seq in scheduler_state().running:
            held = [len(p.ids) for p, w in zip(seq.pages, limits.windows, strict=True) if w]
            most = max(most, *held)
    assert most <= limits.most_pages(WINDOW) == 7  # of the 14 that the sequence fills
