"""Layer state in tiers, through the whole engine: pools so small that every prefix is evicted.

The tokens are those of an engine without tiers, for every kind of layer state: a prefix that comes
back from a tier is the one that was computed, bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.connector import Connector, Forms
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.core.tiers import CostModel, SaveAhead
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.start.tiers import fitted_costs
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.tiers import device_mover as device_module
from jaxinfer.exec.tiers.chain import Chain
from jaxinfer.exec.tiers.device_mover import DeviceMover
from jaxinfer.exec.tiers.disk import UNITS, DiskTier
from jaxinfer.exec.tiers.disk_folder import opened
from jaxinfer.exec.tiers.guarded import Guarded
from jaxinfer.exec.tiers.host import HostTier
from jaxinfer.exec.tiers.mover import ArrayMover, PageMover, forms_of
from jaxinfer.exec.tiers.runner import TierRunner, policy_of
from kit.copy_streams import LateStream, allocate
from kit.engines import compiled_for, engine_of, run, tiny_limits, tokens
from kit.tiny_models import VOCAB_SIZE, tiny_model
from kit.unit_calls import ArrayCalls

# all kinds of layer state: K and V; windows; latents; states of the delta rule beside K and V
NAMES = ("llama", "gemma3", "deepseek_v3", "qwen3_5", "qwen3_5/fp8")
LENGTH, TURN, ANSWER = 150, 20, 6
LONGEST = LENGTH + TURN + 2 * ANSWER
DRAWN = SamplingParams(max_tokens=ANSWER, temperature=1.0, seed=5, ignore_eos=True)
RESTORES = CostModel(token_seconds=1.0)  # of this model it always takes less time
COMPUTES = CostModel(token_seconds=1e-9, bytes_per_second=1.0)
PLENTY = 1 << 26

type Make = Callable[[Forms], Connector]


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 2, length).tolist()


@cache
def executables(name: str) -> tuple[Program, Executables]:
    model, _ = tiny_model(name)
    has_state = model.state.bytes_per_slot > 0
    limits = replace(
        tiny_limits(max_num_seqs=2, max_num_batched_tokens=128, max_model_len=200),
        num_pages=(400,) * len(model.state.bytes_per_entry),
        buckets=(Bucket(2), Bucket(2, 128, 2, scores=True)),
        groups=model.state.groups,
        num_snapshots=12 if has_state else 0,
        align=model.state.align,
    )
    program = Program(model, limits)
    return program, compiled_for(program, extras=False, optimised=False)


class Served(NamedTuple):
    """An engine, and its executor."""

    engine: Engine
    executor: Executor

    def answer(self, prompt: list[int]) -> tuple[list[int], np.ndarray, int]:
        """The tokens, the logits of the last one (of all slots), and the number of reused ones."""
        (output,) = run(self.engine, [prompt], DRAWN)
        logits = np.asarray(self.executor.arrays.slots.drawn_from)[:-1]
        return output.outputs[0].token_ids, logits, output.num_cached_tokens


def array_mover(program: Program, executor: Executor) -> PageMover:
    return ArrayMover(program, executor.arrays)


def device_mover(program: Program, executor: Executor) -> DeviceMover:
    """A GPU's mover, with streams whose copies end late."""
    return DeviceMover(program, executor.arrays, (LateStream(), LateStream()), allocate, ArrayCalls)


def served(
    name: str,
    make: Make | None = None,
    cost: CostModel = RESTORES,
    mover_of: Callable[[Program, Executor], PageMover] = array_mover,
    *,
    offloads: bool = False,
    chunk: int = 128,
    num_snapshots: int = 2,
    ahead: SaveAhead | None = None,
) -> Served:
    """An engine with few pages and the connector that ``make`` returns, or one with many pages.

    With smaller chunks of prompts a sequence needs fewer pages of windows at once.
    """
    program, compiled = executables(name)
    executor = Executor(program, compiled, tiny_model(name)[1], *init_state(program))
    if make is None:
        return Served(engine_of(executor, program.limits), executor)
    mover = mover_of(program, executor)
    policy = replace(policy_of(mover.forms, program.limits, cost, offloads=offloads), ahead=ahead)
    tiers = TierRunner(mover, make(mover.forms), policy)
    limits = replace(program.limits, max_num_batched_tokens=chunk)
    limits = replace(  # executables are for more pages than the scheduler uses
        limits,
        num_pages=tuple(1 + n for n in limits.pages_needed(LONGEST)),
        num_snapshots=min(num_snapshots, limits.num_snapshots),
    )
    return Served(engine_of(executor, limits, tiers=tiers), executor)


