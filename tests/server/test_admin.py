"""Routes that change the engine: the admin key, pauses, new weights, the prefix cache."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ArgumentError, CheckpointError, ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.process import EngineProcess
from jaxinfer.engine.link.spawn import spawn
from jaxinfer.engine.start.start import start_engine
from jaxinfer.models.registry import build_model
from jaxinfer.server.routes.admin import ROUTES
from kit.brake import Brake
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.engine_process import answer, talk
from kit.engines import tiny_engine
from kit.server import Serving, serving
from kit.server_process import wait_until

ADMIN = {"Authorization": "Bearer admin-secret"}
USER = {"Authorization": "Bearer user-secret"}
PROMPT = list(range(3, 40))
CONFIG = tiny_llama_config()


def write_model(folder: Path, seed: int, **changes: Any) -> Path:
    config = CONFIG | changes
    return write_hf_folder(
        folder, config, random_hf_tensors(build_model(config, "float32"), seed=seed)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {
        "first": write_model(parent / "first", 0),
        "second": write_model(parent / "second", 1),
        "wider": write_model(parent / "wider", 1, intermediate_size=256),
    }


@pytest.fixture(scope="module")
def config(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(folders["first"]),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=2,
        max_model_len=64,
        max_num_batched_tokens=16,
        page_size=8,
        num_pages=33,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[Serving]:
    with serving(
        start_engine(config), api_key=("user-secret",), admin_api_key=("admin-secret",)
    ) as made:
        yield made


def post(server: Serving, path: str, key: Any = ADMIN, **options: Any) -> httpx.Response:
    with server.client(headers=key) as client:
        return client.post(path, **options)


def complete(server: Serving, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    body |= fields
    response = post(server, "/v1/generate", USER, json=body)
    assert response.status_code == 200, response.text
    return response.json()["outputs"][0]


@pytest.mark.parametrize(("method", "path"), [(one.method, one.path) for one in ROUTES])
def test_only_the_admin_key_opens_a_route(server: Serving, method: str, path: str) -> None:
    body = {"json": {"path": "nowhere"}}
    for key in ({}, USER, {"Authorization": "Bearer wrong"}, {"Authorization": "admin-secret"}):
        for spelling in (path, path + "/"):
            with server.client(headers=key) as client:
                refused = client.request(method, spelling, **body)
            assert refused.status_code == 401, spelling
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert key is not USER or "the admin key is missing or wrong" in refused.text


def test_the_admin_key_opens_the_other_routes_too(server: Serving) -> None:
    with server.client(headers=ADMIN) as client:
        assert client.get("/v1/models").status_code == 200


def test_without_an_admin_key_there_are_no_such_routes() -> None:
    with serving(tiny_engine(), api_key=("user-secret",)) as made:
        for route in ROUTES:
            with made.client(headers=USER) as client:
                assert client.request(route.method, route.path).status_code == 404


def test_keys_that_all_clients_have_are_no_admin_keys() -> None:
    with pytest.raises(ConfigError, match="admin_api_key must differ from api_key"):
        ServerConfig(api_key=("a", "b"), admin_api_key=("b",))
    with pytest.raises(ConfigError, match="admin_api_key must be printable"):
        ServerConfig(admin_api_key=("",))


def test_new_weights_are_served_and_wrong_ones_leave_the_old(
    server: Serving, folders: dict[str, Path]
) -> None:
    first = complete(server)["token_ids"]
    for name, message in (("wider", "differs from the engine's model in layers"), ("none", "none")):
        path = str(folders["first"].parent / name)
        refused = post(server, "/update_weights", json={"path": path})
        assert refused.status_code == 400 and message in refused.text
        assert refused.json()["error"]["param"] == "path"
    assert post(server, "/update_weights", json={}).status_code == 400
    assert complete(server)["token_ids"] == first
    done = post(server, "/update_weights", json={"path": str(folders["second"])})
    assert (done.status_code, done.json()) == (200, {"status": "updated"})
    assert server.engine.stats().num_cached_pages == 0
    assert complete(server)["token_ids"] != first
    post(server, "/update_weights?mode=abort", json={"path": str(folders["first"])})
    assert complete(server)["token_ids"] == first


def test_the_prefix_cache_is_reset(server: Serving) -> None:
    complete(server)
    assert server.engine.stats().num_cached_pages > 0
    assert post(server, "/reset_prefix_cache").json() == {"status": "reset"}
    assert server.engine.stats().num_cached_pages == 0


def test_a_pause_holds_requests(server: Serving) -> None:
    expected = complete(server)["token_ids"]
    assert post(server, "/pause?mode=wait").json() == {"status": "paused"}
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(complete(server)["token_ids"]))
    thread.start()
    time.sleep(0.3)
    assert not answers and server.engine.stats().num_running == 0
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert post(server, "/reset_prefix_cache", json={"mode": "abort"}).status_code == 200
    assert not answers
    assert post(server, "/resume").json() == {"status": "resumed"}
    thread.join(30)
    assert answers == [expected]


def test_an_aborting_pause_ends_open_requests(server: Serving) -> None:
    ends: list[Any] = []
    many = {"n": 2, "max_tokens": 26}

    def run() -> None:
        body = {"prompt": PROMPT, "temperature": 1, "ignore_eos": True} | many
        ends.append(post(server, "/v1/completions", USER, json=body).json())

    threads = [threading.Thread(target=run) for _ in range(8)]
    start_and_stop_midway(server, threads)
    assert post(server, "/pause", json={"mode": "abort"}).status_code == 200
    post(server, "/resume")
    for thread in threads:
        thread.join(30)
    reasons = [choice["finish_reason"] for end in ends for choice in end["choices"]]
    assert len(reasons) == 16 and "abort" in reasons


def start_and_stop_midway(server: Serving, threads: list[threading.Thread]) -> None:
    """Let each thread send a request; the engine is stopped in them until the next command."""
    client = server.service.client
    link: Any = client._link
    brake = Brake(server.engine, link)
    brake.close()
    for thread in threads:
        thread.start()
    wait_until(lambda: client.num_open == len(threads), "all requests are open")
    wait_until(lambda: server.engine.stats().num_running > 0, "one runs")
    brake.arm()


def get(server: Serving, path: str) -> Any:
    with server.client(headers=ADMIN) as client:
        return client.get(path).json()


def tokens(server: Serving, count: int) -> dict[str, Any]:
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": count}}
    return post(server, "/inference/v1/generate", USER, json=body).json()["choices"][0]


def test_requests_go_on_with_new_weights(server: Serving, folders: dict[str, Path]) -> None:
    """A pause that keeps requests open, an update, and the versions of the answer's spans."""
    alone, version = tokens(server, 20), get(server, "/weight_info")["weight_version"]
    answers: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(tokens(server, 20))) for _ in range(2)
    ]
    start_and_stop_midway(server, threads)
    assert post(server, "/pause?mode=keep").status_code == 200
    assert get(server, "/is_paused") == {"is_paused": True}
    for name in ("second", "first"):
        post(server, "/update_weights", json={"path": str(folders[name])})
    assert get(server, "/weight_info") == {"weight_version": version + 2}
    post(server, "/resume")
    for thread in threads:
        thread.join(30)
    assert get(server, "/is_paused") == {"is_paused": False}
    for answer_ in answers:  # the same weights in the end, and KV computed with them
        assert answer_["token_ids"] == alone["token_ids"]
        assert {span["version"] for span in answer_["weight_versions"]} <= {version, version + 2}
        assert answer_["weight_versions"][-1] == {
            "version": version + 2,
            "start": answer_["weight_versions"][-1]["start"],
            "end": len(alone["token_ids"]),
        }


