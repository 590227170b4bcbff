"""Many are admitted by few calls, the first by the step itself; no token depends on it."""

from __future__ import annotations

import msgspec
import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile import build_executables
from jaxinfer.exec.executor import Executor
from jaxinfer.exec.memory import init_state
from jaxinfer.exec.program import ADMIT, ADMITTED_AT_ONCE, Program
from kit.counted import Counted
from kit.engines import engine_of, run, tiny_limits, tokens
from kit.tiny_models import tiny_model

MOST = ADMITTED_AT_ONCE + 2
LIMITS = msgspec.structs.replace(
    tiny_limits(max_num_seqs=MOST, max_num_batched_tokens=64), buckets=(Bucket(MOST, 64, MOST),)
)
MODEL, PARAMS = tiny_model("llama")
PROGRAM = Program(MODEL, LIMITS, platform="gpu")
# what each asks for is read from its slot, and the penalty reads the slot's tokens as well
REQUESTS = [
    SamplingParams(max_tokens=4, seed=i, top_k=2 + i, repetition_penalty=1.5, ignore_eos=True)
    for i in range(MOST)
]
PROMPTS = [tuple(range(5 + i, 8 + 2 * i)) for i in range(MOST)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    folder = tmp_path_factory.mktemp("bundles")
    return Counted(build_executables(PROGRAM, bundle_root=folder, progress=NoProgress()))


@pytest.mark.parametrize("count, calls", [(1, 0), (2, 1), (MOST - 1, 1), (MOST, 2)])
def test_few_calls_admit_many(device: Counted, count: int, calls: int) -> None:
    engine = engine_of(Executor(PROGRAM, device.executables, PARAMS, *init_state(PROGRAM)), LIMITS)
    device.calls.clear()
    together = run(engine, PROMPTS[:count], REQUESTS[:count])
    assert device.calls[ADMIT] == calls
    alone = run(engine, PROMPTS[:count], REQUESTS[:count], together=False)
    assert device.calls[ADMIT] == calls
    assert tokens(together) == tokens(alone)
