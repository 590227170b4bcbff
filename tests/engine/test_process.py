"""The engine in its own process: its start, answers equal to an in-process engine's, its end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
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
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.process import EngineProcess
from jaxinfer.engine.link.spawn import spawn
from jaxinfer.engine.link.wire import Submission
from jaxinfer.engine.start.start import start_engine
from jaxinfer.models import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.engine_process import GREEDY, PROMPTS, answer, talk
from kit.engines import run, tokens
from kit.server_process import gone, wait_until
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json


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
    engine = start_engine(config)
    expected = {
        name: run(
            engine, PROMPTS, case, together=False
        )  # alone, since rounding depends on the bucket
        for name, case in CASES.items()
    }
    assert expected["stop string"][0].outputs[0].stop_reason == "aaa"
    assert expected["logprobs"][0].prompt_logprobs
    link = EngineProcess(config, spawn())
    ready = link.ready()
    assert (ready.facts, ready.limits) == (engine.facts, engine.limits)
    assert ready.stats.num_executables == engine.stats().num_executables
    assert ready.tokenizer is not None
    assert ready.tokenizer.decode(PROMPTS[-1]) == "".join(map(chr, PROMPTS[-1]))

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
            client.open(RequestSpec((1,), GREEDY, cache_salt="\ud800"))
        assert client.num_open == 0 and await client.stalled_seconds(5) < 5
        assert client.stats.num_late_compiles == 0
        assert client.stats.num_live_pages == 0

    talk(link, scenario)


def test_a_prompt_crosses_the_socket_as_bytes() -> None:
    spec = RequestSpec((1, 2, 1 << 20), SamplingParams(max_tokens=3), 4, "salt")
    sent = Submission("r", spec, "client", has_last_form=True, is_whole=True)
    packed = sent.packed()
    assert not packed.spec.prompt_token_ids and len(packed.prompt) == 12
    wire = msgspec.msgpack.encode(packed)
    read = msgspec.msgpack.decode(wire, type=Submission).unpacked()
    assert isinstance(read.spec.prompt_token_ids, IntLog)
    assert replace(read, spec=replace(read.spec, prompt_token_ids=(1, 2, 1 << 20))) == sent


def test_draws_without_a_seed_differ_from_server_to_server(config: EngineConfig) -> None:
    """Those of ``LLM`` follow from the seed 0, as in vLLM."""
    hot = replace(GREEDY, temperature=2.0)

    def drawn(seed: int | None, *, serves: bool) -> list[list[int]]:
        engine = start_engine(dataclasses.replace(config, seed=seed), serves_early=serves)
        found = tokens(run(engine, PROMPTS[:1], hot))
        engine.close()
        return found

    assert drawn(None, serves=True) != drawn(None, serves=True)
    assert drawn(None, serves=False) == drawn(0, serves=False) == drawn(0, serves=True)


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
def test_build_errors_keep_their_class_and_message(
    config: EngineConfig,
    changes: dict[str, Any],
    kind: type[JaxinferError],
    match: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = dataclasses.replace(config, **changes)
    with pytest.raises(JaxinferError) as expected:
        start_engine(broken)
    link = EngineProcess(broken, spawn())
    with pytest.raises(kind, match=match) as found:
        link.ready()
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
    assert not capfd.readouterr().err
    assert gone(link.pid) and not link.alive


NEWS_AT_ONCE = """
import threading
from jaxinfer.engine.link import child
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.loop.engine import Engine

Engine.has_work = property(lambda engine: not told.is_set())
told, connect = threading.Event(), EngineThread.connect

def connect_and_wait(thread, listener):
    connect(thread, lambda news: (listener(news), told.set()))
    told.wait(10)

EngineThread.connect = connect_and_wait
child.main()
"""


def test_news_follow_the_message_that_the_engine_is_ready(config: EngineConfig) -> None:
    """An executable that was loaded after the first ones is news before any request."""
    link = EngineProcess(config, spawn((sys.executable, "-c", NEWS_AT_ONCE)))
    assert link.ready().stats.num_executables
    link.stop()


def test_a_process_that_ends_while_it_starts(config: EngineConfig) -> None:
    link = EngineProcess(config, spawn((sys.executable, "-c", "raise SystemExit(3)")))
    with pytest.raises(EngineError, match="exited with code 3 while it was starting"):
        link.ready()


# the real start, which prints its imports: JAX, then the server's message, then the rest
IMPORTING = """
import sys
from jaxinfer.engine.link import child