def test_a_server_sleeps(server: Serving, folders: dict[str, Path]) -> None:
    expected = complete(server)["token_ids"]
    assert get(server, "/is_sleeping") == {"is_sleeping": False}
    assert post(server, "/sleep").status_code == 200
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    with server.client(headers=ADMIN) as client:
        shown = client.get("/metrics").text
    assert "vllm:engine_sleep_state{" in shown
    assert [
        line.rpartition(" ")[2]
        for line in shown.splitlines()
        if "engine_sleep_state{" in line and "weights_offloaded" in line
    ] == ["1.0"]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(complete(server)["token_ids"]))
    thread.start()
    time.sleep(0.1)
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert post(server, "/wake_up?tags=weights").status_code == 200 and not answers
    assert post(server, "/wake_up", params={"tags": ["weights", "kv_cache"]}).status_code == 200
    thread.join(30)
    assert answers == [expected]
    post(server, "/sleep?level=2&mode=wait")
    post(server, "/wake_up")
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    post(server, "/update_weights", json={"path": str(folders["first"])})
    assert complete(server)["token_ids"] == expected
    for query, param in (("level=3", "level"), ("mode=now", "mode"), ("level=x", "level")):
        refused = post(server, f"/sleep?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    refused = post(server, "/wake_up?tags=kv")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tags"
    assert get(server, "/is_sleeping") == {"is_sleeping": False}


@pytest.mark.parametrize("path", ["/pause", "/reset_prefix_cache", "/update_weights"])
def test_an_unknown_mode_is_named(server: Serving, path: str) -> None:
    for options in ({"params": {"mode": "now"}}, {}):
        body = {"path": "x"} | ({} if options else {"mode": "now"})
        refused = post(server, path, json=body, **options)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "mode"


def test_the_same_commands_reach_an_engine_in_its_own_process(
    config: EngineConfig, folders: dict[str, Path]
) -> None:
    async def scenario(client: EngineClient) -> None:
        prompt = tuple(PROMPT)
        first = (await answer(client, prompt)).outputs[0].token_ids
        await client.control("update_weights", path=str(folders["second"]))
        second = await answer(client, prompt)
        assert second.outputs[0].token_ids != first and second.num_cached_tokens == 0
        (folders["second"].parent / "empty").mkdir(exist_ok=True)
        broken = write_hf_folder(folders["second"].parent / "broken", CONFIG, {})
        assert (await client.control("report")).weight_version == 1
        await client.control("sleep", mode="abort")
        held = asyncio.create_task(answer(client, prompt))
        assert (await client.control("report")).asleep == ("weights", "kv_cache")
        with pytest.raises(ArgumentError, match="tags must be of weights, kv_cache, got 'kv'"):
            await client.control("wake_up", tags=("kv",))
        assert (await client.control("wake_up")).asleep == () and not held.done()
        assert (await held).outputs[0].token_ids == second.outputs[0].token_ids
        with pytest.raises(CheckpointError, match="has no tensor model.embed_tokens.weight"):
            await client.control("update_weights", path=str(broken))
        await client.control("pause")
        held = asyncio.create_task(answer(client, prompt))
        await client.control("reset_prefix_cache")
        assert not held.done()
        await client.control("update_weights", path=str(folders["first"]))
        await client.control("resume")
        assert (await held).outputs[0].token_ids == first

    talk(EngineProcess(config, spawn()).ready(), scenario)