def disk_in(folder: Path) -> Make:
    """A disk tier behind a host tier."""

    def make(forms: Forms) -> Connector:
        lower = DiskTier(folder, PLENTY, forms, opened(folder, {"model": "tiny"}))
        return Chain(HostTier(PLENTY, forms), lower)

    return make


def host(forms: Forms) -> Connector:
    return HostTier(PLENTY, forms)


def conversations(one: Served, seeds: tuple[int, ...]) -> list[tuple[list[int], np.ndarray, int]]:
    """Conversations of two turns, first all first turns: what ``answer`` returns for each."""
    first = [(prompt_of(seed), one.answer(prompt_of(seed))) for seed in seeds]
    second = [[*prompt, *found[0], *prompt_of(90, TURN)] for prompt, found in first]
    return [found for _, found in first] + [one.answer(prompt) for prompt in second]


def check_equal(one: Served, other: Served, seeds: tuple[int, ...] = (1, 2, 3)) -> list[int]:
    """Both give the same tokens and logits, bit for bit; returns what the second turns reuse."""
    pairs = list(zip(conversations(one, seeds), conversations(other, seeds), strict=True))
    for found, expected in pairs:
        assert found[0] == expected[0] and found[2] == expected[2], (found, expected)
        np.testing.assert_array_equal(found[1], expected[1])
    return [found[2] for found, _ in pairs[len(seeds) :]]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_from_the_host_equals_one_on_the_device(name: str) -> None:
    one = served(name, host)
    assert min(check_equal(one, served(name))) >= 128
    stats = one.engine.stats().tiers
    assert stats.num_restored > 0 == stats.num_failed


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_through_a_gpus_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few units, so that a load takes more than the ring has."""
    page = max(forms_of(executables(name)[0])[0].num_bytes, 1)
    monkeypatch.setattr(device_module, "TIER_BLOCK_BYTES", 2 * page)
    one = served(name, host, mover_of=device_mover)
    assert min(check_equal(one, served(name))) >= 128
    stats = one.engine.stats().tiers
    assert stats.num_restored > 0 == stats.num_failed
    one.engine.sleep()
    one.engine.wake_up()
    assert one.answer(prompt_of(1))[2] >= 128
    one.engine.close()


def test_units_that_are_neighbours_in_host_memory_are_loaded_by_one_copy() -> None:
    """A prefix is saved with its last page first, so its addresses descend."""
    loads = LateStream()

    def mover_of(program: Program, executor: Executor) -> DeviceMover:
        return DeviceMover(program, executor.arrays, (LateStream(), loads), allocate, ArrayCalls)

    one = served("llama", host, mover_of=mover_of)
    first, _, again = (one.answer(prompt_of(seed)) for seed in (1, 2, 1))
    assert again[0] == first[0] and again[2] == 148
    assert one.engine.stats().tiers.num_restored >= 30 and loads.num_copies <= 3


def test_a_gpus_loads_next_to_others_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "TIER_BLOCK_BYTES", 4096)
    one, expected = served("llama", host, mover_of=device_mover), served("llama")
    prompts = [prompt_of(seed, length) for seed, length in ((1, 150), (2, 90), (3, 120), (4, 40))]
    for prompt in prompts:
        one.answer(prompt)
    for _ in range(3):
        found = [output.outputs[0].token_ids for output in run(one.engine, prompts, DRAWN)]
        assert found == [expected.answer(prompt)[0] for prompt in prompts]
    assert one.engine.stats().tiers.num_restored > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_from_the_disk_equals_one_on_the_device(name: str, tmp_path: Path) -> None:
    """The first turns are of an engine that has ended."""
    one, expected = served(name, disk_in(tmp_path)), served(name)
    first = [(prompt_of(seed), one.answer(prompt_of(seed))[0]) for seed in (1, 2, 3, 4)]
    one.engine.close()
    one = served(name, disk_in(tmp_path))
    assert [expected.answer(prompt)[0] for prompt, _ in first] == [answer for _, answer in first]
    for prompt, answer in first[:2]:  # the last ones had not left the device
        prompt = [*prompt, *answer, *prompt_of(90, TURN)]
        (tokens, logits, reused), wanted = one.answer(prompt), expected.answer(prompt)
        assert (tokens, reused) == (wanted[0], wanted[2]) and reused >= 128
        np.testing.assert_array_equal(logits, wanted[1])
    stats = one.engine.stats().tiers
    assert stats.num_restored > 0 == stats.num_failed
    one.engine.close()


def test_a_damaged_page_is_computed_again_and_counted(tmp_path: Path) -> None:
    one, expected = served("llama", disk_in(tmp_path)), served("llama")
    for seed in (1, 2):
        one.answer(prompt_of(seed))
    one.engine.close()
    one = served("llama", disk_in(tmp_path))
    for path in (tmp_path / UNITS).glob("??/*"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    tokens, _, reused = one.answer(prompt_of(1))
    assert tokens == expected.answer(prompt_of(1))[0] and not reused
    assert one.engine.stats().tiers.num_failed > 0 == one.engine.stats().tiers.num_restored
    one.engine.close()


@pytest.mark.parametrize("method", ["match", "save", "load", "poll", "finished"])
def test_a_store_that_fails_ends_no_request(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise ConnectionError("the store is gone")

    store = HostTier(PLENTY, forms_of(executables("llama")[0]))
    one = served("llama", lambda forms: Chain(HostTier(1 << 15, forms), Guarded(store, "own.py:f")))
    expected = served("llama")
    for seed in (1, 2, 3):
        one.answer(prompt_of(seed))
    assert one.answer(prompt_of(1))[2] >= 128
    monkeypatch.setattr(store, method, gone)
    for seed in (2, 3, 4, 1):
        assert one.answer(prompt_of(seed))[0] == expected.answer(prompt_of(seed))[0]


def test_copies_that_take_longer_than_computing_are_not_made() -> None:
    one = served("llama", host, COMPUTES)
    assert [found[2] for found in conversations(one, (1, 2, 3))][3:] == [0, 0, 0]
    stats = one.engine.stats().tiers
    assert stats.num_saved > 0 == stats.num_restored


def test_many_requests_at_once_restore_while_others_decode() -> None:
    """A long conversation that waits for its prefix, next to others: all tokens are the same."""
    one, expected = served("llama", host), served("llama")
    prompts = [prompt_of(seed, length) for seed, length in ((1, 150), (2, 90), (3, 120), (4, 40))]
    for prompt in prompts:
        one.answer(prompt)
    for _ in range(2):
        found = [output.outputs[0].token_ids for output in run(one.engine, prompts, DRAWN)]
        assert found == [expected.answer(prompt)[0] for prompt in prompts]
    assert one.engine.stats().tiers.num_restored > 0


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
@pytest.mark.parametrize("name", NAMES)
def test_ten_times_as_many_tokens_as_the_pool_holds(name: str, preemption: str) -> None:
    """All requests arrive at once; their tokens are those of an engine in which each is alone.

    Computing takes less time than restoring, so nothing is restored but what is offloaded.
    """
    offloads = preemption == "offload"
    chunk = max(16, executables(name)[0].limits.align)
    one = served(name, host, COMPUTES, offloads=offloads, chunk=chunk, num_snapshots=12)
    prompts = [prompt_of(seed, 10 + 7 * (seed % 5)) for seed in range(12)]
    drawn = [
        replace(DRAWN, seed=seed, max_tokens=LONGEST - len(prompt))
        for seed, prompt in enumerate(prompts)
    ]
    limits = one.engine.limits
    needed = sum(limits.pages_needed(LONGEST)) * len(prompts)
    assert needed >= 10 * sum(limits.num_pages)
    found = run(one.engine, prompts, drawn)
    assert tokens(found) == tokens(run(served(name).engine, prompts, drawn, together=False))
    stats = one.engine.stats()
    assert stats.num_preemptions > 3
    assert (stats.tiers.num_restored > 0) == offloads
    assert stats.tiers.num_failed == 0


def test_reset_prefix_cache_empties_all_tiers(tmp_path: Path) -> None:
    one = served("llama", disk_in(tmp_path))
    for seed in (1, 2, 3):
        one.answer(prompt_of(seed))
    assert one.engine.stats().tiers.num_saved > 0
    one.engine.reset_prefix_cache()
    assert one.answer(prompt_of(1))[2] == 0
    one.engine.close()
    assert one.engine.stats().tiers.num_restored == 0


@pytest.mark.parametrize("keeps", [True, False], ids=["sleep", "new weights"])
def test_tiers_outlive_sleep_but_not_weights(keeps: bool, tmp_path: Path) -> None:
    """What is saved with new weights is not read by an engine of the first ones."""
    one = served("llama", disk_in(tmp_path))
    before = [one.answer(prompt_of(seed))[0] for seed in (1, 2, 3)]
    if keeps:
        one.engine.sleep()
        one.engine.wake_up()
    else:
        one.engine.replace_weights(jax.tree.map(lambda leaf: leaf * 2, tiny_model("llama")[1]))
    found = [one.answer(prompt_of(seed)) for seed in (1, 2, 3)]
    # the last one had not left the device
    assert [reused >= 128 for _, _, reused in found] == [keeps, keeps, False]
    assert ([tokens for tokens, _, _ in found] == before) == keeps
    one.engine.close()
    later = served("llama", disk_in(tmp_path))
    again = [later.answer(prompt_of(seed)) for seed in (1, 2, 3)]
    assert [tokens for tokens, _, _ in again] == before
    later.engine.close()


def test_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "TIER_BLOCK_BYTES", 4096)
    one = served("llama")
    cost = fitted_costs(one.executor, ArrayMover(executables("llama")[0], one.executor.arrays))
    assert cost.token_seconds > 0 <= cost.step_seconds
    assert 1e3 < cost.bytes_per_second < 1e13
    cost = fitted_costs(one.executor, device_mover(executables("llama")[0], one.executor))
    assert 1e3 < cost.bytes_per_second < 1e13


@pytest.mark.parametrize("mover", [array_mover, device_mover])
def test_an_idle_engine_saves_all_pages_and_then_waits(
    mover: Callable[[Program, Executor], PageMover],
) -> None:
    """Without a further request: then the next prompt finds them saved."""
    ahead = SaveAhead(most_bytes=4 * forms_of(executables("llama")[0])[0].num_bytes)
    one, expected = served("llama", host, mover_of=mover, ahead=ahead), served("llama")
    prompts = [prompt_of(seed) for seed in (1, 2)]

    async def answer(client: EngineClient, prompt: list[int]) -> tuple[list[int], int]:
        stream = client.open(RequestSpec(tuple(prompt), DRAWN))
        found, reused = list[int](), 0
        while deltas := await stream.read():
            for delta in deltas:
                found, reused = [*found, *delta.token_ids], delta.num_cached_tokens
        return found, reused

    async def answered() -> list[tuple[list[int], int]]:
        client = EngineClient(EngineThread(one.engine))
        first = [await answer(client, prompts[0])]
        num_pages = (LENGTH + ANSWER - 1) // one.engine.limits.page_size
        async with asyncio.timeout(20):
            while one.engine.stats().tiers.num_saved < num_pages or one.engine.saves_ahead:
                await asyncio.sleep(0.001)
        assert (
            one.engine.stats().tiers.num_saved == num_pages == one.engine.stats().num_cached_pages
        )
        assert not one.engine.has_work
        idle = one.engine.stats().num_iterations
        await asyncio.sleep(0.05)
        assert one.engine.stats().num_iterations == idle, "it waits for a command"
        found = [*first, *[await answer(client, prompt) for prompt in (prompts[1], prompts[0])]]
        await client.shutdown()
        return found

    found = asyncio.run(answered())
    assert [own for own, _ in found] == [expected.answer(p)[0] for p in (*prompts, prompts[0])]
    assert found[2][1] >= 128