def load(settings):
    def printing():
        heavy = sorted({"jax", "flax", "jaxinfer.engine.start.build", "orbax"} & set(sys.modules))
        print("before the message:", *heavy, file=sys.stderr, flush=True)
        return settings()

    return child.load_planner(printing)

child.main(load)
"""


def test_jax_is_imported_before_the_server_sends_the_config(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    with spawn((sys.executable, "-c", IMPORTING)) as spawned:
        printed = ""

        def has_printed() -> bool:
            nonlocal printed
            printed += capfd.readouterr().err
            return printed.endswith("\n")

        wait_until(has_printed, "it prints its imports", 30)
        assert printed == "before the message: jax\n"
        link = EngineProcess(config, spawned)
        assert link.ready().facts.vocab_size == TINY_VOCAB_SIZE
        link.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_library_pages_are_released_after_the_start(config: EngineConfig) -> None:
    link = EngineProcess(config, spawn())
    link.ready()

    def resident_of_files() -> int:
        pages = int(Path(f"/proc/{link.pid}/statm").read_text().split()[2])
        return pages * os.sysconf("SC_PAGESIZE")

    try:
        wait_until(lambda: resident_of_files() < 40 << 20, "150 MiB of libraries are released", 10)
    finally:
        link.stop()


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["start", "import"])
def test_a_process_ends_if_no_config_is_sent(seconds: float) -> None:
    with spawn() as closed:
        time.sleep(seconds)
        closed.end.close()  # as if the server's process had gone
        closed.process.wait(5)
        assert closed.process.returncode == -signal.SIGKILL
    with spawn() as killed:
        time.sleep(seconds)
    assert killed.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0.0, id="start"),
        pytest.param(0.3, id="import"),
        pytest.param(0.9, id="jax"),
        pytest.param(2.5, id="compile", marks=pytest.mark.nightly),
    ],
)
def test_a_stop_while_it_is_built(
    config: EngineConfig, seconds: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = EngineProcess(dataclasses.replace(config, cache_dir=str(tmp_path)), spawn())
    time.sleep(seconds)
    link.stop()
    assert gone(link.pid) and not link.alive
    assert not capfd.readouterr().err


COLLECTING = """
import gc, time
from jaxinfer.engine.link.child import main
from jaxinfer.engine.link.wire import Planned
from kit.sim_executor import sim_limits
from kit.tokenizers import tiny_tokenizer_spec

def busy(*_):
    gc.callbacks.remove(busy)
    (folder / "collecting").touch()
    time.sleep(30)

def build():
    gc.callbacks.append(busy)
    try:
        gc.collect()
        time.sleep(30)
    finally:
        (folder / "cleaned_up").touch()

main(lambda _: lambda *_: (Planned(sim_limits(4), tiny_tokenizer_spec()), build))
"""


def test_a_stop_while_garbage_is_collected(
    config: EngineConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python drops exceptions that are raised in the garbage collector."""
    kit = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})"
    code = f"{kit}; from pathlib import Path; folder = Path({str(tmp_path)!r}){COLLECTING}"
    link = EngineProcess(config, spawn([sys.executable, "-c", code]))
    wait_until((tmp_path / "collecting").exists, "it builds and collects", 30)
    link.stop()
    assert gone(link.pid) and (tmp_path / "cleaned_up").exists()
    assert not capfd.readouterr().err


PARENT = """
import sys, time
from jaxinfer.core.config import EngineConfig
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.process import EngineProcess
from jaxinfer.engine.link.spawn import spawn
import msgspec
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
link = EngineProcess(config, spawn())
print(link.pid, flush=True)
if sys.argv[2] == "ready":
    link.ready()
    assert not {"jax", "flax"} & set(sys.modules)
    print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["ready", "building"])
def test_the_engine_ends_when_the_server_is_killed(
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
        wait_until(lambda: gone(pid), "the engine has ended too", 2)
