"""Requests with extras are admitted by few calls, others by none; no token depends on it."""

from __future__ import annotations

import msgspec
import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.calls.admit import ADMIT, ROWS
from jaxinfer.exec.compile.build import build_executables
from jaxinfer.exec.compile.memory_plan import program_memory
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from kit.counted import Counted
from kit.engines import engine_of, run, tiny_limits, tokens
from kit.tiny_models import tiny_model

MOST = ROWS + 1
LIMITS = msgspec.structs.replace(
    tiny_limits(max_num_seqs=MOST, max_num_batched_tokens=64),
    buckets=(Bucket(MOST), Bucket(0, 64, MOST), Bucket(MOST, 64, MOST, scores=True)),
)
MODEL, PARAMS = tiny_model("llama")
PROGRAM = Program(MODEL, LIMITS, platform="gpu")
# settings are read from the slot, and the penalty reads the slot's tokens as well
REQUESTS = [
    SamplingParams(max_tokens=4, seed=i, top_k=2 + i, repetition_penalty=1.5, ignore_eos=True)
    for i in range(MOST)
]
PLAIN = [
    SamplingParams(max_tokens=4, seed=2**63 - 1 - i, temperature=1 + i, top_k=2 + i, top_p=0.9)
    for i in range(MOST)
]
PROMPTS = [tuple(range(5 + i, 8 + 2 * i)) for i in range(MOST)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    store = Store.of(PROGRAM, program_memory(PROGRAM, None), tmp_path_factory.mktemp("store"))
    return Counted(build_executables(store, NoProgress()))


def engine_on(device: Counted) -> Engine:
    return engine_of(
        Executor(PROGRAM, device.executables, PARAMS, *init_state(PROGRAM)),
        LIMITS,
    )


@pytest.mark.parametrize("count, calls", [(1, 1), (MOST - 1, 1), (MOST, 2)])
def test_few_calls_admit_many(device: Counted, count: int, calls: int) -> None:
    engine = engine_on(device)
    device.calls.clear()
    together = run(engine, PROMPTS[:count], REQUESTS[:count])
    assert device.calls[ADMIT.name] == calls
    alone = run(engine, PROMPTS[:count], REQUESTS[:count], together=False)
    assert device.calls[ADMIT.name] == calls + count
    assert tokens(together) == tokens(alone)


def test_settings_need_no_call(device: Counted) -> None:
    engine = engine_on(device)
    device.calls.clear()
    alone = run(engine, PROMPTS, PLAIN, together=False)
    together = run(engine, PROMPTS, PLAIN)
    assert tokens(together) == tokens(alone)
    assert not device.calls[ADMIT.name]
    assert tokens(together) != tokens(run(engine, PROMPTS, PLAIN[::-1])), "settings matter"


def test_extras_of_a_slot_s_last_request_have_no_effect(device: Counted) -> None:
    """The request is drawn together with one that has extras."""
    extras = SamplingParams(max_tokens=4, logit_bias={7: 100.0}, presence_penalty=2.0)
    params = [SamplingParams(max_tokens=4, temperature=0), extras]
    alone = run(engine_on(device), PROMPTS[:2], params, together=False)
    engine = engine_on(device)
    run(engine, PROMPTS[:2], [extras, extras])
    assert tokens(run(engine, PROMPTS[:2], params)) == tokens(alone)
