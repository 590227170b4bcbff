"""Families with latents or an indexer are served: whatever the engine does, tokens are those of the
dense form. Contexts have several times the tokens that an indexer chooses.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.limits import Limits
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import TAPS, Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.step.points import points_named
from jaxinfer.models.base import forward
from kit.engines import compiled_for, dense_greedy, engine_of, run, tiny_limits
from kit.tiny_models import tiny_model

AT_NIGHT = ("deepseek_v2", "deepseek_v32", "axk2", "mistral_large4", "hy_v4")
FAMILIES = (
    *("deepseek_v3", "glm_moe_dsa", "minimax_m3"),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT),
)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LIMITS = replace(
    tiny_limits(max_num_seqs=3, max_num_batched_tokens=16, num_pages=60),
    buckets=(Bucket(3), Bucket(0, 16, 3), Bucket(3, 16, 3, scores=True)),
)
FEW_PAGES = 20  # of each pool, of the 37 that the prompts and their answers fill


def prompts_of(*sizes: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Prompts by first token and length; those of one first token share a beginning."""
    return tuple(tuple((7 * i * i + first) % 320 for i in range(n)) for first, n in sizes)


PROMPTS = prompts_of((1, 40), (1, 33), (5, 3))


def limits_of(name: str, num_pages: int = LIMITS.num_pages[0]) -> Limits:
    """The limits with a pool for each group of layers, as an indexer's keys have their own."""
    groups = tiny_model(name)[0].state.groups
    return replace(LIMITS, groups=groups, num_pages=(num_pages,) * len(groups))


@cache
def expected(name: str) -> list[tuple[int, ...]]:
    return dense_greedy(*tiny_model(name), PROMPTS, 12)


@cache
def executables(name: str) -> tuple[Program, Executables]:
    program = Program(tiny_model(name)[0], limits_of(name))
    return program, compiled_for(program, extras=False)


def engine(name: str, num_pages: int = LIMITS.num_pages[0]) -> Engine:
    """The scheduler has ``num_pages``; steps are compiled for the most."""
    program, compiled = executables(name)
    executor = Executor(program, compiled, tiny_model(name)[1], *init_state(program))
    return engine_of(executor, limits_of(name, num_pages))


@pytest.mark.parametrize("name", FAMILIES)
def test_batched_chunked_and_from_cached_pages(name: str) -> None:
    """Chunks of 16 tokens beside decode rows, then the same prompts from the pages of the first."""
    served = engine(name)
    for _ in range(2):
        outputs = run(served, PROMPTS, GREEDY)
        assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name)
    assert [one.num_cached_tokens for one in outputs] == [36, 32, 0]
    assert served.stats().num_live_pages == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_alone(name: str) -> None:
    outputs = run(engine(name), PROMPTS, GREEDY, together=False)
    assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_preempted(name: str) -> None:
    served = engine(name, FEW_PAGES)
    outputs = run(served, PROMPTS, GREEDY)
    assert [tuple(one.outputs[0].token_ids) for one in outputs] == expected(name)
    assert served.stats().num_preemptions > 0


def test_taps_and_steering() -> None:
    """Activations of a chunked prompt and decode rows are those of ``forward`` with that edit."""
    model, params = tiny_model("deepseek_v3")
    names, vector = ("layers.1.z", "layers.1.mlp_out"), np.linspace(-2, 2, 40, dtype=np.float32)
    limits = replace(
        LIMITS,
        points=points_named(names, model.config),
        buckets=(
            *LIMITS.buckets,
            Bucket(3, variants=(TAPS,)),
            Bucket(3, 16, 3, scores=True, variants=(TAPS,)),
        ),
    )
    program = Program(model, limits)
    executor = Executor(program, compiled_for(program, extras=False), params, *init_state(program))
    steer = [{"point": "layers.1.z", "vector": vector}]
    sampling = replace(GREEDY, taps=names, steer=steer)
    (output,) = run(engine_of(executor, limits), PROMPTS[1:2], sampling)
    answer = output.outputs[0]
    ids = jnp.asarray([*PROMPTS[1], *answer.token_ids[:-1]])
    edit = {"layers.1.z": lambda z: z + vector.reshape(z.shape[1:])}
    logits, found = jax.jit(lambda ids: forward(model, params, ids, names, edit))(ids)
    assert logits[len(PROMPTS[1]) - 1 :].argmax(-1).tolist() == answer.token_ids
    assert answer.taps is not None
    for name in names:
        np.testing.assert_allclose(answer.taps[name], found[name], atol=1e-4, err_msg=name)
