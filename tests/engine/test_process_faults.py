"""A process with a simulated engine is killed, fails, hangs, is stopped, or is not read."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.link import process
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.process import EngineProcess
from jaxinfer.engine.link.spawn import spawn
from jaxinfer.engine.link.wire import Answer, Submission
from jaxinfer.engine.requests.news import News
from jaxinfer.engine.requests.outputs import SequenceTimes
from kit.engine_process import GREEDY, PROMPTS, answer, talk
from kit.server_process import gone, wait_until
from kit.sim_executor import SIM_PROGRAM, SimExecutor, sim_config

LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
SIM_STEP = 0.002  # seconds


@contextmanager
def sim_process(**script: Any) -> Generator[EngineProcess]:
    """A process with a simulated engine of 64 slots."""
    executor = SimExecutor(SIM_STEP, **script)
    link = EngineProcess(sim_config(64, executor), spawn(SIM_PROGRAM))
    try:
        yield link.ready()
    finally:
        link.stop()


def test_a_process_that_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: EngineClient) -> None:
        streams = [client.open(RequestSpec(prompt, LONG)) for prompt in PROMPTS]
        done = await answer(client, (1, 2, 3))
        assert done.finished
        await streams[0].read()
        os.kill(link.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineError, match="killed by SIGKILL.*out of memory"):
                while await stream.read():
                    pass
            stream.close()
        assert not client.alive and await client.stalled_seconds() == inf
        with pytest.raises(EngineError, match="SIGKILL"):
            client.open(RequestSpec((1, 2), GREEDY))

    with sim_process() as link:
        talk(link, scenario)
    assert caplog.text.count("killed by SIGKILL") == 1  # on stderr, as no request may be open


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
        stream = client.open(RequestSpec((1, 2, 3), LONG))
        with pytest.raises(EngineError, match=match):
            while await stream.read():
                pass
        stream.close()
        assert (await client.stalled_seconds(5) < 5) is alive
        if alive:
            assert (await answer(client, (1, 2, 3))).finished
        else:
            with pytest.raises(EngineError, match=match):
                client.open(RequestSpec((1, 2), GREEDY))

    with sim_process(**script) as link:
        talk(link, scenario)


def test_a_stop_refuses_open_requests() -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.open(RequestSpec((1, 2, 3), LONG))
        await stream.read()
        start = time.monotonic()
        await client.shutdown()
        assert time.monotonic() - start < 5
        with pytest.raises(EngineError, match="was shut down"):
            while await stream.read():
                pass
        with pytest.raises(EngineError, match="is shut down"):
            client.open(RequestSpec((1, 2), GREEDY))

    with sim_process() as link:
        talk(link, scenario)
        assert gone(link.pid) and not link.alive


def test_a_stop_of_a_process_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.open(RequestSpec((1, 2, 3), LONG))
        await stream.read()
        os.kill(link.pid, signal.SIGSTOP)
        os.waitpid(link.pid, os.WUNTRACED)  # on a busy machine its threads stop one after another
        assert await client.stalled_seconds(0.1) >= 0.1
        await client.shutdown()
        with pytest.raises(EngineError, match="SIGKILL"):
            while await stream.read():
                pass

    monkeypatch.setattr(process, "STOP_SECONDS", 0.3)
    with sim_process() as link:
        talk(link, scenario)
        assert gone(link.pid)
    assert "did not end in 0.3 s and is killed" in caplog.text


def test_a_process_that_is_stopped_is_noticed_by_its_silence() -> None:
    async def scenario(client: EngineClient) -> None:
        assert await client.stalled_seconds() == 0.0
        os.kill(link.pid, signal.SIGSTOP)
        os.waitpid(link.pid, os.WUNTRACED)
        first, second = [await client.stalled_seconds(0.05) for _ in range(2)]
        assert 0.05 <= first < second
        os.kill(link.pid, signal.SIGCONT)
        while await client.stalled_seconds(0.5):
            pass

    with sim_process() as link:
        talk(link, scenario)


def test_signals_do_not_end_the_engine() -> None:
    async def scenario(client: EngineClient) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(link.pid, number)
        assert (await answer(client, (1, 2, 3))).finished

    with sim_process() as link:
        assert os.getpgid(link.pid) != os.getpgid(0)  # nor does the terminal's Ctrl-C reach it
        talk(link, scenario)


def test_closed_streams_free_their_pages() -> None:
    async def scenario(client: EngineClient) -> None:
        streams = [client.open(RequestSpec((1, 2, 3), LONG)) for _ in range(32)]
        await streams[-1].read()
        assert client.stats.num_live_pages > 0
        for stream in streams:
            stream.close()
        await answer(client, (1, 2, 3))
        assert client.stats.num_live_pages == 0 and client.num_open == 0

    with sim_process() as link:
        talk(link, scenario)


def is_idle(pid: int) -> bool:
    """True if all threads of a process sleep for 0.2 s, in which it would begin 100 steps. A thread
    that only waits for a CPU does not sleep.
    """
    for _ in range(40):
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        if any(stat.rpartition(")")[2].split()[0] != "S" for stat in stats):
            return False
        time.sleep(0.005)
    return True


class SlowListener:
    """Blocks on news until ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.times: list[SequenceTimes] = []

    def receive(self, answer: Answer) -> None:
        self.go.wait()
        if len(self.times) < 64:  # afterwards the link is stopped
            assert isinstance(answer, News), answer
            self.times += [delta.times for delta in answer.deltas if delta.times is not None]


def test_a_server_that_does_not_read_delays_no_step() -> None:
    listener = SlowListener()
    with sim_process() as link:
        link.connect(listener.receive)
        sampling = replace(LONG, max_tokens=200)
        for number in range(64):  # more news than a socket's buffer holds
            link.send(Submission(str(number), RequestSpec((1, 2, 3), sampling)))
        wait_until(lambda: is_idle(link.pid), "the engine has done its part")
        woken = time.monotonic()
        listener.go.set()
        wait_until(lambda: len(listener.times) == 64, "all news are read")
    assert max(times.finished for times in listener.times) < woken
