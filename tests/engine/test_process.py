"""The engine in a process of its own: same answers, and neither process outlives the other."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import (
    ConfigError,
    EngineError,
    JaxinferError,
    RequestError,
    SourceError,
)
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine import process
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.client import EngineClient
from jaxinfer.engine.news import News
from jaxinfer.engine.outputs import Collector, RequestOutput, SequenceTimes
from jaxinfer.engine.process import EngineFacts, EngineProcess
from jaxinfer.engine.prompts import Prompt
from jaxinfer.engine.spawn import spawn
from jaxinfer.models import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.engines import run, tokens
from kit.sim_executor import SIM_PROGRAM, SimExecutor, sim_config
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json

PROMPTS = [tuple(range(3 + i, 12 + i)) for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
SIM_STEP = 0.002  # seconds

type Scenario = Callable[[EngineClient], Coroutine[Any, Any, None]]
type Running = tuple[EngineProcess, EngineFacts]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model on disk, with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    hf_config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE, eos_token_id=257)
    write_hf_folder(folder, hf_config, random_hf_tensors(build_model(hf_config, "float32")))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        decode_bucket_start=4,
        prefill_bucket_start=64,
        max_model_len=256,
        num_pages=65,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )


@contextmanager
def sim_process(**script: Any) -> Generator[Running]:
    """A process with a simulated engine of 64 slots."""
    executor = SimExecutor(SIM_STEP, **script)
    link = EngineProcess.start(sim_config(64, executor), spawn(SIM_PROGRAM))
    try:
        yield link, link.ready()
    finally:
        link.stop()


def talk(running: Running, scenario: Scenario) -> None:
    """Run a scenario with a client; the engine is ended with it."""
    link, facts = running

    async def main() -> None:
        client = EngineClient(link, facts.limits, facts.facts, facts.tokenizer, stats=facts.stats)
        try:
            await asyncio.wait_for(scenario(client), 60)
        finally:
            await client.shutdown()

    asyncio.run(main())


async def answer(
    client: EngineClient, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY
) -> RequestOutput:
    stream = client.open(prompt, sampling)
    collector = Collector("r", Prompt(None, prompt), sampling)
    try:
        while deltas := await stream.read():
            for delta in deltas:
                collector.add(delta)
    finally:
        stream.close()
    assert collector.output.finished
    return collector.output


def gone(pid: int) -> bool:
    """Whether no such process runs (a zombie that nobody has waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(true: Callable[[], bool], seconds: float) -> float:
    """How long it took; fails when it took longer than ``seconds``."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds
        time.sleep(0.01)
    return time.monotonic() - start


CASES = {
    "greedy": GREEDY,
    "seeded pair": replace(GREEDY, n=2, temperature=1.0, seed=7),
    "logprobs": replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "bias": replace(GREEDY, logit_bias={65: 50.0, 66: 50.5}),
    "stop string": replace(GREEDY, logit_bias={97: 100.0}, stop=("aaa",)),
    "stop id": replace(GREEDY, logit_bias={65: 100.0}, stop_token_ids=(65,)),
    "no text": replace(GREEDY, detokenize=False),
}


def test_answers_equal_those_of_the_engine_in_this_process(config: EngineConfig) -> None:
    engine = build_engine(config)
    expected = {
        name: run(engine, PROMPTS, case, together=False)  # rows share a step's rounding
        for name, case in CASES.items()
    }
    assert expected["stop string"][0].outputs[0].stop_reason == "aaa"
    assert expected["logprobs"][0].prompt_logprobs
    link = EngineProcess.start(config, spawn())
    told = link.ready()
    assert (told.facts, told.limits) == (engine.facts, engine.limits)
    assert told.stats.num_executables == 5 and told.tokenizer is not None
    assert told.tokenizer.decode(PROMPTS[-1]) == "".join(map(chr, PROMPTS[-1]))

    async def scenario(client: EngineClient) -> None:
        for name, case in CASES.items():
            for prompt, other in zip(PROMPTS, expected[name], strict=True):
                one = await answer(client, prompt, case)
                assert one.outputs == other.outputs, name
                assert one.prompt_logprobs == other.prompt_logprobs, name
        together = await asyncio.gather(*(answer(client, prompt) for prompt in PROMPTS))
        assert tokens(list(together)) == tokens(expected["greedy"])
        with pytest.raises(RequestError, match="vocabulary"):
            await answer(client, (1, 2, 99999))
        with pytest.raises(RequestError, match="UTF-8"):
            client.open((1,), GREEDY, cache_salt="\ud800")
        assert client.num_open == 0 and await client.responds(5)
        assert client.stats.num_late_compiles == 0
        assert client.stats.num_live_pages == 0

    talk((link, told), scenario)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"model": "nowhere"}, SourceError, "nowhere"),
        ({"max_model_len": 9999}, ConfigError, "beyond the model's 256 positions"),
        ({"num_pages": 1, "max_model_len": 200}, ConfigError, "num_pages"),
        ({"tokenizer": "nowhere.json"}, JaxinferError, "nowhere.json"),
    ],
    ids=["model", "context", "pages", "tokenizer"],
)
def test_build_errors_come_as_they_are(
    config: EngineConfig,
    changes: dict[str, Any],
    kind: type[JaxinferError],
    match: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = dataclasses.replace(config, **changes)
    with pytest.raises(JaxinferError) as expected:
        build_engine(broken)
    link = EngineProcess.start(broken, spawn())
    with pytest.raises(kind, match=match) as found:
        link.ready()
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
    assert not capfd.readouterr().err
    assert gone(link.pid) and not link.alive


def test_a_process_that_ends_while_it_starts(config: EngineConfig) -> None:
    link = EngineProcess.start(config, spawn((sys.executable, "-c", "raise SystemExit(3)")))
    with pytest.raises(EngineError, match="exited with code 3 while it was starting"):
        link.ready()


# tells what it has imported, with a look at the real start: JAX, then the order, then the rest
IMPORTING = """
import sys
from jaxinfer.engine import child

def load(settings):
    def told():
        heavy = sorted({"jax", "flax", "jaxinfer.engine.build", "orbax"} & set(sys.modules))
        print("before the order:", *heavy, file=sys.stderr, flush=True)
        return settings()

    return child.load_planner(told)

child.main(load)
"""


def test_jax_is_imported_before_anybody_says_what_to_build(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    with spawn((sys.executable, "-c", IMPORTING)) as spawned:
        told = ""

        def has_told() -> bool:
            nonlocal told
            told += capfd.readouterr().err
            return told.endswith("\n")

        wait_until(has_told, 30)
        assert told == "before the order: jax\n"
        link = EngineProcess.start(config, spawned)
        assert link.ready().facts.vocab_size == TINY_VOCAB_SIZE
        link.stop()


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["start", "import"])
def test_a_process_that_nobody_tells_what_to_build(seconds: float) -> None:
    with spawn() as left:
        time.sleep(seconds)
        left.end.close()  # as when the server's process has gone
        left.process.wait(5)
        assert left.process.returncode == -signal.SIGKILL
    with spawn() as given_up:
        time.sleep(seconds)
    assert given_up.process.returncode == -signal.SIGKILL


def test_a_process_that_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(client: EngineClient) -> None:
        streams = [client.open(prompt, LONG) for prompt in PROMPTS]
        done = await answer(client, (1, 2, 3))
        assert done.finished
        await streams[0].read()
        os.kill(link.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineError, match="killed by SIGKILL.*out of memory"):
                while await stream.read():
                    pass
            stream.close()
        assert not client.alive and not await client.responds(1)
        with pytest.raises(EngineError, match="SIGKILL"):
            client.open((1, 2), GREEDY)

    with sim_process() as (link, facts):
        talk((link, facts), scenario)
    assert capfd.readouterr().err.count("killed by SIGKILL") == 1  # though all may be idle


@pytest.mark.parametrize(
    ("script", "match", "alive"),
    [
        ({"fail_at": 20}, "step 20 failed: injected", True),
        ({"lose_at": 20}, "the engine stopped: the device is lost", False),
    ],
    ids=["one step", "the device"],
)
def test_a_step_that_fails(script: dict[str, int], match: str, alive: bool) -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.open((1, 2, 3), LONG)
        with pytest.raises(EngineError, match=match):
            while await stream.read():
                pass
        stream.close()
        assert await client.responds(5) is alive
        if alive:
            assert (await answer(client, (1, 2, 3))).finished
        else:
            with pytest.raises(EngineError, match=match):
                client.open((1, 2), GREEDY)

    with sim_process(**script) as running:
        talk(running, scenario)


def test_a_stop_refuses_what_is_open() -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.open((1, 2, 3), LONG)
        await stream.read()
        start = time.monotonic()
        await client.shutdown()
        assert time.monotonic() - start < 5
        with pytest.raises(EngineError, match="was shut down"):
            while await stream.read():
                pass
        with pytest.raises(EngineError, match="is shut down"):
            client.open((1, 2), GREEDY)

    with sim_process() as (link, facts):
        talk((link, facts), scenario)
        assert gone(link.pid) and not link.alive


def test_a_stop_of_a_process_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.open((1, 2, 3), LONG)
        await stream.read()
        os.kill(link.pid, signal.SIGSTOP)
        assert not await client.responds(0.1)
        await client.shutdown()
        with pytest.raises(EngineError, match="SIGKILL"):
            while await stream.read():
                pass

    monkeypatch.setattr(process, "STOP_SECONDS", 0.3)
    with sim_process() as (link, facts):
        talk((link, facts), scenario)
        assert gone(link.pid)
    assert "did not end in 0.3 s and is killed" in capfd.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.9, 2.5], ids=["start", "import", "jax", "compile"])
def test_a_stop_while_it_is_built(
    config: EngineConfig, seconds: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = EngineProcess.start(dataclasses.replace(config, cache_dir=str(tmp_path)), spawn())
    time.sleep(seconds)
    link.stop()
    assert gone(link.pid) and not link.alive
    assert not capfd.readouterr().err


def test_signals_are_for_the_server() -> None:
    async def scenario(client: EngineClient) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(link.pid, number)
        assert (await answer(client, (1, 2, 3))).finished

    with sim_process() as (link, facts):
        assert os.getpgid(link.pid) != os.getpgid(0)  # nor does the terminal's Ctrl-C reach it
        talk((link, facts), scenario)


def test_early_leavers_free_their_pages() -> None:
    async def scenario(client: EngineClient) -> None:
        streams = [client.open((1, 2, 3), LONG) for _ in range(32)]
        await streams[-1].read()
        assert client.stats.num_live_pages > 0
        for stream in streams:
            stream.close()
        await answer(client, (1, 2, 3))
        assert client.stats.num_live_pages == 0
        assert not link._open  # pyright: ignore[reportPrivateUsage]

    with sim_process() as (link, facts):
        talk((link, facts), scenario)


class SlowListener:
    """Takes no news until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.times: list[SequenceTimes] = []

    def news(self, news: News) -> None:
        self.go.wait()
        self.times += [delta.times for delta in news.deltas if delta.times is not None]

    def refuse(self, request_id: str, error: JaxinferError) -> None:
        raise AssertionError(error)

    def pong(self) -> None: ...


def test_a_server_that_does_not_read_delays_no_step() -> None:
    listener = SlowListener()
    with sim_process() as (link, _):
        link.connect(listener)
        sampling = replace(LONG, max_tokens=200)
        for number in range(64):  # more news than fits a socket's buffer
            link.submit(str(number), (1, 2, 3), sampling)
        time.sleep(1.5)
        woken = time.monotonic()
        listener.go.set()
        wait_until(lambda: len(listener.times) == 64, 5)
    assert max(times.finished for times in listener.times) < woken


PARENT = """
import sys, time
from jaxinfer.core.config import EngineConfig
from jaxinfer.engine.client import EngineClient
from jaxinfer.engine.process import EngineProcess
from jaxinfer.engine.spawn import spawn
import msgspec
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
link = EngineProcess.start(config, spawn())
print(link.pid, flush=True)
if sys.argv[2] == "ready":
    link.ready()
    assert not {"jax", "flax"} & set(sys.modules)
    print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["ready", "building"])
def test_a_server_that_is_killed_takes_the_engine_along(
    config: EngineConfig, moment: str, tmp_path: Path
) -> None:

    if moment == "building":
        config = dataclasses.replace(config, cache_dir=str(tmp_path))  # compiles
    argument = msgspec.json.encode(config).decode()
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, argument, moment], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if moment == "ready":
            assert parent.stdout.readline() == "ready\n"
        else:
            time.sleep(2.5)
        assert not gone(pid)
        parent.kill()
        wait_until(lambda: gone(pid), 2)


@pytest.mark.parametrize("given", [None, "glibc.malloc.check=0"], ids=["open", "given"])
def test_the_engine_s_process_asks_for_huge_pages(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    tell = "import os, sys; os.write(int(sys.argv[1]), os.environ['GLIBC_TUNABLES'].encode())"
    with spawn((sys.executable, "-c", tell)) as spawned:
        assert spawned.end.recv(100).decode() == (given or "glibc.malloc.hugetlb=1")
