"""The same requests alone and in company: their tokens and logprobs, bit by bit.

Owns: tiny models whose sizes the kernels with fixed bits take, and engines over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.outputs import RequestOutput
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import Model
from jaxinfer.models.registry import build_model
from kit.engines import compiled_for, engine_of, run, tiny_limits
from kit.tiny_models import VOCAB_SIZE, random_params, tiny_config
from pallas_kernels.harness.pins import Pins, invariant_pins

# heads and experts of a multiple of 16 components, as those of real models have
SIZES = MappingProxyType(
    {
        "llama": {"hidden_size": 64, "intermediate_size": 112},
        "mistral": {"hidden_size": 64},
        "gpt2": {"n_embd": 64},
        "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
        "deepseek_v2": {"hidden_size": 64, "moe_intermediate_size": 32},
        "glm_moe_dsa": {"hidden_size": 64, "moe_intermediate_size": 32},
        "minimax_m3": {
            **{"hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 48},
            "shared_intermediate_size": 32,
        },
        "qwen3_5": {"hidden_size": 64, "linear_value_head_dim": 16},
    }
)
LENGTHS = (1, 5, 17, 70, 23, 40, 9, 64)  # of prompts, without what half of them share
SEEDED = SamplingParams(
    temperature=0.8, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=3
)
FIXED = invariant_pins("cpu")


def prompts() -> list[list[int]]:
    """Prompts of which every second one begins as the others of these do."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCAB_SIZE - 2, 48).tolist()
    own = [rng.integers(0, VOCAB_SIZE - 2, length).tolist() for length in LENGTHS]
    return [shared[: 2 * len(one)] + one if i % 2 else one for i, one in enumerate(own)]


@cache
def model_of(name: str) -> Model:
    """A tiny model in the sizes of this file."""
    return build_model(tiny_config(name) | SIZES[name], "float32")


@cache
def _parts(name: str, pins: Pins, chunk: int) -> tuple[Program, Executables, Any]:
    model = model_of(name)
    layout = model.state
    limits = tiny_limits(
        max_num_seqs=8,
        max_num_batched_tokens=max(chunk, layout.align),
        num_pages=105,
        page_size=16,
        max_model_len=192,
    )
    limits = replace(
        limits,
        groups=layout.groups,
        align=layout.align,
        num_pages=limits.num_pages[:1] * len(layout.bytes_per_entry),
        num_snapshots=16 if layout.bytes_per_slot else 0,
    )
    program = Program(model, limits, "cpu", pins)
    return program, compiled_for(program, extras=True), random_params(model)


def engine(
    name: str,
    pins: Pins = FIXED,
    *,
    chunk: int = 128,
    reuses: bool = False,
    num_pages: int | None = None,
) -> Engine:
    """An engine whose chunks have at most so many tokens."""
    program, executables, params = _parts(name, pins, chunk)
    pages = num_pages or program.limits.num_pages[0]
    limits = replace(
        program.limits,
        enable_prefix_caching=reuses,
        num_snapshots=program.limits.num_snapshots if reuses else 0,
        num_pages=(pages,) * len(program.limits.num_pages),
    )
    executor = Executor(program, executables, params, *init_state(program))
    return engine_of(executor, limits, name=f"tiny-{name}", tokenizer=False)


class Answer(NamedTuple):
    """An answer with its logprobs, which are equal only if all bits are."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    of_prompt: tuple[tuple[tuple[int, float], ...] | None, ...]
    num_cached: int


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """The single answers of requests."""

    def plain(logprobs: Any) -> tuple[Any, ...]:
        return tuple(
            None if step is None else tuple(sorted((t, one.logprob) for t, one in step.items()))
            for step in logprobs or ()
        )

    return [
        Answer(
            tuple(output.outputs[0].token_ids),
            plain(output.outputs[0].logprobs),
            plain(output.prompt_logprobs),
            output.num_cached_tokens or 0,
        )
        for output in outputs
    ]


def ask(
    engine: Engine,
    some: Sequence[Sequence[int]],
    sampling: SamplingParams = SEEDED,
    *,
    together: bool = True,
) -> list[Answer]:
    """The answers of an engine to prompts."""
    return answers(run(engine, some, sampling, together=together))


def different(found: Sequence[Answer], expected: Sequence[Answer]) -> list[int]:
    """The numbers of the answers that differ in any bit."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [i for i, (a, b) in pairs if a[:3] != b[:3]]
