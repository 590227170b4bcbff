"""Engines over tiny random models, for tests of the code above the step.

Owns: ``tiny_engine`` and ``run``. Each executable is compiled once for all engines of a session.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from jaxinfer.core.limits import Limits
from jaxinfer.core.points import Point
from jaxinfer.core.pooling import Pooling
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import TAPS, PageGroup
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.loop.interfaces import Tiers, Weights
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.outputs import Collector, RequestOutput
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.exec.calls.extras import EXTRAS
from jaxinfer.exec.calls.score import SCORE
from jaxinfer.exec.calls.steer import STEER
from jaxinfer.exec.compile.buckets import bucket_table
from jaxinfer.exec.compile.build import Compiled, Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import Model, Params, forward
from jaxinfer.text.tokenizer import load_tokenizer
from kit.tiny_models import tiny_model
from kit.tokenizers import tiny_tokenizer_spec

MAX_PAGES = 129
EOS = 319  # beyond the tiny tokenizer's ids, so that no text ends by chance


def tiny_limits(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    num_pages: int = MAX_PAGES,
    page_size: int = 4,
    max_model_len: int = 128,
    enable_prefix_caching: bool = True,
    groups: tuple[PageGroup, ...] = (PageGroup(),),
    points: tuple[Point, ...] = (),
    pooling: str = "",
) -> Limits:
    """Small limits, so that page edges, chunks and full slots occur at once."""
    return Limits(
        num_pages=(num_pages,) * (1 + max(group.pool for group in groups)),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        buckets=bucket_table(
            max_num_seqs,
            max_num_batched_tokens,
            decode_start=2,
            prefill_start=64,
            prefill_factor=8,
            mixed_start=16,
            variants=(TAPS,) if points else (),
            pools=bool(pooling),
        ),
        enable_prefix_caching=enable_prefix_caching and pooling in ("", "last"),
        groups=groups,
        points=points,
        pooling=pooling,
    )


def tiny_executor(limits: Limits, model_name: str = "llama") -> Executor:
    """A real executor over a tiny model."""
    model, params = tiny_model(model_name)
    # a smaller pool and no prefix caching only concern the scheduler: the executables are shared
    pages = (MAX_PAGES,) * max(len(model.state.bytes_per_entry), 1)
    program = Program(model, replace(limits, num_pages=pages, enable_prefix_caching=True))
    by_name = {name: _compiled(_program_of(name, program), name) for name in program.names()}
    executables = Executables(by_name, compiled=0, workspace_bytes=0)
    return Executor(program, executables, params, *init_state(program))


def _program_of(name: str, program: Program) -> Program:
    """The program with a single executable, which many engines share."""
    of = program.names_of
    own = tuple(bucket for bucket in program.limits.buckets if name in of(bucket))[:1]
    limits = replace(program.limits, buckets=own, max_num_batched_tokens=1)
    if name != STEER.name and not any(bucket.variants for bucket in own):
        limits = replace(limits, points=())
    return Program(program.model, limits)


@cache
def _compiled(program: Program, name: str) -> Compiled:
    # LLVM's optimiser takes a third of the time; tests/e2e compiles with it, as users do
    return program.trace(name).lower().compile({"xla_backend_optimization_level": 0})


def compiled_for(program: Program, *, extras: bool, optimised: bool = True) -> Executables:
    """The executables of a program, with or without those that only extras need."""
    options = {} if optimised else {"xla_backend_optimization_level": 0}
    names = [
        name for name in program.names() if extras or not name.startswith((EXTRAS.name, SCORE.name))
    ]
    by_name = {name: program.trace(name).lower().compile(options) for name in names}
    return Executables(by_name, compiled=0, workspace_bytes=0)


def dense_greedy(
    model: Model, params: Params, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[int, ...]]:
    """Greedy tokens of the dense form, each from the logits of the whole sequence before it."""
    logits = jax.jit(lambda ids: forward(model, params, ids))
    found = []
    for prompt in prompts:
        ids = np.zeros(64, np.int32)
        ids[: len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + max_tokens):
            ids[end] = jnp.argmax(logits(ids)[end - 1])
        found.append(tuple(ids[len(prompt) : len(prompt) + max_tokens].tolist()))
    return found


def tiny_engine(
    limits: Limits | None = None,
    *,
    model_name: str = "llama",
    overlap: bool = True,
    tokenizer: bool = True,
) -> Engine:
    """An engine over a tiny model."""
    layout, limits = tiny_model(model_name)[0].state, limits or tiny_limits()
    pages = limits.num_pages[:1] * len(layout.bytes_per_entry)
    limits = replace(limits, groups=layout.groups, num_pages=pages)
    executor = tiny_executor(limits, model_name)
    name = f"tiny-{model_name}"
    return engine_of(executor, limits, name=name, overlap=overlap, tokenizer=tokenizer)


def engine_of(
    executor: Executor,
    limits: Limits,
    *,
    name: str = "tiny",
    overlap: bool = True,
    tokenizer: bool = True,
    chat_template: str = "",
    tiers: Tiers | None = None,
) -> Engine:
    """An engine over an executor of a tiny model, whose weights can be replaced.

    ``chat_template``: instead of the tiny tokenizer's.
    """
    spec = tiny_tokenizer_spec()
    if chat_template:
        spec = dataclasses.replace(spec, chat_template=chat_template)
    facts = ModelFacts(
        name=name,
        vocab_size=320,
        eos_token_ids=(EOS,),
        default_sampling=SamplingParams(),
        pooling=Pooling(limits.pooling, 32) if limits.pooling else None,
    )
    return Engine(
        executor,
        limits,
        facts,
        load_tokenizer(spec) if tokenizer else None,
        overlap=overlap,
        weights=cast("Weights", OwnWeights(executor)),
        tiers=tiers,
    )


class OwnWeights:
    """The part of ``Weights`` by which an engine replaces them, and sleeps but keeps them."""

    def __init__(self, executor: Executor) -> None:
        self.replace = executor.replace_weights

    def sleep(self, level: int) -> None:
        """Keep the weights."""

    def wake_up(self) -> bool:
        """They are there."""
        return True


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    together: bool = True,
) -> list[RequestOutput]:
    """Answer prompts, submitted together or one after the other."""
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    collectors: dict[str, Collector] = {}
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        name = f"r{number}"
        points = engine.limits.points
        collectors[name] = Collector(name, Prompt(None, tuple(prompt)), one, points)
        engine.add_request(name, RequestSpec(prompt, one))
        if not together:
            drain(engine, collectors)
    drain(engine, collectors)
    return [collector.output for collector in collectors.values()]


def drain(engine: Engine, collectors: dict[str, Collector]) -> None:
    """Step until the engine has no work."""
    while engine.has_work:
        for delta in engine.step().deltas:
            assert not delta.error, delta.error
            collectors[delta.request_id].add(delta)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of every completion of every request."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def copy_to_cpu(*pairs: tuple[int, np.ndarray]) -> None:
    """Copy arrays to addresses in a CPU's memory, as the driver copies to a GPU's."""
    for address, array in pairs:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
